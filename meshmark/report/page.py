"""The interactive page: one file that needs no network, made from records alone."""

from __future__ import annotations

import base64
import dataclasses
import importlib.resources
import json
import math
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from meshmark.errors import ResultsError
from meshmark.records.record import Record
from meshmark.records.record_file import Attempt, Reading
from meshmark.report import tables
from meshmark.report.baseline import Baseline
from meshmark.report.clause_grid import Clauses, clauses
from meshmark.report.communication import communication
from meshmark.report.failure_text import WORSE
from meshmark.report.guard import rendered
from meshmark.report.missing_failures import failing
from meshmark.report.render import headline
from meshmark.report.results import CaseResult, newest, results
from meshmark.report.scale import fake_worlds
from meshmark.report.sections import sections
from meshmark.report.table import Table, filled, one_line, to_cell, visible

INSTALL = 'pip install "meshmark[html]"'


Fact = tuple[str, float | None]
"""A text, and the number that it stands for."""


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A failure, with the command that repeats it."""

    title: str
    message: str
    likely: str = ""
    evidence: str = ""
    command: str = ""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of the page."""

    id: str
    title: str
    texts: Sequence[str] = ()
    failures: Sequence[Failed] = ()
    plots: Sequence[object] = ()
    tables: Sequence[Table] = ()
    clauses: Clauses | None = None
    facts: dict[str, dict[str, Fact]] | None = None
    """Facts of each case, for a comparison of two."""
    blocks: Sequence[str] = ()

    def __bool__(self) -> bool:
        parts = (self.texts, self.failures, self.plots, self.tables, self.clauses, self.facts, self.blocks)
        return any(bool(part) for part in parts)


def write_html(reading: Reading, path: Path, command: str, baseline: Reading | None = None) -> list[str]:
    """Write HTML with all records to `path`. Returns complaints about what is missing.

    Raises `ResultsError` if the drawing libraries are not installed.
    """
    libraries = _libraries()
    matrix = [record for record in reading.records if not record.conformance.scenario]
    before = Baseline(results(baseline.records) if baseline else ())

    def page(some: Sequence[CaseResult], complaints: Sequence[str]) -> str:
        read = dataclasses.replace(reading, complaints=[*reading.complaints, *complaints])
        parts = [part for part in _parts(some, read, before, command) if part]
        environment = newest(reading.records).environment if reading.records else None
        title = f"Meshmark: {environment.machine}, {environment.device}" if environment else "Meshmark"
        told = headline(some, read).replace("*", "").replace("`", "")
        return _template().render(title=one_line(title), headline=told, sections=parts, **libraries)

    text, complaints = rendered(page, results(matrix), lambda result: result.case.id)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return complaints


def _libraries() -> dict[str, Markup]:
    """Return the code that the page embeds: Meshmark's and the libraries', without any content of records."""
    own = importlib.resources.files("meshmark.report")
    try:
        import itables
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ResultsError(f"{error.name} is not installed, which draws HTML reports: {INSTALL}") from error
    folder = importlib.resources.files(itables) / "html"
    bundle = base64.b64encode((folder / "dt_bundle.js").read_bytes()).decode()
    texts = {
        "datatables": bundle,
        "datatables_css": (folder / "dt_bundle.css").read_text(encoding="utf-8"),
        "plotly": get_plotlyjs(),
        "css": (own / "page.css").read_text(encoding="utf-8"),
        "js": (own / "page.js").read_text(encoding="utf-8"),
    }
    assert not any("</script" in text or "</style" in text for text in texts.values()), (
        "a library would end its own tag"
    )
    return {name: Markup(text) for name, text in texts.items()}


def _template() -> jinja2.Template:
    """Return the template. It escapes every value, and shows invisible characters as code points."""
    source = (importlib.resources.files("meshmark.report") / "page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: visible(value) if type(value) is str else value,
    )
    environment.filters["embedded"] = embedded
    return environment.from_string(source)


