"""The table of mutants: which defect, in which adapter, must be caught by which suite and diagnosed as what.

Every name in it is an attribute of this module, the adapter with the defect, so that a launch can be told
`tests.broken.mutants:ddp_OverMicroBatches`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from adapters import ADAPTERS
from meshmark.adapter import Adapter, Engine, RankContext
from meshmark.case import Case
from meshmark.faults import Fault
from meshmark.layout import Layout
from meshmark.registry import load_adapter
from meshmark.workload import Workload, workload
from tests.broken import gradients as g
from tests.broken import states as s
from tests.broken import updates as u
from tests.broken.engine import Broken, breaks

LAYOUTS = {
    "ddp": Layout(dp=2, num_micro_batches=4),
    "fsdp2": Layout(dp=2, zero_stage=3, num_micro_batches=4),
    "fairscale-oss": Layout(dp=2, zero_stage=2, num_micro_batches=4),
    "fairscale-fsdp": Layout(dp=2, zero_stage=3, num_micro_batches=4),
    "megatron": Layout(tp=2, num_micro_batches=4),
    "gpipe": Layout(pp=2, num_micro_batches=4),
}
"""Degree and micro-batches differ, so that one is not taken for the other."""
GPT = workload("gpt-mini")
TIED = replace(GPT, name="gpt-tied", model=replace(GPT.model, name="gpt-tied", tied_embeddings=True))


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One defect in one adapter."""

    adapter: str
    """The real one that is broken."""
    defect: type[Broken] | type[Adapter]
    """A mixin for its engine, or an adapter in its place."""
    suite: str
    """That must fail; another may fail too."""
    faults: frozenset[Fault]
    """Diagnoses that are right. Empty where the failing suite's summary is the diagnosis."""
    layout: Layout
    workload: Workload = GPT

    @property
    def name(self) -> str:
        return f"{self.adapter.replace('-', '_')}_{self.defect.__name__}"

    @property
    def case(self) -> Case:
        return Case(adapter=self.name, workload=self.workload, layout=self.layout)


def _on(
    adapters: str, defect: type[Broken] | type[Adapter], *faults: Fault, suite: str = "equivalence",
    workload: Workload = GPT, layout: Layout | None = None,
) -> Iterator[Mutant]:  # fmt: skip
    for adapter in adapters.split():
        yield Mutant(
            adapter=adapter, defect=defect, suite=suite, faults=frozenset(faults), workload=workload,
            layout=layout or LAYOUTS[adapter],
        )  # fmt: skip


