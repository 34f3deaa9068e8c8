"""A launcher whose ranks run a mutant of a framework.

It is no part of `mutants`, which runs as `__main__`, because ranks import it by its name.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

from benchmarks.reach.launcher import UNTRACED
from benchmarks.reach.mutate import Mutation, install
from meshmark.launch.cluster import Cluster
from meshmark.launch.launch import ForkedRanks, ForkserverLauncher, LaunchResult, launch_with
from meshmark.launch.rank import RankInfo, run_forked_rank
from meshmark.records.request import Request


class MutatedRanks(ForkedRanks):
    """Ranks that run a mutant."""

    def __init__(self, *arguments: object, mutation: Mutation, folder: str) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._mutation, self._folder = mutation, folder

    def start(self) -> None:
        for info in self._ranks:
            self._pids[info.rank] = self._server.call(
                run_mutated_rank, self._request, info, self._mutation, self._folder
            )


class MutatingLauncher(ForkserverLauncher):
    """Launcher whose ranks run `mutation`, where there is one."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self.mutation: Mutation | None = None
        self.changed = 0
        """Functions that were changed in ranks of the last launch, 0 also where the module was imported later."""
        self.complaint = ""
        """Why a rank could not be given the mutation."""

    def launch(self, request: Request, world_size: int, *, alone: bool = False) -> LaunchResult:
        mutation = self.mutation
        if mutation is None or request.task in UNTRACED:
            return super().launch(request, world_size, alone=alone)
        with TemporaryDirectory(prefix="mutant") as folder:

            def start(request: Request, ranks: Sequence[RankInfo]) -> ForkedRanks:
                return MutatedRanks(self._server(request), request, ranks, mutation=mutation, folder=folder)

            result = launch_with(start, self.cluster, request, world_size, alone=alone)
            left = [path.read_text() for path in Path(folder).iterdir()] or ["no rank came so far as to be mutated"]
        self.changed = max((int(text) for text in left if text.isdigit()), default=0)
        self.complaint = next((text for text in left if not text.isdigit()), "")
        return result


def run_mutated_rank(request: Request, info: RankInfo, mutation: Mutation, folder: str) -> NoReturn:
    """Run a rank with `mutation`, and leave in `folder` how many functions have it."""
    try:
        told = str(install(mutation))
    except Exception as error:  # then nothing is known of the mutant, which is not its end
        told = f"not mutated: {error!r}"
    (Path(folder) / str(os.getpid())).write_text(told)
    run_forked_rank(request, info)
