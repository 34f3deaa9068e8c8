"""Decentralised SGD: in every step each replica mixes its neighbours' states into its own, along a graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

from meshmark.algorithms.decentralised.graph import Graph, GraphKind
from meshmark.errors import InputError
from meshmark.spec.algorithm import Algorithm
from meshmark.spec.optimizer import OptimizerKind, OptimizerSpec
from meshmark.spec.workload import Workload
from meshmark.theory.traffic import METERED_STEP, Flow, Purpose, messages, parameter_sizes

if TYPE_CHECKING:
    from meshmark.algorithms.contract import FaultHypothesis, ObservedRun, Tensors, Transition, UpdateRule
    from meshmark.algorithms.decentralised.transition import DecentralisedTransition
    from meshmark.spec.case import Case


@dataclass(frozen=True, kw_only=True)
class Decentralised(Algorithm):
    """Base of algorithms that communicate along a graph."""

    replicas_differ: ClassVar[bool] = True
    vectors_mixed: ClassVar[int] = 1
    """Vectors as long as the parameters that travel along each edge of the graph."""
    vectors_between_steps: ClassVar[int] = 0
    """Vectors kept from step to step. The momentum that some keep is counted as the optimizer's."""
    vectors_in_update: ClassVar[int] = 1
    """Vectors at the fullest moment of the update, besides parameters, what is kept, and messages: gradients that are
    sent or are yet to become what is kept, or where a replica stood before."""
    sends_before_gradients: ClassVar[bool] = False
    """Whether messages are in memory during the backward pass."""
    graph: Graph
    """Who mixes whom in."""

    @classmethod
    def presets(cls) -> Iterator[Self]:
        return (cls(graph=Graph(kind=kind)) for kind in GraphKind if kind is not GraphKind.OWN)

    @property
    def id(self) -> str:
        return f"{self.kind}-{self.graph.id}"

    def vectors_kept(self, case: Case, rank: int) -> int:
        return self.vectors_between_steps

    def traffic_repeats(self, case: Case, rank: int, step: int) -> bool:
        dp, place = case.layout.dp, case.layout.coordinates(rank).dp
        told, heard = (
            [ends(dp, each, place) for each in (step, METERED_STEP)]
            for ends in (self.graph.recipients, self.graph.hears)
        )
        return told[0] == told[1] and heard[0] == heard[1]

    def traffic(self, case: Case, rank: int) -> list[Flow]:
        """Return what this replica sends and receives along the graph, as one message or one for each tensor."""
        count, tensors = parameter_sizes(case, rank)
        num_bytes = self.vectors_mixed * count * case.precision.master.itemsize
        calls = (1, self.vectors_mixed * tensors)
        line, place = case.layout.group("dp", rank), case.layout.coordinates(rank).dp
        peers = {
            "send": self.graph.recipients(case.layout.dp, METERED_STEP, place),
            "recv": self.graph.hears(case.layout.dp, METERED_STEP, place),
        }
        return [
            messages("dp", kind, (rank, line[peer]), num_bytes, calls, Purpose.WEIGHTS)
            for kind, ends in peers.items()
            for peer in ends
        ]

    def transition_class(self) -> type[DecentralisedTransition]:
        raise NotImplementedError

    def transition(
        self, workload: Workload, rules: Sequence[UpdateRule], *, exact: bool = True, num_stages: int = 1
    ) -> DecentralisedTransition:
        return self.transition_class()(workload, rules)

    def fault_hypotheses(self, workload: Workload, run: ObservedRun) -> Iterator[FaultHypothesis]:
        from meshmark.algorithms.decentralised.faults import mixing_faults

        return mixing_faults(self)

    def estimate_fault(
        self,
        workload: Workload,
        transition: Transition,
        run: ObservedRun,
        wrong: Mapping[int, Sequence[str]],
        exact: Sequence[list[Tensors]],
    ) -> tuple[int, str] | None:
        from meshmark.algorithms.decentralised.faults import estimated_weights
        from meshmark.algorithms.decentralised.transition import DecentralisedTransition

        assert isinstance(transition, DecentralisedTransition)
        return estimated_weights(transition, workload, run, wrong, exact)


@dataclass(frozen=True, kw_only=True)
class DSGD(Decentralised):
    """Each replica steps, and then mixes (adapt, then combine; Lopes and Sayed 2008)."""

    kind: ClassVar[str] = "dsgd"
    vectors_in_update: ClassVar[int] = 0

    def transition_class(self) -> type[DecentralisedTransition]:
        from meshmark.algorithms.decentralised.transition import DecentralisedTransition

        return DecentralisedTransition


