"""Downpour SGD: replicas wait for nobody; they push gradients to a server, and fetch what it has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from meshmark.algorithms.downpour.parameter_server import SERVERS, ParameterServer
from meshmark.spec.algorithm import Algorithm
from meshmark.spec.workload import Workload
from meshmark.theory.traffic import METERED_STEP, Flow, Purpose, messages, parameter_sizes

if TYPE_CHECKING:
    from meshmark.algorithms.contract import FaultHypothesis, ObservedRun, Transition, UpdateRule
    from meshmark.spec.case import Case


@dataclass(frozen=True, kw_only=True)
class Downpour(Algorithm):
    """Replicas push gradients to a server, which steps by Adagrad, and fetch what it has (Dean et al., NIPS 2012)."""

    kind: ClassVar[str] = "downpour"
    replicas_differ: ClassVar[bool] = True
    server: ParameterServer = ParameterServer()

    @classmethod
    def presets(cls) -> Iterator[Self]:
        return (cls(server=server) for server in SERVERS)

    @property
    def id(self) -> str:
        return f"{self.kind}-{self.server.id}"

    @property
    def steps_until_chance(self) -> int:
        """In which order replicas reach the server is chance; it shows after the first fetch."""
        return self.server.fetch_every

    def traffic_repeats(self, case: Case, rank: int, step: int) -> bool:
        return rank != case.layout.group("dp", rank)[0] and (
            self.server.pushes_after(step) == self.server.pushes_after(METERED_STEP)
            and self.server.fetches_after(step) == self.server.fetches_after(METERED_STEP)
        )

    def traffic(self, case: Case, rank: int) -> list[Flow]:
        """Return what a replica pushes to the server, which is with the first replica, and fetches from it.

        The server's own end is not counted. A replica that waits for nobody may push in any of the server's steps.
        """
        line = case.layout.group("dp", rank)
        if rank == line[0]:
            return []
        num_bytes = parameter_sizes(case, rank)[0] * case.precision.master.itemsize
        flows = {
            ("send", Purpose.GRADIENTS): self.server.pushes_after(METERED_STEP),
            ("recv", Purpose.WEIGHTS): self.server.fetches_after(METERED_STEP),
        }
        return [
            messages("dp", kind, (line[0], rank), num_bytes, (1, 1), purpose)
            for (kind, purpose), due in flows.items()
            if due
        ]

    def transition(
        self, workload: Workload, rules: Sequence[UpdateRule], *, exact: bool = True, num_stages: int = 1
    ) -> Transition:
        from meshmark.algorithms.downpour.transition import DownpourTransition

        return DownpourTransition(workload, rules)

    def fault_hypotheses(self, workload: Workload, run: ObservedRun) -> Iterator[FaultHypothesis]:
        from meshmark.algorithms.downpour.faults import downpour_faults

        return downpour_faults(run)

    def contradiction(self, run: ObservedRun, step: int) -> str | None:
        from meshmark.algorithms.downpour.transition import impossible

        cannot = (what for (_, at), what in impossible(self.server, run) if at == step)
        return next((f"an order that cannot be: {what}" for what in cannot), None)


ALGORITHMS: tuple[type[Algorithm], ...] = (Downpour,)
