"""A launcher whose ranks note which lines they execute, and with which options frameworks are called."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

from benchmarks.reach.options import Probe
from benchmarks.reach.scope import MODULES, SITE
from meshmark.launch.cluster import Cluster
from meshmark.launch.launch import ForkedRanks, ForkserverLauncher, LaunchResult, launch_with
from meshmark.launch.rank import RankInfo, run_forked_rank
from meshmark.records.request import Request, Task

Lines = dict[str, set[int]]
"""Executed lines by file below site-packages."""
Values = dict[str, dict[str, set[str]]]
"""Values that options were given, by source and option."""
UNTRACED = frozenset({Task.TIME, Task.PROFILE, Task.PEAK, Task.LINKS, Task.NOISE})
"""Passes that are timed, or that run no framework."""


class CoveredRanks(ForkedRanks):
    """Ranks that run under coverage.py."""

    def __init__(self, *arguments: object, folder: str) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._folder = folder

    def start(self) -> None:
        for info in self._ranks:
            self._pids[info.rank] = self._server.call(run_covered_rank, self._request, info, self._folder)


class CoveringLauncher(ForkserverLauncher):
    """Launcher that gathers the lines and options of its launches until they are taken."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self.lines: Lines = defaultdict(set)
        self.values: Values = defaultdict(lambda: defaultdict(set))

    def launch(self, request: Request, world_size: int, *, alone: bool = False) -> LaunchResult:
        if request.task in UNTRACED:
            return super().launch(request, world_size, alone=alone)
        with TemporaryDirectory(prefix="reach") as folder:

            def start(request: Request, ranks: Sequence[RankInfo]) -> ForkedRanks:
                return CoveredRanks(self._server(request), request, ranks, folder=folder)

            result = launch_with(start, self.cluster, request, world_size, alone=alone)
            for path in Path(folder).glob("*.json"):
                self._take(json.loads(path.read_text()))
        return result

    def _take(self, left: dict[str, dict[str, object]]) -> None:
        for file, lines in left["lines"].items():
            self.lines[file].update(lines)  # type: ignore[arg-type]
        for source, options in left["values"].items():
            for option, values in options.items():  # type: ignore[attr-defined]
                self.values[source][option].update(values)

    def take(self) -> tuple[Lines, Values]:
        """Return what was gathered since the last call."""
        lines, values = self.lines, self.values
        self.lines, self.values = defaultdict(set), defaultdict(lambda: defaultdict(set))
        return lines, values


def run_covered_rank(request: Request, info: RankInfo, folder: str) -> NoReturn:
    """Run a rank, and leave its lines and options in `folder` when it ends, however it ends by itself."""
    import coverage

    entries = [SITE / entry for own in MODULES.values() for entry in own]
    include = [str(entry) if entry.suffix else f"{entry}/*" for entry in entries]
    tracer = coverage.Coverage(data_file=None, include=include, config_file=False, messages=False)
    probe, leave = Probe(), os._exit

    def finish(code: int) -> NoReturn:
        sys.setprofile(None)
        with contextlib.suppress(Exception):  # a rank's own outcome comes first
            tracer.stop()
            probe.finish()
            _write(Path(folder), tracer, probe)
        leave(code)

    os._exit = finish  # type: ignore[assignment]  # ranks end by it, and so do the processes that they fork
    tracer.start()
    sys.setprofile(probe)
    threading.setprofile(probe)
    run_forked_rank(request, info)


def _write(folder: Path, tracer: object, probe: Probe) -> None:
    data = tracer.get_data()  # type: ignore[attr-defined]
    lines = {str(Path(file).relative_to(SITE)): data.lines(file) for file in data.measured_files()}
    values = {source: {o: sorted(v) for o, v in options.items()} for source, options in probe.values.items()}
    path = folder / f"{os.getpid()}.partial"
    path.write_text(json.dumps({"lines": lines, "values": values}))
    path.rename(path.with_suffix(".json"))
