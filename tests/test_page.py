"""The interactive page: self-contained, with everything escaped, and alive in a real browser."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from meshmark.cli.commands import main
from meshmark.judge.deviation import Deviation, QuantityKind
from meshmark.records.record import EquivalenceEvidence, Outcome, Record, Status
from meshmark.records.record_file import Attempt, Ending, RecordFile, Session
from meshmark.report.charts import _dots, charts
from meshmark.report.results import Tradeoff, frontier, results
from meshmark.report.table import Cell, Rows, Table, bytes_cell, number, to_cell, yes_or_no
from meshmark.spec.layout import Layout
from tests.browser import chromium, clipped
from tests.factories import make_case, make_good, make_timed, make_timing, make_verdict
from tests.hostile_texts import HOSTILE
from tests.test_hostile_records import hostile_records

ROOT = Path(__file__).parent.parent
pytest.importorskip("plotly", reason='in the html extra: pip install "meshmark[html]"')
pytest.importorskip("itables", reason='in the html extra: pip install "meshmark[html]"')

WEIGHT = QuantityKind.GRADIENTS.of("head.weight")
WRONG = make_verdict(
    passed=False, summary="gradients/x is 9 x its noise", evidence={**make_verdict().evidence, "diagnosis": "summed"}
)
FSDP2 = "fsdp2-dp2.mb2-mini-fp32"
COMMAND = "pytest 'suites/test_equivalence.py::test_equivalence[fsdp2-dp2.mb2-mini-fp32]'"


class Page(HTMLParser):
    """Its elements, and the texts of some."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.scripts: dict[str, str] = {}
        self.texts: list[str] = []
        self._within: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self._within = dict(attrs).get("id") or "" if tag in ("script", "style") else None

    def handle_endtag(self, tag: str) -> None:
        self._within = None

    def handle_data(self, data: str) -> None:
        if self._within is None:
            self.texts.append(data)
        elif self._within:
            self.scripts[self._within] = self.scripts.get(self._within, "") + data

    def told(self) -> str:
        return " ".join(" ".join(self.texts).split())


GATED = "Failed: ddp: worse than baseline baselines/main: peak memory activations on rank 1: 1,000 -> 2,000"
"""Which no record tells by itself, beside what its verdicts tell."""


def records() -> list[Record | Session]:
    fsdp2 = make_case("fsdp2")
    deviation = Deviation(distance=3.0, scale=1.0, factor=1.0)
    equivalence = EquivalenceEvidence(
        deviations={WEIGHT: [deviation, deviation]}, noise={WEIGHT: [1.0, 1.0]}, factors={"gradients": 2.0}
    )
    hung = Outcome(status=Status.HUNG, rank=1, message="no end", stacks={1: "File a.py, line 7, in wait"})
    plain = dataclasses.replace(make_good().conformance, scenario="plain", base=make_case())
    session = Session(
        schema=2,
        session="s",
        command="pytest suites",
        device="cpu",
        attempts=[
            Attempt(
                test="t[fsdp2]", case=fsdp2.id, conforming=False, ending=Ending.FAILED, message="x", command=COMMAND
            ),
            Attempt(test="t[ddp]", case=make_case().id, conforming=False, ending=Ending.FAILED, message=GATED),
            Attempt(test="u[fsdp2]", case=fsdp2.id, conforming=False, ending=Ending.FAILED, message=GATED),
        ],
    )
    return [
        make_good(),
        make_timed(),
        make_good(case=fsdp2, verdicts=[WRONG], equivalence=equivalence),
        make_timed(case=make_case("gpipe"), outcome=hung),
        make_good(conformance=plain),
        session,
    ]


def write(folder: Path, *some: Record | Session) -> Path:
    with closing(RecordFile(folder)) as file:
        for one in some:
            file.append(one)
    assert main(["report", str(folder), "-o", str(folder / "report.html")]) == 0
    return folder / "report.html"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("page"), *records())


@pytest.fixture(scope="module")
def page(path: Path) -> Page:
    return Page(path.read_text())


def test_the_page_asks_nothing_of_any_network(page: Page) -> None:
    loaded = [value for _, name, value in page.attributes if name in ("src", "href")]
    assert loaded and all(value.startswith("#") for value in loaded), loaded
    policy = [value for tag, name, value in page.attributes if tag == "meta" and "default-src" in value]
    assert policy and policy[0].startswith("default-src 'none'") and "http" not in policy[0]


