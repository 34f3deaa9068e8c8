"""Which transition is whose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshmark.algorithms.compressing import (
    EF21,
    FORMATS,
    Compressing,
    ErrorFeedback,
    InFormat,
    MajorityVote,
    PowerSGD,
)
from meshmark.algorithms.corrected import ExactDiffusion, GradientTracking
from meshmark.algorithms.decentralised import Decentralised, MixedMomentum, ParallelSGD, QuasiGlobal
from meshmark.algorithms.downpour import Downpour
from meshmark.algorithms.local_sgd import DiLoCo, FedAvg, LocalSGD
from meshmark.algorithms.one_bit import OneBitAdam, OneBitLAMB, ZeroOneAdam
from meshmark.algorithms.pipemare import Rescheduled
from meshmark.algorithms.replicas import Algorithm, Synchronous, UpdateRule
from meshmark.algorithms.served import DoubleSqueeze
from meshmark.spec.algorithm import COMPRESSING, OWN_MOMENTUM, STALE, AlgorithmKind
from meshmark.spec.optimizer import OptimizerKind, OptimizerSpec
from meshmark.spec.workload import Workload

ALONG_GRAPHS: dict[AlgorithmKind, type[Decentralised]] = {
    AlgorithmKind.DSGD: Decentralised,
    AlgorithmKind.DPSGD: ParallelSGD,
    AlgorithmKind.DMSGD: MixedMomentum,
    AlgorithmKind.QUASI_GLOBAL: QuasiGlobal,
    AlgorithmKind.GRADIENT_TRACKING: GradientTracking,
    AlgorithmKind.EXACT_DIFFUSION: ExactDiffusion,
}

COMPRESSED: dict[AlgorithmKind, type[Compressing]] = {
    AlgorithmKind.COMPRESSED: Compressing,
    AlgorithmKind.ERROR_FEEDBACK: ErrorFeedback,
    AlgorithmKind.EF21: EF21,
    AlgorithmKind.DOUBLE_SQUEEZE: DoubleSqueeze,
    AlgorithmKind.ONE_BIT_ADAM: OneBitAdam,
    AlgorithmKind.ONE_BIT_LAMB: OneBitLAMB,
    AlgorithmKind.ZERO_ONE_ADAM: ZeroOneAdam,
    AlgorithmKind.MAJORITY_VOTE: MajorityVote,
}


def compressing_class(workload: Workload) -> type[Compressing]:
    """Whose transition is the workload's."""
    compressor = workload.algorithm.compressor
    if compressor and compressor.kind in FORMATS:
        return InFormat
    return PowerSGD if workload.algorithm.is_power_sgd else COMPRESSED[workload.algorithm.kind]


def build_algorithm(
    workload: Workload, rules: Sequence[UpdateRule], exact: bool = True, num_stages: int = 1
) -> Algorithm:
    """The workload's, over as many replicas as there are rules, each of its `local_optimizer` and of `num_stages`
    pipeline stages. `exact`: sums are in float64 whatever is summed."""
    kind = workload.algorithm.kind
    if kind is AlgorithmKind.PIPEMARE:
        return Rescheduled(rules[0], workload, num_stages)
    if kind is AlgorithmKind.SYNCHRONOUS or kind in STALE:
        return Synchronous(rules[0])
    if kind is AlgorithmKind.LOCAL_SGD:
        return LocalSGD(workload.algorithm, rules)
    if kind is AlgorithmKind.FED_AVG:
        return FedAvg(workload.algorithm, rules)
    if kind is AlgorithmKind.DOWNPOUR:
        return Downpour(workload, rules)
    if kind is AlgorithmKind.DILOCO:
        return DiLoCo(workload.algorithm, rules)
    if kind in COMPRESSING:
        return compressing_class(workload)(workload, rules, exact)
    return ALONG_GRAPHS[kind](workload, rules)


def local_optimizer(workload: Workload) -> OptimizerSpec:
    """What each replica steps with by itself: without the moments where the algorithm keeps them."""
    if workload.algorithm.kind in (AlgorithmKind.ONE_BIT_ADAM, AlgorithmKind.ZERO_ONE_ADAM):
        return replace(workload.optimizer, kind=OptimizerKind.SGD)
    if workload.algorithm.kind is AlgorithmKind.ONE_BIT_LAMB:  # whose decay is part of what a tensor's rate is of
        return replace(workload.optimizer, kind=OptimizerKind.SGD, weight_decay=0.0)
    if workload.algorithm.kind in OWN_MOMENTUM:
        return replace(workload.optimizer, momentum=0.0)
    return workload.optimizer