def embedded(value: object) -> Markup:
    """Return JSON that can stand within a tag without ending it."""
    text = json.dumps(value, default=dataclasses.asdict)
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _parts(found: Sequence[CaseResult], reading: Reading, baseline: Baseline, command: str) -> Iterator[Part]:
    from meshmark.report.charts import charts

    drawn: dict[str, Any] = charts(found, fake_worlds(reading.records))
    latest = [record for result in found for record in (result.observed, result.timed) if record]
    failed = list(_failures(latest, reading))
    nothing = [] if failed else ["Nothing: every case that ran reached its end and passed every suite."]
    yield Part(id="failures", title="What failed", texts=nothing, failures=failed)
    note = "A row a case. Struck out: of a wrong run, which is no result."
    answer = Table(title="Cases", note=note, rows=tables.answer(found))
    yield Part(id="cases", title="Cases", plots=drawn["cases"], tables=filled([answer]))
    yield Part(id="compare", title="Compare two cases", facts=_facts(found))
    for section in sections(found, reading.records, baseline):
        text = section.note.replace("*", "").replace("`", "")
        plots = drawn.get(section.id, [])
        yield Part(id=section.id, title=section.title, texts=[text], plots=plots, tables=section.tables)
    yield Part(id="conformance", title="Conformance", clauses=clauses(reading.records))
    left_out = filled([Table(title="Not judged", rows=tables.not_judged(found))])
    yield Part(id="not-judged", title="What was not judged", tables=left_out)
    yield Part(id="skipped", title="Not run", tables=filled([Table(title="Not run", rows=tables.skips(found))]))
    yield Part(id="unread", title="What could not be read", texts=list(reading.complaints))
    made = sorted({record.environment.command for record in reading.records})
    times = filled([Table(title="Launches", rows=tables.time_spent(found))])
    texts = ["Records by the first commands, this page by the last."]
    yield Part(id="origin", title="How it was obtained", texts=texts, blocks=[*made, command], tables=times)


def _facts(found: Sequence[CaseResult]) -> dict[str, dict[str, Fact]]:
    """Return what the tables say of each case. Parts of one case that have no number are compared as texts."""
    facts: dict[str, dict[str, Fact]] = {}
    for result in found:
        if not result.skipped:
            rows = [*tables.memory([result], Baseline(())), *communication([result]), *tables.answer([result])]
            own: dict[str, Fact] = {}
            for name, value in (pair for row in rows for pair in row.items()):
                cell = to_cell(value)
                order = cell.order if cell.order is not None and math.isfinite(cell.order) else None
                own[name] = (f"{cell.struck} {cell.text}".strip(), order)
            facts[result.case.id] = own
    return facts


def _failures(latest: Iterable[Record], reading: Reading) -> Iterator[Failed]:
    """Yield every pass and verdict that failed, then every failed test that none of them covers."""
    left = {kind: failing(reading.sessions, conforming=kind) for kind in (False, True)}
    for record in latest:
        told = [a for a in left[False] if a.case == record.case.id and WORSE not in a.message]
        if found := list(_of_record(record, _command(record, told))):
            left[False] = [attempt for attempt in left[False] if attempt not in told]
        yield from found
    for attempt in (*left[False], *left[True]):
        yield Failed(
            title=attempt.test, message=_first_line(attempt.message), evidence=attempt.message, command=attempt.command
        )


def _of_record(record: Record, command: str) -> Iterator[Failed]:
    outcome, case = record.outcome, record.case.id
    if outcome.status not in ("ok", "skipped"):
        stacks = "".join(f"\n--- stack of rank {rank}\n{stack}" for rank, stack in outcome.stacks.items())
        where = "" if outcome.rank is None else f", rank {outcome.rank}"
        yield Failed(
            title=f"{case}: {outcome.status}{where}",
            message=f"{record.task}: {outcome.message}",
            evidence=f"{outcome.traceback or outcome.log_tail}{stacks}",
            command=command,
        )
    for verdict in record.verdicts:
        if not verdict.passed:
            yield Failed(
                title=f"{case}: {verdict.suite}",
                message=verdict.summary,
                likely=str(verdict.evidence.get("diagnosis", "")),
                evidence="\n".join(f"{name}: {value}" for name, value in verdict.evidence.items()),
                command=command,
            )


def _command(record: Record, attempts: Sequence[Attempt]) -> str:
    """Return the command of the failed test, or the run's command for this case only (the last `-k` counts)."""
    if attempts:
        return attempts[0].command
    return f"{record.environment.command} -k {shlex.quote(record.case.id)}"


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no message")