def test_every_failure_has_its_stack_and_the_command_that_repeats_it(page: Page) -> None:
    told = page.told()
    assert "fsdp2-dp2.mb2-mini-fp32: equivalence" in told and "Likely: summed" in told and COMMAND in told
    assert "gpipe-dp2.mb2-mini-fp32: hung, rank 1" in told and "--- stack of rank 1 File a.py, line 7" in told
    assert "pytest suites -k gpipe-dp2.mb2-mini-fp32" in told
    assert "t[fsdp2]" not in told, "its verdict tells of it"
    assert "t[ddp]" in told and "u[fsdp2]" in told and told.count("activations on rank 1: 1,000 -> 2,000") == 4


def test_what_is_drawn_is_what_was_recorded(page: Page) -> None:
    ratios = json.loads(page.scripts["ratios"])
    shown = {figure["label"]: figure["data"][0] for figure in ratios}
    assert shown["fsdp2-dp2.mb2-mini-fp32"]["z"] == [[1.5, 1.5]], "3 of 2 x 1 that are allowed"
    rates = json.loads(page.scripts["rates"])[0]["data"]
    assert [trace["y"] for trace in rates if trace["name"] == "result"] == [["ddp-dp2.mb2-mini-fp32"]]
    assert len(json.loads(page.scripts["memory-plot"])) == 3, "all cases, and each by rank"


def test_every_clause_s_cell_has_its_evidence(page: Page) -> None:
    cells = json.loads(page.scripts["cells"])
    keys = [value for tag, name, value in page.attributes if (tag, name) == ("button", "data-cell")]
    assert keys and set(keys) == set(cells) and all(found["evidence"] for found in cells.values())


def test_columns_sort_by_their_numbers(page: Page) -> None:
    orders = [float(value) for tag, name, value in page.attributes if (tag, name) == ("td", "data-order")]
    peaks = {float(r.peak.total) for r in make_good().memory.readings}
    assert peaks and peaks <= set(orders)
    assert bytes_cell(925 * 1024) == Cell(text="925 KiB", order=925 * 1024.0)
    assert bytes_cell(math.nan).order is None and to_cell(2).order == 2.0 and to_cell("dp2").order is None
    assert number(0.019, ".1%") == Cell(text="1.9%", order=0.019) and number(None) == Cell(text="")


def test_a_cell_has_the_same_emphasis_on_both_pages() -> None:
    struck = Cell(text="900 ±2%", order=900.0).strike("wrong run")
    assert (struck.struck, struck.text, struck.order) == ("900 ±2%", "wrong run", 900.0)
    assert (
        str(struck) == "~~900 ±2%~~ wrong run" and str(yes_or_no(False)) == "**no**" and str(yes_or_no(True)) == "yes"
    )


BROWSERS = ["<img src=x onerror=alert(1)>", "</script><script>alert(1)</script>", '"><svg onload=alert(1)>', "{{7*7}}"]


@pytest.fixture(scope="module")
def hostile_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    said = [text for text in (*HOSTILE.values(), *BROWSERS) if text.strip()]
    return write(tmp_path_factory.mktemp("hostile"), *(record for text in said for record in hostile_records(text)))


def test_a_hostile_text_is_text(hostile_path: Path, tmp_path: Path) -> None:
    """The page has the elements and attributes that it has of harmless texts, and shows what it was told."""
    said = [f"x{i}-" for i, text in enumerate([*HOSTILE.values(), *BROWSERS]) if text.strip()]
    path = write(tmp_path, *(record for text in said for record in hostile_records(text)))
    hostile, harmless = Page(hostile_path.read_text()), Page(path.read_text())
    assert hostile.tags == harmless.tags
    assert not [name for _, name, _ in hostile.attributes if name.startswith("on")]
    assert {name for _, name, _ in hostile.attributes} == {name for _, name, _ in harmless.attributes}
    assert all(math.isfinite(float(value)) for _, name, value in hostile.attributes if name == "data-order")
    assert "<script>alert(1)</script>" in hostile.told() and "\u202e" not in hostile.told()
    for name in ("rates", "memory-plot", "cells"):
        json.loads(hostile.scripts[name])


def test_without_its_libraries_the_command_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(RecordFile(tmp_path)) as file:
        file.append(make_good())
    monkeypatch.setitem(__import__("sys").modules, "itables", None)
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "x.html")]) == 2
    assert 'pip install "meshmark[html]"' in capsys.readouterr().err and not (tmp_path / "x.html").exists()


