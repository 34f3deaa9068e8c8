"""Which engine is whose."""

from __future__ import annotations

from meshmark.adapters.compressed.engines import CompressedEngine, EF21Engine, ErrorFeedbackEngine, MajorityVoteEngine
from meshmark.adapters.compressed.one_bit import OneBitAdamEngine, OneBitLAMBEngine, ZeroOneAdamEngine
from meshmark.adapters.compressed.served import DoubleSqueezeEngine
from meshmark.spec.algorithm import AlgorithmKind

ENGINES: dict[AlgorithmKind, type[CompressedEngine]] = {
    AlgorithmKind.COMPRESSED: CompressedEngine,
    AlgorithmKind.ERROR_FEEDBACK: ErrorFeedbackEngine,
    AlgorithmKind.EF21: EF21Engine,
    AlgorithmKind.DOUBLE_SQUEEZE: DoubleSqueezeEngine,
    AlgorithmKind.ONE_BIT_ADAM: OneBitAdamEngine,
    AlgorithmKind.ONE_BIT_LAMB: OneBitLAMBEngine,
    AlgorithmKind.ZERO_ONE_ADAM: ZeroOneAdamEngine,
    AlgorithmKind.MAJORITY_VOTE: MajorityVoteEngine,
}
