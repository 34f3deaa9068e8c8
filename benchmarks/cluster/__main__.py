"""`python -m benchmarks.cluster`: real schedulers on this machine, the suites under them, and the page of what became
of them. For root. Exits with 1 when something was wrong."""

from __future__ import annotations

import argparse
import dataclasses
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.cluster.page import page
from benchmarks.cluster.row import Row, Whole, begin, finish, keep, kept, whole_of
from benchmarks.cluster.slurm import ROOT
from benchmarks.cluster.trials import Ground, Named, trials
from meshmark.environment import describe
from meshmark.report.kept_page import keep_page

_KEPT = ROOT / "results" / "cluster" / "rows.json"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__)
    parser.add_argument("-k", default="", metavar="REGEX", help="in a trial's name: those alone, beside what is known")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "reports" / "cluster.md")
    parsed = parser.parse_args(arguments)
    asked = [trial for trial in trials() if re.search(parsed.k, trial.name)]
    if not asked:
        parser.error(f"-k {parsed.k!r} is in no trial's name: {', '.join(trial.name for trial in trials())}")
    if lacks := list(dict.fromkeys(filter(None, (trial.lacks() for trial in asked)))):
        print(f"cluster-test: {'; '.join(lacks)}", file=sys.stderr)
        return 2
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, _interrupt)
    started, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="mmc-"))
    if not parsed.k:
        begin(_KEPT)
    rows = _tried(folder, asked)
    seconds, good = time.monotonic() - started, not any(row.wrong for row in rows)
    if not parsed.k:
        commit, end = _now()
        finish(Whole(seconds=seconds, trials=len(rows), commit=commit, end=end), _KEPT)
    keep_page(page(kept(_KEPT), whole_of(_KEPT)), parsed.output)
    print(f"{len(rows)} trials in {seconds:.0f} s: {'all is well' if good else f'see {folder}'}")
    if good:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if good else 1


def _tried(folder: Path, asked: Iterable[Named]) -> list[Row]:
    with Ground(folder) as ground:
        rows = [_keep_and_print(trial.run(ground)) for trial in asked]
    if left := ground.left():
        rows.append(_keep_and_print(Row(engine="SLURM", shape="", fault="its end", wrong=left)))
    return rows


def _now() -> tuple[str, str]:
    """Commit of the checkout, and date."""
    here = describe("cpu", "gloo", 1)
    return here.commit, here.date


def _keep_and_print(row: Row) -> Row:
    commit, date = _now()
    keep(dataclasses.replace(row, commit=commit, date=date), _KEPT)
    seconds = "" if row.seconds is None else f", {row.seconds:.1f} s"
    print(f"{row.engine}, {row.shape}, {row.fault}: {row.told}{seconds}", flush=True)
    for text in row.wrong:
        print(f"  WRONG: {' '.join(text.split())[:900]}", flush=True)
    return row


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


if __name__ == "__main__":
    sys.exit(main())