def timed_on(layout: Layout, adapter: str, seconds: float) -> list[Record]:
    case = make_case(adapter=adapter, layout=layout)
    steps = [[seconds] * 4] * layout.world_size
    return [make_good(case=case), make_timed(case=case, timing=make_timing(rank_step_seconds=steps))]


def test_scaling_joins_layouts_of_one_kind_alone() -> None:
    """ZeRO-1 on two ranks and ZeRO-3 on four were joined, which looked like a collapse."""
    kinds = (
        (Layout(dp=2, zero_stage=1), "deepspeed", 0.5),
        (Layout(dp=4, zero_stage=3), "deepspeed", 4.0),
        (Layout(dp=2), "ddp", 0.5),
        (Layout(dp=4), "ddp", 0.4),
    )
    found = results(record for kind in kinds for record in timed_on(*kind))
    (chart,) = [one for one in charts(found)["speed"] if one.id == "scaling"]
    (figure,) = chart.figures
    assert [trace["name"].partition(",")[0] for trace in figure["data"]] == ["ddp dp"]
    assert figure["layout"]["xaxis"]["tickvals"] == [2, 4], "and no three ranks"


def test_memory_is_drawn_as_ranks_are_added() -> None:
    """One kind of layout a figure, the fewest ranks first; what was run on one number of ranks has none."""
    kinds = ((Layout(dp=4), "ddp", 0.4), (Layout(dp=2), "ddp", 0.5), (Layout(dp=2, zero_stage=1), "deepspeed", 0.5))
    found = results(record for kind in kinds for record in timed_on(*kind))
    (chart,) = [one for one in charts(found)["memory"] if one.id == "memory-ranks"]
    every, ddp = chart.figures
    assert ddp["data"][0]["y"] == ["2 ranks", "4 ranks"] and every["data"][0]["y"][0] == "ddp dp: 2 ranks"
    assert sum(trace["x"][0] for trace in ddp["data"]) * 2**20 == make_good().memory.readings[0].peak.total


def test_the_frontier_has_what_nothing_else_beats_in_both() -> None:
    def point(peak_bytes: int, per_second: float) -> Tradeoff:
        result = results([make_good()])[0]
        return Tradeoff(result=result, peak_bytes=peak_bytes, per_second=per_second)

    lean, fast, beaten, worse = point(1, 1.0), point(3, 5.0), point(4, 5.0), point(2, 0.5)
    assert frontier([beaten, fast, worse, lean]) == [lean, fast]


def test_what_is_the_same_in_every_row_of_a_wide_table_is_said_once() -> None:
    rows: Rows = [{**{name: name for name in "abcdefg"}, "adapter": one, "bad": yes_or_no(False)} for one in ("x", "y")]
    said, narrow = Table(title="t", rows=rows).narrow
    assert "b: b; c: c" in said and narrow.columns == ["a", "adapter", "bad"], (
        "the first column, and what is bad, stays"
    )
    few: Rows = [{"a": 1, "b": 2}, {"a": 2, "b": 2}]
    assert Table(title="t", rows=few).narrow == ("", Table(title="t", rows=few))


# In a browser.


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


def opened(browser: Any, path: Path, **context: Any) -> tuple[Any, list[str]]:  # noqa: ANN401
    """The page when it is ready, and what it complained of or asked for."""
    page, said = browser.new_page(**context), list[str]()
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: said.append(f"dialog {dialog.message}") or dialog.dismiss())
    page.on("request", lambda request: said.append(request.url))
    page.goto(path.as_uri(), timeout=120_000)
    page.wait_for_function("document.documentElement.dataset.ready === 'yes'", timeout=60_000)
    return page, [each for each in said if not each.startswith(("blob:", path.as_uri()))]


