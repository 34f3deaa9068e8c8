"""Correct engines by other hands, each judged by every suite: `python -m benchmarks.correct_engines` leaves
reports/correct-engines.md.

What has run on the same commit before is not run again, so that it may come in pieces (`--precision`, `-k`). Exits
with 1 when one is accused, or when more than one run in a hundred cannot be judged.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshmark.environment import Environment, describe
from meshmark.launch.cluster import Cluster, ClusterSpec
from meshmark.launch.launch import ForkserverLauncher
from meshmark.records.record import Record, Status
from meshmark.report.kept_page import keep_page
from meshmark.report.table import table as markdown
from meshmark.run.runner import Runner, RunOptions
from meshmark.serial import decode, encode
from tests.correct.registry import ENGINES, PRECISIONS, cases

PARTS = Path("results/correct-engines/runs.jsonl")
MOST_UNDECIDED = 0.01
"""Share of runs that may be *cannot tell*."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The suites' verdicts on one correct engine in one precision."""

    code: str
    """Commit and version of torch."""
    engine: str
    precision: str
    accused: tuple[str, ...]
    """Suite and summary of every verdict that failed."""
    undecided: tuple[str, ...]
    """Suite and summary of every verdict that could not be given."""
    way: str
    """Notes of the verdict on equivalence."""

    @property
    def result(self) -> str:
        if self.accused:
            return "**accused**"
        return "cannot tell" if self.undecided else f"right{self.way}"


def read_parts() -> list[Run]:
    """Return the runs of earlier parts."""
    return [decode(Run, json.loads(line)) for line in PARTS.read_text().splitlines()] if PARTS.exists() else []


def run_of(record: Record, code: str) -> Run:
    """Return what the suites said. A pass that did not come to its end counts as an accusation."""
    told = [(v.undecided, f"{v.suite}: {v.summary}") for v in record.verdicts if not v.passed]
    ended = () if record.outcome.status is Status.OK else (f"{record.outcome.status}: {record.outcome.message}",)
    equivalence = record.verdict("equivalence")
    differs = equivalence is not None and "bits differ" in equivalence.summary
    return Run(
        code=code,
        engine=record.case.adapter,
        precision=str(record.case.precision),
        accused=(*ended, *(text for undecided, text in told if not undecided)),
        undecided=tuple(text for undecided, text in told if undecided),
        way=", bits differ" if differs else "",
    )


def complaints(runs: Sequence[Run]) -> list[str]:
    """Return what is wrong with the judge, a line each; empty if nothing is."""
    found = [f"{run.engine} in {run.precision} is accused: {text}" for run in runs for text in run.accused]
    undecided = [run for run in runs if run.undecided and not run.accused]
    if len(undecided) > MOST_UNDECIDED * len(runs):
        found += [
            f"{run.engine} in {run.precision} cannot be judged: {text}" for run in undecided for text in run.undecided
        ]
    return found


def page(runs: Sequence[Run], here: Environment) -> str:
    """Return the page in Markdown."""
    by_case = {(run.engine, run.precision): run for run in runs}
    names = list(dict.fromkeys(run.engine for run in runs))
    precisions = list(dict.fromkeys(run.precision for run in runs))
    rows: list[dict[str, object]] = []
    for name in names:
        told = {p: by_case[name, p].result if (name, p) in by_case else "not run" for p in precisions}
        rows.append({"engine": name, "file": f"`{ENGINES[name].split(':')[0].split('.')[-1]}.py`", **told})
    accused, undecided = sum(bool(r.accused) for r in runs), sum(bool(r.undecided) and not r.accused for r in runs)
    lines = [
        "# Correct engines by other hands",
        "",
        f"{len(names)} correct engines compute a training step in other ways than the adapters do. Each is judged for "
        f"equivalence, memory and communication on two ranks: {len(runs)} runs, {accused} accused, {undecided} cannot "
        "be told.",
        "",
        f"{here.machine}, commit {here.commit}, {here.date}, torch {here.versions['torch']}. The engines are in "
        "`tests/correct`; `make correct-engines` writes this page.",
        "",
        "*Bits differ* stands where an engine computes in another correct way than the twin in 16 bits "
        "([how to read it](../docs/reading.md#a-verdict-in-bf16-or-fp16)). Activations and peaks are not judged of "
        "engines that compute the model by other operations (`activations_known=False` in their recipe); all else is.",
        "",
        markdown(rows),
        "",
    ]
    found = [f"- {complaint}" for complaint in complaints(runs)]
    return "\n".join([*lines, *(["## What is wrong", "", *found, ""] if found else [])])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.correct_engines", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("-k", default="", metavar="TEXT", help="engines whose name contains TEXT (default: all)")
    parser.add_argument("--precision", default=",".join(map(str, PRECISIONS)), help="precisions, by commas")
    parser.add_argument("-o", "--output", type=Path, default=Path("reports/correct-engines.md"))
    parsed = parser.parse_args(arguments)
    wanted = [c for c in cases() if parsed.k in c.adapter and str(c.precision) in parsed.precision.split(",")]
    if not wanted:
        parser.error(f"no engine's name contains {parsed.k!r}, or no such precision: nothing would be shown")
    here = describe("cpu", "gloo", 1)
    code = f"{here.commit}, torch {here.versions['torch']}"
    runs = {(run.engine, run.precision): run for run in read_parts() if run.code == code}
    PARTS.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, Cluster(ClusterSpec()) as cluster, PARTS.open("a") as file:
        runner = Runner(ForkserverLauncher(cluster), ENGINES, RunOptions(), Path(folder))
        for case in wanted:
            key = case.adapter, str(case.precision)
            if key not in runs or here.commit.endswith("-dirty"):
                runs[key] = run_of(runner.observe(case), code)
                print(json.dumps(encode(runs[key])), file=file, flush=True)
            print(case.id, runs[key].result, *runs[key].accused, *runs[key].undecided, flush=True)
        runner.close()
    in_order = [runs[key] for case in cases() if (key := (case.adapter, str(case.precision))) in runs]
    found = complaints(in_order)
    keep_page(page(in_order, here), parsed.output)
    print(f"{parsed.output}: {'; '.join(found) or f'{len(in_order)} runs, no correct engine accused'}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
