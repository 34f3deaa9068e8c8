"""`python -m benchmarks.chaos`: faults by the hundred while suites run, and the page of what became of them.

Exits with 1 if a fault was not survived or not named rightly, or if something was lost or left.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

from benchmarks.chaos.campaign import Results, Trial, run_session
from benchmarks.chaos.deck import Deck
from benchmarks.chaos.faults import Fault, Filled, ResultsGone
from benchmarks.chaos.nodes import NodeStruck, run_nodes
from benchmarks.chaos.page import CampaignStart, is_good, page, read_series, write_line
from benchmarks.chaos.session import ROOT, Session
from benchmarks.chaos.settings import PLAIN, Setting
from meshmark.environment import describe

_PRIVATE = "MESHMARK_CHAOS_PRIVATE"
"""Environment variable that is set in a process with mounts of its own."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=1000, help="how many (default: 1000)")
    parser.add_argument("--seed", type=int, default=1, help="of everything that is drawn (default: 1)")
    parser.add_argument("--tracks", type=int, default=4, help="sessions at a time, most of which wait (default: 4)")
    parser.add_argument(
        "--limit-factor", type=float, default=1.0, help="time limits of cases, where other work runs (default: 1)"
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="no session begins after that (default: 60)")
    parser.add_argument(
        "--results", type=Path, default=Path("results/chaos"), help="a folder; the page counts all series in it"
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("reports/chaos.md"))
    parsed = parser.parse_args(arguments)
    root = _PRIVATE in os.environ
    if not root and os.geteuid() == 0 and not subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        command = [sys.executable, "-m", "benchmarks.chaos", *(arguments or sys.argv[1:])]
        os.execvpe("unshare", ["unshare", "-m", *command], {**os.environ, _PRIVATE: "1"})
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    if root:
        _mount(Path("/dev/shm"), "256m")
    parsed.results.mkdir(parents=True, exist_ok=True)
    series = parsed.results / f"{time.strftime('%Y%m%d-%H%M%S')}-seed{parsed.seed}.jsonl"
    here = describe("cpu", "gloo", 1, command=["make", "chaos"])
    start = CampaignStart(
        seed=parsed.seed, faults=parsed.faults, root=root, environment=here, limit_factor=parsed.limit_factor
    )
    write_line(series, start)
    until = time.monotonic() + 60 * parsed.minutes
    Campaign(folder, series, start, until=until).run(parsed.tracks)
    if root and (left := [path.name for path in Path("/dev/shm").iterdir()]):
        write_line(series, Results(complaints=[f"left shared memory {left}"]))
    starts, sessions = read_series(sorted(parsed.results.glob("*.jsonl")))
    parsed.output.write_text(page(starts, sessions))
    good = is_good(sessions)
    print(f"{parsed.output}: {'all is well' if good else f'see it, and {folder}'}")
    if good:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if good else 1


class Campaign:
    """Sessions until all faults have been tried."""

    def __init__(self, folder: Path, series: Path, start: CampaignStart, *, until: float) -> None:
        """Sessions work in `folder`; each appends a line to the file `series`, so that a campaign may be cut off."""
        self._folder, self._series, self._until = folder, series, until
        self._seed, self._root, self._limit_factor = start.seed, start.root, start.limit_factor
        self._deck = Deck(start.faults, random.Random(start.seed), root=start.root)
        self._numbers: Iterator[int] = count()
        self._lock = threading.Lock()
        self._sessions = self._trials = 0

    def run(self, tracks: int) -> None:
        threads = [threading.Thread(target=self._track, args=(track == 0,)) for track in range(tracks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _track(self, with_nodes: bool) -> None:
        """One of them tries the nodes first: their network has one address."""
        while with_nodes and self._deck.nodes and time.monotonic() < self._until:
            self._nodes(self._deck.nodes.pop())
        while time.monotonic() < self._until:
            number = next(self._numbers)
            draw = random.Random(f"{self._seed}/{number}")
            setting, plan = self._deck.deal(draw)
            if not plan:
                return
            self._session(number, setting, plan, draw)

    def _session(self, number: int, setting: Setting, plan: list[Fault | None], draw: random.Random) -> None:
        setting = setting.slower(self._limit_factor)
        session = Session(self._folder / f"session{number}", _names(setting, plan, draw), setting=setting)
        mounted = []
        if self._root and any(isinstance(fault, Filled) for fault in plan):
            mounted.append(_mount(session.temporary, "64m"))
        if any(isinstance(fault, ResultsGone) and fault.how == "filled" for fault in plan):
            mounted.append(_mount(session.results, "64m"))
        try:
            results = run_session(session, plan, draw)
        finally:
            for folder in mounted:
                subprocess.run(["umount", "-l", str(folder)], check=True)
        self._deck.take_back([fault for fault in plan if fault and not fault.struck])
        self._add(results)

    def _nodes(self, fault: NodeStruck) -> None:
        number = next(self._numbers)
        folder, draw = self._folder / f"session{number}", random.Random(f"{self._seed}/{number}")
        seconds, wrong = run_nodes(folder, fault, draw, PLAIN.slower(self._limit_factor))
        trial = Trial(
            kind=fault.kind,
            case=f"session{number}",
            survived=not any("had not ended" in text or "left" in text for text in wrong),
            named=not wrong,
            seconds=seconds,
            complaint="; ".join(wrong),
        )
        self._add(Results(trials=[trial]))

    def _add(self, results: Results) -> None:
        results.complaints = [self._without_places(text) for text in results.complaints]
        results.trials = [replace(trial, complaint=self._without_places(trial.complaint)) for trial in results.trials]
        with self._lock:
            self._sessions += 1
            self._trials += len(results.trials)
            write_line(self._series, results)
            wrong = [f"{t.kind}, {t.case}: {t.complaint}" for t in results.trials if t.complaint] + results.complaints
            print(f"session {self._sessions}: {self._trials} of {self._deck.size} faults", flush=True)
            for text in wrong:
                print(f"  {' '.join(text.split())[:2000]}", flush=True)

    def _without_places(self, text: str) -> str:
        """Return `text` without the absolute paths of this machine, which a committed page must not name."""
        for place, name in ((self._folder, "FOLDER"), (ROOT, "."), (Path(sys.prefix), ".venv")):
            text = text.replace(str(place), name)
        return text


def _names(setting: Setting, plan: list[Fault | None], draw: random.Random) -> list[str]:
    """Return adapters for the cases of a session. A fault that strikes imports gets one that was not used before."""
    names, used = list[str](), set[str]()
    for index, fault in enumerate(plan):
        new = [base for base in setting.bases if base not in used]
        base = draw.choice(new) if fault and fault.needs_import and new else draw.choice(setting.bases)
        used.add(base)
        names.append(f"{base}_{index}")
    return names


def _mount(folder: Path, size: str) -> Path:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    return folder


if __name__ == "__main__":
    sys.exit(main())