def test_a_reader_sorts_filters_opens_evidence_and_copies(browser: Any, path: Path) -> None:  # noqa: ANN401
    page, said = opened(browser, path)
    cases = page.locator("#cases tbody tr")
    first = cases.first.locator("td").first
    assert cases.count() == 3 and first.inner_text() == "ddp"
    order = page.locator("#cases thead th").first.locator("button").first
    names = page.locator("#cases thead button").evaluate_all("all => all.map((one) => one.ariaLabel)")
    assert len(set(names)) == len(names) > 2 and all("adapter" in name for name in names[:2]), names
    for _ in range(2):  # by keyboard, to descending
        order.focus()
        page.keyboard.press("Enter")
    assert first.inner_text() == "gpipe"
    page.get_by_label("Filter Cases:").fill("fsdp2")
    assert cases.count() == 1 and first.inner_text() == "fsdp2"
    button = page.locator("#conformance td button").first
    button.focus()
    page.keyboard.press("Enter")
    dialog = page.locator("dialog[open]")
    assert "loss" in dialog.inner_text() and "1 x its noise" in dialog.inner_text()
    page.keyboard.press("Escape")
    assert page.locator("dialog[open]").count() == 0
    page.locator("#failures button[data-copy]").first.click()
    page.wait_for_function("document.getElementById('said').textContent === 'Copied.'", timeout=30_000)
    page.locator("#ratios-of").scroll_into_view_if_needed()
    page.locator("#equivalence .plot svg").first.wait_for(timeout=30_000)
    assert page.locator("#equivalence .plot svg .hm").count() == 1
    page.locator("#memory .plot").scroll_into_view_if_needed()
    page.locator("#memory .modebar-btn").first.wait_for(state="attached", timeout=30_000)
    offered = page.locator(".modebar-btn").evaluate_all("all => all.map((one) => one.dataset.title)")
    assert any("PNG" in one for one in offered) and not [one for one in offered if "hare" in one or "loud" in one]
    page.locator("#memory-plot-of").select_option(index=1)
    page.locator("#memory .plot svg text", has_text="rank 0").first.wait_for(timeout=30_000)
    assert not said, said


