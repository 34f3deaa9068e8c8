"""A hook of mkdocs: the site has the pages of reports/ too, and a page for each framework.

Nothing is run. The frameworks' pages are made of the registry, of the known defects and of the committed records.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.reach.measured import OptionReach, load
from benchmarks.reach.options import SOURCES, OptionStatus, status
from meshmark.adapter.contract import Adapter
from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.conformance.finding import ClauseResult
from meshmark.conformance.reproducers import Reproducer, failed_clauses, read_reproducers
from meshmark.report.results import CaseResult, results
from meshmark.report.table import inline, table
from meshmark.report.which import measured_rows
from meshmark.text import pluralize
from studies import docs_formulas, pages

ROOT = Path(__file__).parents[1]
FRAMEWORKS = {
    "pytorch": "PyTorch",
    "deepspeed": "DeepSpeed",
    "megatron-core": "Megatron-Core",
    "accelerate": "Accelerate",
    "fairscale": "FairScale",
    "lightning-fabric": "Lightning Fabric",
    "horovod": "Horovod",
}
"""Name of each framework's page, and its title."""
_TORCH = ("torch", "pytorch")


def on_files(files: Any, config: Any) -> Any:  # noqa: ANN401
    """Add the pages and pictures of reports/, and the frameworks' pages, to the files of the site."""
    from mkdocs.structure.files import File

    for path in sorted([*(ROOT / "reports").glob("*.md"), *(ROOT / "reports").glob("*.svg")]):
        files.append(File.generated(config, f"reports/{path.name}", abs_src_path=str(path)))
    for name in FRAMEWORKS:
        files.append(File.generated(config, f"frameworks/{name}.md", content=framework_page(name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:  # noqa: ANN401
    """Mark a page of reports/ as stale or not as of today, which its committed text cannot know."""
    place = Path(page.file.src_uri)
    if page.file.src_uri == "reports/gaps.md":
        markdown = _SCRIPT.sub(_folded, pages.gaps())
    known = place.parent.name == "reports" and place.stem in pages.PAGES
    return pages.marked(place.stem, markdown) if known else markdown


_SCRIPT = re.compile(r"^    (\S[^\n]*)\n\n(```python\n.*?\n```)$", re.MULTILINE | re.DOTALL)
"""A command on a line of its own, and the script that it runs."""


def _folded(script: re.Match[str]) -> str:
    """Return a script below a line that opens it. In the repository the page links to the scripts instead."""
    return f'??? example "Script. Run it with: {script[1]}"\n\n' + textwrap.indent(script[2], "    ")


def framework_page(name: str) -> str:
    """Return the page of a framework: its adapters, its defects, what was measured, and what is refused.

    Raises `KeyError` for a framework that has no page.
    """
    adapters = {key: load_adapter(target) for key, target in builtin_adapters().items()}
    own = {key: adapter for key, adapter in adapters.items() if _framework_of(adapter) == name}
    defects = [each for each in read_reproducers() if _page_of(each) == name]
    measured = results(pages.measured())
    parts = [
        f"# {FRAMEWORKS[name]}",
        f"Run it on two ranks:\n\n    pytest suites --adapters {_distributed(own)} --world 2",
        "## What it gets wrong",
        _defects(defects),
        "## What it keeps",
        _clauses(own),
        "## What was measured",
        _measured([r for r in measured if r.case.adapter in own], measured),
        "## Adapters",
        "What each supports. Anything else is skipped with a reason, never run as something else.",
        table([_adapter_row(key, adapter) for key, adapter in own.items()], keys=1),
        "## Memory and traffic",
        *_formulas(own),
        "## Options",
        _options(name),
        "## What is refused",
        _refused(own),
    ]
    return "\n\n".join(parts) + "\n"


def _distributed(adapters: dict[str, type[Adapter]]) -> str:
    """Return the adapter to try first: the first that runs on several ranks, of data parallelism if any is."""
    several = [name for name, adapter in adapters.items() if adapter.capabilities.degrees]
    return next((name for name in several if "dp" in adapters[name].capabilities.degrees), several[0])


def _framework_of(adapter: type[Adapter]) -> str | None:
    """Return the page that an adapter belongs to: that of the first package that it needs, PyTorch's if none."""
    name = adapter.requires[0].distribution if adapter.requires else "pytorch"
    return name if name in FRAMEWORKS else None


def _page_of(defect: Reproducer) -> str:
    return "pytorch" if defect.framework in _TORCH else defect.framework


def _defects(defects: Sequence[Reproducer]) -> str:
    if not defects:
        return "**No defect is known** that shows in a documented configuration."
    failed = failed_clauses()
    count = f"**{pluralize(len(defects), 'defect')} known**, each with a script that shows it without Meshmark:"
    lines = [count, ""]
    for each in defects:
        adapters, version = ", ".join(failed.get(each.name, {})), f"{each.framework} {each.versions[each.framework]}"
        fails = f" Clauses fail by it under {adapters}." if adapters else ""
        issue = f" [Upstream issue]({each.upstream})." if each.upstream else ""
        lines.append(f"- [{each.title}](../reports/gaps.md#{each.name}), {version}. {each.symptom}{fails}{issue}")
    return "\n".join(lines)


def _clauses(adapters: dict[str, type[Adapter]]) -> str:
    """Return what came of the clauses, a line an adapter."""
    lines = []
    for column in pages.clauses_of("conformance").columns:
        if column.base.adapter in adapters:
            by = {
                result: [name for name, finding in column.findings.items() if finding.result is result]
                for result in ClauseResult
            }
            parts = [
                f"{word} {', '.join(by[result])}"
                for result, word in (
                    (ClauseResult.PASS, "keeps"),
                    (ClauseResult.KNOWN_GAP, "**fails**, a known gap:"),
                    (ClauseResult.FAIL, "**fails**"),
                    (ClauseResult.UNSUPPORTED, "gives no answer to"),
                )
                if by[result]
            ]
            lines.append(f"- **{column.title}** ({column.base.layout.id}) {'; '.join(parts)}.")
    about = "The evidence of each is on the page [Conformance](../reports/conformance.md)."
    return "\n".join([*lines, "", about]) if lines else "Its clauses are in [the roster](../reports/roster.md)."


def _measured(own: Sequence[CaseResult], every: Sequence[CaseResult]) -> str:
    """Return a table of memory and traffic, in shares of DDP's."""
    judged = [result for result in own if result.correct is not None]
    if not judged:
        return "Its cases are in [the roster](../reports/roster.md)."
    right = sum(bool(result.correct) for result in judged)
    ids = {(r.case.adapter, r.case.layout.id) for r in own}
    rows = [row for row in measured_rows(every) if (row["adapter"], row["layout"]) in ids]
    head = f"{right} of {len(judged)} cases train correctly. In brackets is the share of DDP's on as many ranks."
    return f"{head}\n\n{table(rows, keys=2)}"


def _adapter_row(name: str, adapter: type[Adapter]) -> dict[str, object]:
    can = adapter.capabilities
    return {
        "adapter": name,
        "parallel axes": ", ".join(sorted(can.degrees)) or "none",
        "ZeRO": ", ".join(map(str, sorted(can.zero_stages))),
        "schedules": ", ".join(sorted(can.schedules)) if "pp" in can.degrees else "",
        "precisions": ", ".join(sorted(map(str, can.precisions))),
        "track": adapter.track,
    }


def _formulas(adapters: dict[str, type[Adapter]]) -> list[str]:
    rows = docs_formulas.formula_rows(adapters)
    return [docs_formulas.NOTE, table(rows, keys=2)] if rows else ["No adapter that is installed here is planned."]


_OPTIONS = {"megatron-core": "Megatron", "lightning-fabric": "Fabric"}
"""Names of frameworks in the record of reach, where they differ from their page's title."""


def _options(name: str) -> str:
    """Return the public options of a framework by what is known of them, from the committed record of reach."""
    found, framework = load(), _OPTIONS.get(name, FRAMEWORKS[name])
    rows: list[dict[str, object]] = [
        {"of": source.name.removeprefix(f"{framework} "), **by}
        for source in SOURCES
        if source.framework == framework and (by := _by_status(source.name, found.options[source.name]))
    ]
    if not rows:
        return "Its options were not counted."
    about = (
        f"Those of {framework} {found.versions[framework]}. *Judged*: a judged pass gave it a value other than its "
        "default. *Refused*: it needs what a CPU run has not got. *Not asked*: no judged pass varies it. Options that "
        "do not change training are left out. [Reach](../reports/reach.md) has all, and how it was measured."
    )
    return f"{about}\n\n{table(rows, keys=1)}"


def _by_status(source: str, options: dict[str, OptionReach]) -> dict[str, str]:
    """Return the names of a source's options by standing, or nothing if none changes training."""
    known = {name: status(source, name, each.default, each.values)[0] for name, each in options.items()}
    asked = (OptionStatus.JUDGED, OptionStatus.REFUSED, OptionStatus.NOT_ASKED)
    by = {str(each): ", ".join(name for name, own in known.items() if own is each) for each in asked}
    return by if any(by.values()) else {}


def _refused(adapters: dict[str, type[Adapter]]) -> str:
    reasons: dict[str, list[str]] = {}
    for name, adapter in adapters.items():
        for what, why in adapter.capabilities.lacks.items():
            reasons.setdefault(f"{what}: {why}", []).append(name)
    return "\n".join(f"- {inline(reason)} ({', '.join(names)})" for reason, names in reasons.items()) or "Nothing."