F = Fault
FOUR = Layout(dp=4, num_micro_batches=2)
MUTANTS: list[Mutant] = [
    # Scaling
    *_on("ddp fsdp2 megatron fairscale-oss fairscale-fsdp", g.OverMicroBatches, F.SCALED),
    *_on("gpipe", g.ScalesGrads, F.SCALED),
    *_on("ddp fsdp2", g.SummedOverRanks, F.SCALED),
    *_on("ddp fsdp2 fairscale-oss", g.AveragedTwice, F.SCALED),
    *_on("ddp fsdp2 megatron gpipe", g.SlightScale, F.SCALED),
    *_on("ddp", g.NotUnscaled, F.SCALED),
    *_on("ddp", g.Ascends, F.SCALED),
    *_on("ddp fsdp2", g.CountsMasked, F.SCALED),
    # Double reduction
    *_on("ddp megatron", g.ReducedTwice, F.SCALED),
    *_on("gpipe", g.TiedReducedTwice, F.SCALED, workload=TIED),
    # Missing reduction, wrong group
    *_on("ddp", g.NoReduction, F.NOT_REDUCED),
    *_on("ddp", g.LastNotReduced, F.NOT_REDUCED),
    *_on("ddp", g.OneNotReduced, F.NOT_REDUCED),
    *_on("ddp", g.WrongGroup, F.NOT_REDUCED, layout=FOUR),
    *_on("fairscale-oss", s.BucketsUnreduced, F.NOT_REDUCED),
    *_on("gpipe", g.TiedNotReduced, F.DRIFT, workload=TIED),
    *_on("megatron", g.InputNotReduced, F.DRIFT),
    # Weighing
    *_on("ddp fsdp2 fairscale-oss fairscale-fsdp", g.MeanOfRanks, F.UNEVEN),
    *_on("ddp fsdp2 megatron", g.MeanOfMicroBatches, F.UNEVEN),
    *_on("gpipe", g.MeanOfPipeline, F.UNEVEN),
    *_on("ddp", g.MovingAverage, F.UNEVEN),
    # Data
    *_on("ddp fsdp2 megatron", g.DropsLast, F.DROPPED),
    *_on("fsdp2 megatron", g.DropsFirst, F.DROPPED),
    *_on("ddp fsdp2", g.SameRows, F.DROPPED),
    *_on("ddp fsdp2", g.DropsRank, F.DROPPED),
    *_on("ddp gpipe megatron", g.NextBatch, F.OTHER_BATCH),
    *_on("ddp fsdp2", g.RankLags, F.OTHER_BATCH),
    *_on("ddp gpipe", g.NoMask, F.MASK),
    # Staleness
    *_on("ddp fsdp2 gpipe", g.StaleGradients, F.STALE_GRADIENT),
    *_on("ddp gpipe", u.StaleUpdate, F.STALE_GRADIENT),
    *_on("ddp fsdp2 gpipe", g.NotCleared, F.NOT_CLEARED),
    *_on("ddp fsdp2 gpipe", g.StaleWeights, F.STALE_WEIGHTS),
    # Precision
    *_on("ddp fsdp2 megatron", g.Bf16Accumulation, F.PRECISION),
    *_on("ddp", g.CompressedReduction, F.PRECISION),
    *_on("ddp", g.Bf16Forward, F.PRECISION),
    *_on("ddp fsdp2 gpipe", u.Bf16Weights, F.PRECISION),
    *_on("ddp fsdp2 megatron", u.Bf16Moments, F.PRECISION),
    *_on("ddp", u.Bf16States, suite="memory"),
    # Start, randomness, function
    *_on("ddp gpipe", u.OtherSeed, F.START),
    *_on("ddp fsdp2", u.Bf16Start, F.START),
    *_on("ddp", u.RankStartsElsewhere, F.DRIFT),
    *_on("ddp fsdp2", g.Dropout, F.FORWARD),
    *_on("ddp megatron", g.OtherEpsilon, F.FORWARD),
    *_on("ddp gpipe", g.TellsOwnLoss, F.LOSS),
    *_on("ddp", g.Frozen, F.MISSING),
    # Updates
    *_on("ddp fsdp2 gpipe", u.NeverUpdates, F.NEVER_UPDATED),
    *_on("ddp megatron gpipe", u.OneForgotten, F.NEVER_UPDATED),
    *_on("ddp fairscale-oss", u.RankNeverUpdates, F.DRIFT),
    *_on("ddp fsdp2", u.NoClipping, F.CLIPPING),
    *_on("gpipe", u.PipelineNoClipping, F.CLIPPING),
    *_on("ddp", u.ClipsEach, F.CLIPPING),
    *_on("ddp", u.ClipsValues, F.CLIPPING),
    *_on("fsdp2 megatron gpipe", u.OwnNorm, F.CLIPPING),
    *_on("ddp", u.CountsReplicas, F.CLIPPING),
    *_on("ddp fsdp2", u.NoWeightDecay, F.UPDATE),
    *_on("ddp", u.CoupledDecay, F.UPDATE),
    *_on("ddp gpipe", u.OtherBetas, F.UPDATE),
    *_on("ddp", u.OtherEps, F.UPDATE),
    *_on("ddp megatron", u.DoubleRate, F.UPDATE),
    *_on("ddp", u.NoBiasCorrection, F.UPDATE),
    *_on("ddp fsdp2", u.ForgetsStates, F.UPDATE),
    # Not what was asked for
    *_on("fsdp2 fairscale-oss", s.ShardingIgnored, suite="memory"),
    *_on("ddp", s.KeepsGradients, suite="memory"),
    *_on("ddp", s.ReducesEveryMicroBatch, suite="communication"),
    *_on("ddp", s.ReducesAgain, suite="communication"),
    *_on("fsdp2", s.StaysWhole, suite="communication"),
]
BY_NAME = {mutant.name: mutant for mutant in MUTANTS}
_SCALE = "ScaledByPartsPerBillion"


def scaled(adapter: str, parts_per_billion: int) -> str:
    """Name of the adapter whose gradient of one norm is off by so much."""
    return f"{adapter}_{_SCALE}_{parts_per_billion}"


def target(name: str) -> str:
    """What a launcher is told to run."""
    return f"{__name__}:{name}"


def __getattr__(name: str) -> type[Adapter]:
    if _SCALE in name:
        adapter, _, parts = name.partition(f"_{_SCALE}_")
        return _broken(adapter, type(name, (g.SlightScale,), {"by": int(parts) * 1e-9}))
    if name not in BY_NAME:
        raise AttributeError(name)
    return _broken(BY_NAME[name].adapter, BY_NAME[name].defect)


def _broken(adapter: str, defect: type[Broken] | type[Adapter]) -> type[Adapter]:
    real = load_adapter(ADAPTERS[adapter])
    if issubclass(defect, Adapter):
        return type(defect.__name__, (defect, real), {})

    def build(self: Adapter, case: Case, context: RankContext) -> Engine:
        engine: Engine = breaks(real.build(self, case, context), defect)
        return engine

    return type(defect.__name__, (real,), {"build": build})