@pytest.mark.parametrize("width", [400, 1280, 1920])
def test_nothing_is_wider_than_the_window(browser: Any, path: Path, width: int) -> None:  # noqa: ANN401
    page, said = opened(browser, path, viewport={"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.locator("#cases .plot").scroll_into_view_if_needed()
    page.locator("#cases .plot svg .points path").first.wait_for(state="attached", timeout=30_000)
    assert page.locator("#cases .plot svg .points path").count() >= 1, "a dot a case"
    assert not said, said


def test_no_label_of_a_plot_is_clipped(browser: Any, tmp_path: Path) -> None:  # noqa: ANN401
    """On a phone legends stood beside the window, and long names of cases were cut off."""
    path = tmp_path / "report.html"
    assert main(["report", str(ROOT / "reports" / "records" / "report.jsonl.gz"), "-o", str(path)]) == 0
    page, _ = opened(browser, path, viewport={"width": 400, "height": 900})
    for place in page.locator(".plot").all():
        place.scroll_into_view_if_needed()
        place.locator("svg text").first.wait_for(state="attached", timeout=30_000)
    assert page.locator("#cases .plot svg .legendtext").count() and not clipped(page), clipped(page)


def test_a_table_says_what_it_is_and_breaks_no_name(browser: Any, tmp_path: Path) -> None:  # noqa: ANN401
    plain = dataclasses.replace(make_good().conformance, scenario="plain", base=make_case())
    sharded = make_good(case=make_case("fsdp2", layout=Layout(dp=2, zero_stage=3, num_micro_batches=2)))
    page, _ = opened(browser, write(tmp_path, sharded, make_good(conformance=plain)))
    captions = page.locator("caption b").all_inner_texts()
    assert {"Cases", "Memory: planned and measured", "Adapters by clause"} <= set(captions)
    assert len(captions) == page.locator("table.data").count()
    rows_of = (
        "(one) => { const r = document.createRange(); r.selectNodeContents(one); return r.getClientRects().length; }"
    )
    names = page.locator("#cases tbody tr td:nth-child(2)")
    assert set(names.evaluate_all(f"all => all.map({rows_of})")) == {1} and "dp2.zero3.mb2" in names.all_inner_texts()


def test_two_cases_are_compared_also_of_two_pages_and_links_lead_there(browser: Any, path: Path) -> None:  # noqa: ANN401
    page, said = opened(browser, path)
    ratio = page.locator("#compared tr", has_text="peak / rank").locator("td").last
    page.locator("#compare-second").select_option(FSDP2)
    assert ratio.inner_text() == "1.00" and "differs" in page.locator("#compared tr", has_text="adapter").get_attribute(
        "class"
    )
    assert "fsdp2" in page.evaluate("location.hash")
    page.locator("#compare-page").set_input_files(path)
    page.wait_for_function("document.getElementById('said').textContent.includes('cases of report.html were added')")
    assert page.locator("#compare-first option").count() == 6
    page.locator("#compare-page").set_input_files(__file__)
    page.wait_for_function("document.getElementById('said').textContent.includes('no page of Meshmark')")
    key = page.locator("#conformance td button").first.get_attribute("data-cell")
    page.evaluate("(key) => { location.hash = `cell=${encodeURIComponent(key)}`; }", key)
    page.locator("dialog[open]").wait_for()
    assert "loss" in page.locator("dialog[open]").inner_text() and not said, said


def test_a_link_keeps_filters_and_order(browser: Any, path: Path) -> None:  # noqa: ANN401
    page, said = opened(browser, path)
    page.get_by_label("Filter Cases:").fill("2.5e-06")
    page.locator("#cases thead th").first.locator("button").first.click()
    page.locator("#cases thead th").first.locator("button").first.click()  # descending
    page.locator("#cases thead th").first.locator("button").nth(1).click()
    page.locator(".dtcc-dropdown input").first.fill("d")
    page.wait_for_function("location.hash.includes('searchInput')")
    rows, link = page.locator("#cases tbody tr").all_inner_texts(), page.evaluate("location.hash")
    assert [row.split()[0] for row in rows] == ["fsdp2", "ddp"], "of three cases"
    again, complained = opened(browser, path)
    again.evaluate("(link) => { location.hash = link; }", link)  # as one types it
    again.wait_for_function("document.querySelectorAll('#cases tbody tr').length === 2")
    assert again.locator("#cases tbody tr").all_inner_texts() == rows and again.evaluate("location.hash") == link
    assert again.get_by_label("Filter Cases:").input_value() == "2.5e-06"
    for nonsense in ("%7B", '{"order":[[99,"asc"]]}', '{"columns":[1],"order":"x"}'):
        again.goto("about:blank")
        again.goto(f"{path.as_uri()}#table.Cases={nonsense}")
        again.wait_for_function("document.documentElement.dataset.ready === 'yes'")
        assert again.locator("#cases tbody tr").count() == 3
    assert not said and not complained, (said, complained)


def test_no_two_of_forty_adapters_look_alike() -> None:
    marks = [_dots("ddp", [], number).marker for number in range(40)]
    assert len({(mark.color, mark.symbol) for mark in marks}) == 40


def test_a_printed_page_keeps_its_cells(browser: Any, path: Path) -> None:  # noqa: ANN401
    page, _ = opened(browser, path)
    page.emulate_media(media="print")
    assert page.locator("#conformance td button").first.is_visible()
    assert not page.locator(".choose").first.is_visible() and not page.locator("nav").is_visible()


def test_a_phone_in_the_dark(browser: Any, path: Path) -> None:  # noqa: ANN401
    page, said = opened(browser, path, viewport={"width": 360, "height": 740}, color_scheme="dark")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360, "tables scroll by themselves"
    ink, paper = (page.evaluate(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor"))
    assert (ink, paper) == ("rgb(230, 237, 243)", "rgb(15, 20, 25)")
    edges = page.locator("caption span").evaluate_all("all => all.map((one) => one.getBoundingClientRect().right)")
    assert edges and max(edges) <= 360, "captions need no scrolling"
    page.locator("#memory .plot").scroll_into_view_if_needed()
    page.locator("#memory .plot svg .legend").first.wait_for(timeout=30_000)
    side = "document.querySelector('#memory .plot {}').getBoundingClientRect().{}"
    assert page.evaluate(side.format(".legend", "bottom")) <= page.evaluate(side.format(".barlayer", "top")) + 1
    controls = "[...document.querySelectorAll('main button, main select, main input')]"
    unnamed = f"{controls}.filter(e => !e.labels?.length && !e.innerText && !e.ariaLabel && !e.title).length"
    assert page.evaluate(unnamed) == 0 and not said, said


def test_hostile_texts_do_nothing_in_a_browser(browser: Any, hostile_path: Path) -> None:  # noqa: ANN401
    page, complaints = opened(browser, hostile_path)
    for place in page.locator(".plot").all():
        place.scroll_into_view_if_needed()
        place.locator("svg").first.wait_for()
    assert not complaints and page.locator("main img, main svg a").count() == 0
