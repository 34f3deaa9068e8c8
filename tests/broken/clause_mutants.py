"""Mutants that a clause of conformance must catch, in its own scenarios."""

from __future__ import annotations

from meshmark.judge.faults import Fault
from tests.broken import endings as e
from tests.broken import functions as f
from tests.broken import gradients as g
from tests.broken import mixed as m
from tests.broken import options as o
from tests.broken import randomness as r
from tests.broken import resume as c
from tests.broken import states as s
from tests.broken import updates as u
from tests.broken import wrapped as w
from tests.broken.mutant import Mutant, against

F = Fault
ZERO = "deepspeed/1 deepspeed/2 deepspeed/3"
CLAUSE_MUTANTS: list[Mutant] = [
    # What the suites judge too, in the adapters that are built on others' engines
    *against("loss", "accelerate deepspeed/1", g.TellsOwnLoss, F.LOSS),
    *against("gradients", "accelerate deepspeed/3", w.HookedScale, F.SCALED),
    *against("gradients", "deepspeed/1 deepspeed/2", w.ZeroNotReduced, F.NOT_REDUCED),
    *against("gradients", "accelerate deepspeed/2 deepspeed/3", g.SameRows, F.DROPPED),
    *against("gradients", "accelerate deepspeed/3", g.RankLags, F.OTHER_BATCH),
    *against("gradients", "accelerate", g.StaleGradients, F.STALE_GRADIENT),
    *against("parameters", "accelerate deepspeed/2", u.DoubleRate, F.UPDATE),
    *against("parameters", "accelerate deepspeed/1 deepspeed/3", u.OtherBetas, F.UPDATE),
    *against("parameters", "accelerate deepspeed/3", u.Bf16Weights, F.PRECISION),
    *against("replicas", "ddp accelerate fairscale-oss", u.RankNeverUpdates, F.DRIFT),
    *against("sharding", "fsdp2 accelerate-fsdp2 deepspeed/2 deepspeed/3", s.ShardingIgnored),
    *against("sharding", "ddp", s.KeepsGradients),
    *against("traffic", "ddp accelerate", s.ReducesAgain),
    *against("traffic", "fsdp2 accelerate-fsdp2", s.StaysWhole),
    # Evaluation
    *against("evaluation", "ddp fsdp2 accelerate fairscale-oss deepspeed/1", r.EvaluatesFirstRows, F.EVALUATION),
    *against("evaluation", "ddp gpipe megatron deepspeed/3", r.EvaluatesPart, F.EVALUATION),
    *against("evaluation", "ddp gpipe accelerate deepspeed/2", r.TellsOwnEvaluation, F.EVALUATION),
    *against("evaluation", "ddp fsdp2 gpipe megatron accelerate", r.EvaluationLeavesGradients, F.SCALED, F.NOT_CLEARED),
    *against("evaluation", "ddp fsdp2 gpipe deepspeed/2", r.EvaluationSteps, F.FORWARD),
    # Accumulation, tokens
    *against("accumulation", ZERO, w.ByMicroBatches, F.SCALED),
    *against("accumulation", "accelerate accelerate-fsdp2", w.AccelerateDivides, F.SCALED),
    *against("accumulation", "ddp accelerate deepspeed/2", g.DropsLast, F.DROPPED),
    *against("uneven tokens", "accelerate accelerate-fsdp2 deepspeed/1", g.MeanOfRanks, F.UNEVEN),
    *against("uneven tokens", "accelerate accelerate-fsdp2 deepspeed/3", g.MeanOfMicroBatches, F.UNEVEN),
    *against("uneven tokens", "accelerate deepspeed/1", g.NoMask, F.MASK),
    # Clipping
    *against("clipping", "gpipe accelerate accelerate-fsdp2 deepspeed/2", o.NotClipped, F.CLIPPING),
    *against("clipping", "ddp accelerate deepspeed/3", o.ClipsToOne, F.CLIPPING, F.UPDATE),
    *against("clipping", ZERO, w.ClipsByOwnNorm, F.CLIPPING),
    *against("clipping", "ddp fsdp2 gpipe megatron accelerate deepspeed/1", o.TellsClippedNorm, F.CLIPPING),
    *against("clipping", "fsdp2 accelerate deepspeed/2", o.TellsOwnNorm, F.CLIPPING),
    *against("clipping", "ddp fsdp2 gpipe", o.TellsWrongNormOnLastRank, F.CLIPPING),
    # Groups, frozen, unused
    *against("decay groups", "ddp fsdp2 gpipe megatron fairscale-oss accelerate deepspeed/3", o.DecaysAll, F.UPDATE),
    *against("decay groups", "ddp gpipe deepspeed/1", o.DecaysNothing, F.UPDATE),
    *against("decay groups", "ddp gpipe megatron deepspeed/2", o.SwapsDecay, F.UPDATE),
    *against("decay groups", "ddp accelerate deepspeed/3", o.DecaysAtFullRate, F.UPDATE),
    *against("frozen", "ddp fsdp2 gpipe megatron fairscale-oss accelerate deepspeed/2", o.TrainsFrozen, F.UPDATE),
    *against("unfrozen", "fsdp2", o.StaysFrozen, F.NEVER_UPDATED, F.MISSING),
    *against("frozen", "ddp gpipe megatron deepspeed/3", o.FreezesMore, F.MISSING, F.NEVER_UPDATED),
    *against("frozen", "ddp fsdp2 gpipe megatron accelerate deepspeed/1 deepspeed/2", o.DecaysFrozen, F.UPDATE),
    *against("unused", "ddp fsdp2 gpipe megatron accelerate", o.ZeroForUnused, F.UPDATE),
    *against("unused", "ddp fsdp2 gpipe megatron", o.StaleForUnused, F.STALE_GRADIENT),
    *against("unused", "ddp gpipe megatron", o.SkipsNothing, F.FORWARD),
    # Schedules
    *against("schedule", "ddp gpipe deepspeed/1", o.Late, F.UPDATE),
    *against("schedule", "ddp megatron gpipe accelerate deepspeed/2", o.Early, F.UPDATE),
    *against("schedule", "ddp fsdp2 gpipe megatron accelerate deepspeed/3", o.PerMicroBatch, F.UPDATE),
    *against("schedule", "ddp gpipe fairscale-oss deepspeed/1", o.PerRank, F.UPDATE),
    *against("schedule", "ddp gpipe deepspeed/2", o.NeverStepped, F.UPDATE),
    *against("schedule", "ddp megatron fairscale-fsdp deepspeed/3", o.NoWarmUp, F.UPDATE),
    *against("schedule", "accelerate accelerate-fsdp2", w.AcceleratesDefault, F.UPDATE),
    # Functions
    *against("tied embeddings", "ddp fsdp2 accelerate deepspeed/1", f.HeadIsACopy, F.BACKWARD),
    *against("tied embeddings", "ddp fsdp2 deepspeed/2", f.HeadHasNoGradient, F.BACKWARD),
    *against("tied embeddings", "gpipe", g.TiedNotReduced, F.DRIFT),
    *against("recomputation", "ddp fsdp2 gpipe megatron accelerate deepspeed/2", f.RecomputesRounded, F.PRECISION),
    *against("recomputation", "ddp fsdp2 gpipe megatron deepspeed/2", f.RecomputesOtherInput, F.BACKWARD),
    *against("recomputation", "ddp gpipe accelerate deepspeed/1", f.RecomputesOtherWeights, F.BACKWARD),
    *against("recomputation", "ddp fsdp2 gpipe megatron accelerate deepspeed/3", f.KeepsActivations),
    *against("recomputed dropout", "ddp fsdp2 gpipe megatron accelerate deepspeed/2", f.DrawsOtherMasks),
    *against("recomputed dropout", "megatron", f.PutsBackPyTorchsStates),
    # Randomness
    *against("dropout", "ddp fsdp2 accelerate deepspeed/2", r.SameMasksOnRanks),
    *against("dropout", "ddp fsdp2 gpipe accelerate deepspeed/3", r.SameMasksEveryStep),
    *against("dropout", "ddp deepspeed/2", r.SameMaskInOneModule),
    *against("dropout", "ddp gpipe deepspeed/2", r.OtherProbability),
    *against("dropout", "ddp gpipe", r.OnlyInAttention),
    *against("dropout", "ddp gpipe deepspeed/1", r.NotRescaled),
    *against("dropout", "ddp fsdp2 gpipe deepspeed/3", r.OnInEvaluation),
    *against("dropout", "ddp gpipe accelerate deepspeed/1", r.StaysInEvaluation),
    *against("dropout", "ddp deepspeed/3", r.OffInTraining),
    *against("dropout", "ddp gpipe deepspeed/2", r.DropoutForgotten),
    # Mixed precision
    *against("bf16 masters", "ddp fsdp2 gpipe megatron accelerate deepspeed/1", u.Bf16Weights),
    *against("bf16 masters", "ddp", m.WholeInBf16),
    *against("bf16 masters", "ddp gpipe megatron", u.NormInBf16),
    *against("bf16 states", "ddp fsdp2 gpipe accelerate deepspeed/3", u.Bf16States),
    *against("bf16 states", "ddp fsdp2 gpipe megatron accelerate", m.RoundsGradients),
    *against("bf16 states", "ddp accelerate", m.CompressesBf16),
    *against("bf16 states", "fsdp2", m.ReducesInBf16),
    *against("bf16 states", ZERO, w.DeepSpeedsDefault),
    *against("bf16 states", "ddp fsdp2", m.StaysInFp32),
    *against("bf16 states", "ddp fsdp2 fairscale-fsdp", m.ReduceDtypeOfAnother),
    *against("bf16 reduction", "ddp fsdp2 fairscale-fsdp accelerate-fsdp2", m.ReduceDtypeForgotten),
    *against("bf16 reduction", "ddp fsdp2", m.StaysInFp32),
    *against("bf16 reduction", "ddp", m.WholeInBf16),
    *against("fp16 overflow", "ddp fsdp2", m.NeverSkips),
    *against("fp16 overflow", "ddp fsdp2", m.NeverTakesAStep),
    *against("fp16 overflow", "ddp", m.RankDoesNotSkip),
    *against("fp16 overflow", "ddp fsdp2", m.OverflowMovesMoments),
    *against("fp16 overflow", "ddp fsdp2", m.SkipsNextToo),
    *against("fp16 overflow", "ddp fsdp2", m.OverflowStays),
    # Checkpoints
    *against("resume", f"ddp fsdp2 gpipe megatron fairscale-oss fairscale-fsdp accelerate {ZERO}", c.ForgetsMoments,
             F.UPDATE),
    *against("resume", "ddp gpipe deepspeed/2", c.ForgetsSecondMoments, F.UPDATE),
    *against("resume", "ddp fsdp2 gpipe megatron accelerate deepspeed/1", c.ForgetsCount, F.UPDATE),
    *against("resume", "ddp fsdp2 gpipe megatron accelerate deepspeed/2", c.ForgetsSchedule, F.UPDATE),
    *against("resume", "ddp fsdp2 gpipe accelerate deepspeed/3", c.ForgetsWeights, F.NEVER_UPDATED, F.UPDATE),
    *against("resume", "ddp megatron gpipe", c.ForgetsOne, F.NEVER_UPDATED, F.UPDATE),
    *against("resume", "ddp fsdp2 gpipe accelerate deepspeed/1", c.LoadsRounded, F.PRECISION),
    *against("resume", "ddp fsdp2 gpipe accelerate deepspeed/2", c.SavesStaleWeights, F.NEVER_UPDATED),
    *against("resume", "ddp fsdp2 gpipe deepspeed/3", c.SavesStaleMoments, F.UPDATE),
    # Another rank's moments are right ones in wrong places.
    *against("resume", f"fsdp2 fairscale-fsdp {ZERO}", c.FirstShardForAll, F.UPDATE, F.MISPLACED),
    *against("resume", "fsdp2 deepspeed/1", c.MixesShards),
    *against("resume", "ddp accelerate", c.RankForgetsMoments, F.DRIFT),
    *against("recovery", "ddp fsdp2 gpipe", c.SavesMomentsLater, F.UPDATE),
    *against("recovery", "ddp fsdp2", c.ForgetsMoments, F.UPDATE),
    *against("reshard", "ddp fsdp2 gpipe megatron accelerate", c.ForgetsMoments, F.UPDATE),
    *against("reshard", "ddp fsdp2 gpipe", c.ForgetsSchedule, F.UPDATE),
    *against("reshard", "fsdp2", c.FirstShardForAll, F.UPDATE, F.MISPLACED),
    *against("reshard", "fsdp2", c.MixesShards),
    *against("reshard", "gpipe", c.ForgetsStage, F.UPDATE),
    # Endurance, errors
    *against("memory growth", "ddp accelerate deepspeed/3", e.KeepsGraph),
    *against("memory growth", "ddp megatron deepspeed/1", e.KeepsLogits),
    *against("memory growth", "ddp gpipe", e.KeepsEveryGradient),
    *against("memory growth", "ddp gpipe deepspeed/2", e.KeepsBatches),
    *against("memory growth", "ddp gpipe deepspeed/3", e.KeepsParameters),
    *against("error", "ddp gpipe", e.Waits),
    *against("error", "ddp fsdp2 deepspeed/2", e.HidesMessage),
    *against("error", "ddp accelerate", e.Exits),
    *against("error", "ddp fsdp2 gpipe", e.PeerFailsFirst),
    *against("error", "ddp fsdp2 gpipe megatron deepspeed/3", e.PeersWait),
]  # fmt: skip
