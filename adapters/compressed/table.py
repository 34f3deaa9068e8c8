"""The engine of each algorithm, by kind."""

from __future__ import annotations

from meshmark.adapters.compressed.engines import CompressedEngine, EF21Engine, ErrorFeedbackEngine, MajorityVoteEngine
from meshmark.adapters.compressed.one_bit import OneBitAdamEngine, OneBitLAMBEngine, ZeroOneAdamEngine
from meshmark.adapters.compressed.served import DoubleSqueezeEngine
from meshmark.algorithms.compressed import EF21, Compressed, DoubleSqueeze, ErrorFeedback, MajorityVote
from meshmark.algorithms.one_bit import OneBitAdam, OneBitLAMB, ZeroOneAdam

ENGINES: dict[str, type[CompressedEngine]] = {
    Compressed.kind: CompressedEngine,
    ErrorFeedback.kind: ErrorFeedbackEngine,
    EF21.kind: EF21Engine,
    DoubleSqueeze.kind: DoubleSqueezeEngine,
    OneBitAdam.kind: OneBitAdamEngine,
    OneBitLAMB.kind: OneBitLAMBEngine,
    ZeroOneAdam.kind: ZeroOneAdamEngine,
    MajorityVote.kind: MajorityVoteEngine,
}
