"""The pages of docs/: links that lead somewhere, no page left out of the site, and words that say what the code does.

`make docs` builds the site, with warnings as errors; here is what can be known without."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from meshmark.cli.commands import main
from meshmark.cli.suite_file import CASES, GATES, OPTIONS
from meshmark.conformance.reproducers import read_reproducers
from meshmark.plan.frameworks import FRAMEWORKS
from meshmark.plan.layout_columns import READ
from meshmark.records.schema import schema
from meshmark.spec import workload
from meshmark.spec.hardware import GPUS
from meshmark.spec.layout import GLOSSARY
from studies import adapter_list, docs_links, docs_schema, docs_site

ROOT = Path(__file__).parent.parent
PAGES = sorted(ROOT.glob("docs/**/*.md"))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as mkdocs and GitHub make them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    given = set(re.findall(r'^<a id="([\w-]+)">', page.read_text(), re.MULTILINE))
    return given | {re.sub(r"[^\w\s-]", "", title).strip().lower().replace(" ", "-") for title in titles}


RESULTS = sorted(ROOT.glob("reports/*.md"))
TOP = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


@pytest.mark.parametrize("page", [*TOP, *PAGES, *RESULTS], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http", "mailto:")):
            path, _, anchor = target.partition("#")
            there = page.parent / path if path else page
            assert there.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(there), f"{page.name}: {target}"


def test_an_adapter_s_module_brings_workloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As docs/adapter.md shows it."""
    monkeypatch.setattr(workload, "WORKLOADS", dict(workload.WORKLOADS))
    page = (ROOT / "docs" / "adapter.md").read_text()
    (shown,) = re.findall(r"```python\n(  from dataclasses import replace.*?)```", page, re.DOTALL)
    adapter = (ROOT / "examples" / "first.py").read_text()
    (tmp_path / "mine.py").write_text(f"{adapter}\n{textwrap.dedent(shown)}")
    chosen = ["cases", "--adapter", f"{tmp_path}/mine.py:First", "--workload", "gpt-mini-loose"]
    assert main(chosen) == 0
    assert "first-dp2.mb4-gpt-mini-loose-fp32" in capsys.readouterr().out


def test_every_page_is_in_the_site() -> None:
    said = re.sub(r"!!python/\S+", "''", (ROOT / "mkdocs.yml").read_text())
    listed = set(re.findall(r"[\w/-]+\.md", str(yaml.safe_load(said)["nav"])))
    reports = {f"reports/{page.name}" for page in ROOT.glob("reports/*.md")}
    frameworks = {f"frameworks/{name}.md" for name in docs_site.FRAMEWORKS}
    assert listed == {page.name for page in PAGES} | reports | frameworks


def test_the_list_of_adapters_is_up_to_date() -> None:
    assert adapter_list.PAGE.read_text() == adapter_list.page(), "run `python -m studies.adapter_list`"


@pytest.mark.parametrize("name", docs_site.FRAMEWORKS)
def test_a_framework_s_page_lists_its_defects_and_what_was_measured(name: str) -> None:
    page = docs_site.framework_page(name)
    defects = [each for each in read_reproducers() if each.framework.replace("torch", "pytorch") == name]
    assert all(f"](../reports/gaps.md#{each.name})" in page for each in defects)
    assert (f"**{len(defects)} defect" if defects else "**No defect is known**") in page
    assert "cases train correctly" in page or "the roster" in page
    assert not re.search(r"\]\((?!\.\./|http)", page), "links lead to other pages of the site"


@pytest.mark.parametrize("page", RESULTS, ids=lambda page: page.name)
def test_pages_that_a_reader_is_sent_to_are_links(page: Path) -> None:
    """A path in words leads nowhere in the site. A command may name one."""
    text = re.sub(r"^ *```.*?^ *```|\]\([^)]*\)|`[^`]* [^`]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    named = re.findall(r"`?\b(?:reports|docs)/[\w-]+\.md`?", text)
    assert not named


def test_links_of_pages_are_rewritten_for_the_site() -> None:
    def rewritten(text: str, place: str) -> str:
        page = SimpleNamespace(file=SimpleNamespace(src_uri=place))
        return docs_links.on_page_markdown(text, page=page)

    assert rewritten("[the list](../reports/gaps.md#a)", "faq.md") == "[the list](reports/gaps.md#a)"
    assert rewritten("[words](../docs/glossary.md)", "reports/which.md") == "[words](../glossary.md)"
    assert rewritten("[one](../examples/first.py)", "adapter.md") == "one (examples/first.py)"
    with pytest.raises(FileNotFoundError, match="a page links to examples/none.py"):
        rewritten("[one](../examples/none.py)", "adapter.md")


def test_the_page_of_records_has_every_field() -> None:
    text = docs_schema.on_page_markdown((ROOT / "docs" / "records.md").read_text())
    said = schema()
    for name, one in said["$defs"].items():
        (part,) = re.findall(rf"^### {name}\n(.*?)(?=^### |\Z)", text, re.MULTILINE | re.DOTALL)
        assert not [field for field in one["properties"] if f"\n| `{field}` |" not in part]
    assert set(re.findall(r"\]\(#(\w+)\)", text)) <= {name.lower() for name in said["$defs"]}
    assert "[EquivalenceEvidence](#equivalenceevidence)" in text and docs_schema.MARK not in text


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("glossary.md", GLOSSARY),
        ("planner.md", READ),
        ("planner.md", GPUS),
        ("planner.md", FRAMEWORKS),
        ("ci.md", (*CASES, *OPTIONS, *GATES)),
    ],
    ids=["layouts", "columns", "gpus", "frameworks", "suite files"],
)
def test_a_page_names_all_that_there_is(page: str, words: tuple[str, ...]) -> None:
    text = (ROOT / "docs" / page).read_text()
    assert not [word for word in words if not re.search(rf"[`\s]{re.escape(word)}[`,\s]", text)]