@dataclass(frozen=True, kw_only=True)
class DPSGD(Decentralised):
    """The states before the step are mixed, while its gradient is computed (arXiv:1705.09056)."""

    kind: ClassVar[str] = "dpsgd"
    sends_before_gradients: ClassVar[bool] = True

    def transition_class(self) -> type[DecentralisedTransition]:
        from meshmark.algorithms.decentralised.transition import ParallelTransition

        return ParallelTransition


@dataclass(frozen=True, kw_only=True)
class KeepsMomentum(Decentralised):
    """Algorithms that keep the momentum of SGD themselves, in the place of the local optimizer."""

    def local_optimizer(self, optimizer: OptimizerSpec) -> OptimizerSpec:
        return replace(optimizer, momentum=0.0)

    def refusal(self, optimizer: OptimizerSpec) -> str | None:
        if _is_plain_sgd(optimizer) and optimizer.momentum and not optimizer.nesterov and not optimizer.warmup_steps:
            return None
        return (
            "keeps the momentum of SGD itself; take kind sgd with a momentum, and without Nesterov's, a schedule, "
            "weight decay and clipping"
        )


@dataclass(frozen=True, kw_only=True)
class DmSGD(KeepsMomentum):
    """Momenta are mixed as states are (arXiv:1905.03817)."""

    kind: ClassVar[str] = "dmsgd"
    vectors_mixed: ClassVar[int] = 2

    def transition_class(self) -> type[DecentralisedTransition]:
        from meshmark.algorithms.decentralised.transition import MixedMomentumTransition

        return MixedMomentumTransition


@dataclass(frozen=True, kw_only=True)
class QuasiGlobal(KeepsMomentum):
    """The momentum is of what a step came to after mixing (arXiv:2102.04761)."""

    kind: ClassVar[str] = "quasi-global"

    def transition_class(self) -> type[DecentralisedTransition]:
        from meshmark.algorithms.decentralised.transition import QuasiGlobalTransition

        return QuasiGlobalTransition


@dataclass(frozen=True, kw_only=True)
class OfPlainSGD(Decentralised):
    """Algorithms that are defined on a gradient step alone."""

    def refusal(self, optimizer: OptimizerSpec) -> str | None:
        if _is_plain_sgd(optimizer) and not optimizer.momentum:
            return None
        return "is defined on plain SGD; take kind sgd without momentum, weight decay and clipping"


@dataclass(frozen=True, kw_only=True)
class GradientTracking(OfPlainSGD):
    """Each replica steps on an estimate of all replicas' mean gradient, which is mixed too (arXiv:1607.03218)."""

    kind: ClassVar[str] = "gradient-tracking"
    vectors_mixed: ClassVar[int] = 2
    vectors_between_steps: ClassVar[int] = 2

    def transition_class(self) -> type[DecentralisedTransition]:
        from meshmark.algorithms.decentralised.transition import GradientTrackingTransition

        return GradientTrackingTransition


@dataclass(frozen=True, kw_only=True)
class ExactDiffusion(OfPlainSGD):
    """DSGD with its bias corrected (arXiv:1702.05122; D2, arXiv:1803.07068).

    Raises `InputError` for a graph that changes from step to step.
    """

    kind: ClassVar[str] = "exact-diffusion"
    vectors_between_steps: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not self.graph.is_static:
            raise InputError(
                f"algorithm: {self.kind} corrects the bias of one fixed matrix, and graph {self.graph.id} changes from "
                "step to step; take ring, grid or exponential"
            )

    @classmethod
    def presets(cls) -> Iterator[Self]:
        graphs = (Graph(kind=kind) for kind in GraphKind if kind is not GraphKind.OWN)
        return (cls(graph=graph) for graph in graphs if graph.is_static)

    def transition_class(self) -> type[DecentralisedTransition]:
        from meshmark.algorithms.decentralised.transition import ExactDiffusionTransition

        return ExactDiffusionTransition


def _is_plain_sgd(optimizer: OptimizerSpec) -> bool:
    """Return whether the optimizer is SGD without weight decay and clipping."""
    return optimizer.kind is OptimizerKind.SGD and not optimizer.weight_decay and optimizer.clip_norm is None


ALGORITHMS: tuple[type[Algorithm], ...] = (DmSGD, DPSGD, DSGD, ExactDiffusion, GradientTracking, QuasiGlobal)
