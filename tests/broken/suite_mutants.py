"""Mutants that the suites of equivalence, memory, communication and throughput must catch, in a plain run."""

from __future__ import annotations

from dataclasses import replace

from meshmark.judge.deviation import ENDURANCE_STEPS, OBSERVED_STEPS
from meshmark.judge.faults import Fault
from meshmark.spec.layout import Layout, Schedule
from meshmark.spec.precision import Precision
from meshmark.spec.workload import workload
from tests.broken import convolutions as k
from tests.broken import data as d
from tests.broken import experts as e
from tests.broken import gradients as g
from tests.broken import later as w
from tests.broken import loops as y
from tests.broken import mixed as m
from tests.broken import pairs
from tests.broken import pipelines as p
from tests.broken import regional as r
from tests.broken import states as s
from tests.broken import timed as c
from tests.broken import traffic as t
from tests.broken import updates as u
from tests.broken import variants as x
from tests.broken import vision as v
from tests.broken.modules import NAMED, ONE_MODULE, BackwardScaled, ForwardScaled
from tests.broken.mutant import (
    AMOEBANET,
    COATNET,
    COATNET_BN,
    DEEP,
    GPT,
    MIXTURE,
    OWN,
    RESNET,
    TIED,
    VIT,
    VIT_BN,
    Mutant,
    on,
)

F = Fault
FOUR = Layout(dp=4, num_micro_batches=2)
REPLICATED = Layout(dp=2, pp=2, num_micro_batches=4, schedule=Schedule.ONE_F_ONE_B)
TENSOR_REPLICATED = Layout(dp=2, tp=2, num_micro_batches=4)
INTERLEAVED = Layout(pp=2, num_micro_batches=4, schedule=Schedule.INTERLEAVED, virtual_stages=2)
WARMING = replace(GPT, name="gpt-mini-warmup", optimizer=replace(GPT.optimizer, warmup_steps=8))
SUITE_MUTANTS: list[Mutant] = [
    # Trainers that own their loop
    *on("hf-trainer hf-trainer-fsdp2 hf-trainer-deepspeed", y.DividesLossTwice, F.SCALED),
    *on("hf-trainer hf-trainer-fsdp2", y.DividesByOwnTokens, F.UNEVEN),
    *on("hf-trainer", y.CountsPadding, F.SCALED, F.MASK),
    *on("hf-trainer", y.NeverLeavesNoSync, F.NOT_REDUCED, F.DRIFT),
    *on("hf-trainer hf-trainer-fsdp2", y.ClipsTwice, F.CLIPPING),
    *on("hf-trainer", y.ClipsEachTensor, F.CLIPPING),
    *on("hf-trainer", y.KeepsGradients, F.NOT_CLEARED),
    *on("hf-trainer hf-trainer-fsdp2", y.DropsLastMicroBatch, F.DROPPED),
    *on("hf-trainer", y.SameRowsOnAllRanks, F.DROPPED, F.UNEVEN, F.NOT_REDUCED),
    *on("hf-trainer", y.ShiftsLabelsAgain, F.FORWARD, F.MISPLACED),
    *on("hf-trainer", y.StepsScheduleTwice, F.UPDATE, workload=WARMING),
    *on("hf-trainer", y.FreezesFirstBlock, F.MISSING),
    *on("lightning-trainer", y.ClipsByValue, F.CLIPPING),
    *on("lightning-trainer", y.MeansOfMicroBatches, F.UNEVEN),
    *on("lightning-trainer", y.DividesByMicroBatches, F.SCALED),
    *on("lightning-trainer", y.StepsScheduleByMicroBatch, F.UPDATE, workload=WARMING),
    *on("accelerate-loop", y.ForgetsNumProcesses, F.SCALED),
    *on("accelerate-loop", y.CountsOwnLabels, F.UNEVEN),
    *on("accelerate-loop", y.NeverClears, F.NOT_CLEARED),
    # Single modules, which `--localise` names
    *(mutant for defect in ONE_MODULE for mutant in on("ddp", defect, *NAMED.get(defect, ()))),
    *on("fsdp2 hf-trainer hf-trainer-fsdp2 hf-trainer-deepspeed lightning-trainer", ForwardScaled),
    *on("fsdp2 hf-trainer hf-trainer-deepspeed", BackwardScaled),
    # Part of a run: a rank, a block, a tensor, a row, an element
    *on("ddp", r.ElementKept, F.NOT_REDUCED),
    *on("ddp", r.TailKept, F.NOT_REDUCED),
    *on("ddp", r.BiasByMax, F.OTHER_REDUCTION),
    *on("ddp", r.OneRankHalved, F.SCALED, F.UNEVEN),
    *on("ddp", r.OneBlockLost, F.MISSING),
    *on("ddp fsdp2", r.StaleTail, F.STALE_GRADIENT),
    *on("ddp fsdp2", r.OtherActivationOnLastRank, F.VARIANT),
    *on("ddp fsdp2", r.MaskEarlyOnLastRank, F.MASK),
    *on("ddp", r.BlockStaleOnLastRank, F.STALE_WEIGHTS),
    *on("ddp", r.ClipsByLastNorm, F.CLIPPING),
    *on("ddp", r.LazyEmbedding, F.NEVER_UPDATED),
    *on("fsdp2", r.ShardsSwapped, F.MISPLACED),
    *on("ddp", r.RowsInOrderOfRanks, F.MISPLACED),
    *on("ddp fsdp2", r.AmsGrad, F.UPDATE),
    *on("ddp fsdp2", r.EpsInsideRoot, F.UPDATE),
    *on("fsdp2", r.ForwardOfStaleBlock, F.STALE_WEIGHTS),
    *on("fsdp2", r.BackwardOfStaleBlock, F.STALE_WEIGHTS),
    *on("fsdp2", r.ForwardInOrderOfRanks, F.MISPLACED),
    *on("ddp", r.PositionsOffOnLastRank, F.VARIANT),
    *on("ddp", r.TargetsLateInLastRow, F.MISPLACED),
    *on("ddp", r.ReadsBufferElsewhere, F.MISPLACED),
    *on("ddp", r.BlockOfAnother, F.MISPLACED),
    *on("ddp", r.HeadRounded, F.PRECISION),
    *on("ddp", m.ForgetsScale, F.LOSS_SCALE, precision=Precision.FP16),
    *on("fsdp2", r.GradientShardShifted, F.MISPLACED),
    *on("fsdp2", r.ShardBeginsEarly, F.MISPLACED),
    *on("ddp", r.RowWithoutGradient, F.MISSING),
    *on("ddp", r.RowsScaled, F.SCALED),
    *on("ddp", r.LastRankKeepsOwnBias, F.NOT_REDUCED),
    *on("fsdp2", r.ShardRounded, F.PRECISION),
    *on("ddp", r.HalfForgotten, F.UPDATE),
    *on("ddp", r.MomentShifted, F.MISPLACED),
    *on("ddp", r.MomentsOfAnother, F.MISPLACED),
    *on("pipeline", p.LastStageClipsAlone, F.CLIPPING),
    *on("pipeline", p.StaleBoundary, F.STALE_ACTIVATIONS),
    # Variants of losses, modules and rules
    *on("ddp", x.LogitsPenalised, F.OBJECTIVE),
    *on("ddp fsdp2", x.SmoothsLabels, F.OBJECTIVE),
    *on("ddp", x.EntropyRewarded, F.OBJECTIVE),
    *on("ddp fsdp2", x.L2InGradients, F.OBJECTIVE),
    *on("ddp", x.LossInBf16, F.PRECISION),
    *on("ddp fsdp2", x.FirstTargetLeftOut, F.DROPPED),
    *on("ddp", x.DividesByNextCount, F.SCALED),
    *on("ddp fsdp2", x.ReluForGelu, F.VARIANT),
    *on("ddp", x.EpsOfAllNorms, F.VARIANT),
    *on("ddp", x.NormWithoutBias, F.MISSING),
    *on("ddp fsdp2", x.HidesItself, F.VARIANT),
    *on("ddp", x.ScoresUnscaled, F.VARIANT),
    *on("ddp", x.ScaledByModelWidth, F.VARIANT),
    *on("ddp", x.ScaledByTwoHeads, F.VARIANT),
    *on("ddp", x.HeadsNotTransposed, F.VARIANT),
    *on("ddp", x.NormOfConstants, F.VARIANT),
    *on("ddp", r.SecondMomentUnclipped, F.UPDATE),
    *on("ddp", x.SeesAWindow, F.VARIANT),
    *on("ddp", x.SeesTwelveTokens, F.VARIANT),
    *on("ddp", x.AttentionLeftOut, F.VARIANT),
    *on("ddp", x.OneBlockRounded, F.PRECISION),
    *on("megatron", x.ScaledByModelWidthOnLastRank, F.VARIANT),
    *on("megatron", x.ValuesPassNoGradientOnLastRank, F.BACKWARD),
    *on("ddp", x.PositionsEarlyInLastMicroBatch, F.VARIANT),
    *on("megatron", x.LooksUpNearestRow, F.FORWARD),
    *on("fsdp2", x.ShardOverwritten, F.MISSING, F.DROPPED),
    *on("ddp fsdp2", x.ClipsEachModule, F.CLIPPING),
    *on("ddp fsdp2", x.ClipsEachBlock, F.CLIPPING),
    *on("ddp", x.BiasesShareCount, F.UPDATE),
    *on("ddp", x.CountStartsAtTen, F.UPDATE),
    *on("ddp", x.EpsEarly, F.UPDATE),
    # Scaling
    *on("ddp fsdp2 megatron fairscale-oss fairscale-fsdp", g.OverMicroBatches, F.SCALED),
    *on("gpipe pipeline", g.ScalesGrads, F.SCALED),
    *on("ddp fsdp2", g.SummedOverRanks, F.SCALED),
    *on("ddp fsdp2 fairscale-oss", g.AveragedTwice, F.SCALED),
    *on("ddp fsdp2 megatron gpipe", g.SlightScale, F.SCALED),
    *on("ddp fsdp2", g.SlightBlock, F.SCALED),
    *on("ddp", g.NotUnscaled, F.SCALED),
    *on("ddp", g.Ascends, F.SCALED),
    *on("ddp fsdp2", g.CountsMasked, F.SCALED),
    # Double reduction
    *on("ddp megatron", g.ReducedTwice, F.SCALED),
    *on("gpipe", g.TiedReducedTwice, F.SCALED, workload=TIED),
    # Missing reduction, wrong group
    *on("ddp", g.NoReduction, F.NOT_REDUCED),
    *on("ddp", g.LastNotReduced, F.NOT_REDUCED),
    *on("ddp", g.OneNotReduced, F.NOT_REDUCED),
    *on("ddp", g.WrongGroup, F.NOT_REDUCED, layout=FOUR),
    *on("pipeline", p.StageNotReduced, F.NOT_REDUCED, layout=REPLICATED),
    *on("fairscale-oss", s.BucketsUnreduced, F.NOT_REDUCED),
    *on("gpipe", g.TiedNotReduced, F.DRIFT, workload=TIED),
    *on("megatron", g.InputNotReduced, F.NOT_REDUCED),
    # Weighing
    *on("ddp fsdp2 fairscale-oss fairscale-fsdp", g.MeanOfRanks, F.UNEVEN),
    *on("ddp fsdp2 megatron", g.MeanOfMicroBatches, F.UNEVEN),
    *on("gpipe", g.MeanOfPipeline, F.UNEVEN),
    *on("ddp", g.MovingAverage, F.UNEVEN),
    *on("ddp fsdp2", v.MeanOfRanksOfImages, F.UNEVEN, workload=VIT),
    *on("ddp", v.MeanOfMicroBatchesOfImages, F.UNEVEN, workload=VIT),
    *on("ddp fsdp2", g.MeanOfRanksOfOwn, F.UNEVEN, workload=OWN),
    *on("ddp fsdp2", g.OverMicroBatches, F.SCALED, workload=OWN),
    *on("ddp", g.SummedOverRanks, F.SCALED, workload=OWN),
    *on("ddp", g.NoReduction, F.NOT_REDUCED, workload=OWN),
    *on("ddp", g.DropsLast, F.DROPPED, workload=OWN),
    *on("fsdp2", g.SameRows, F.DROPPED, workload=OWN),
    *on("ddp", g.StaleGradients, F.STALE_GRADIENT, workload=OWN),
    *on("fsdp2", g.NotCleared, F.NOT_CLEARED, workload=OWN),
    *on("ddp", g.Bf16Accumulation, F.PRECISION, workload=OWN),
    *on("ddp", u.Bf16Moments, F.PRECISION, workload=OWN),
    *on("gpipe", g.ScalesGrads, F.SCALED, workload=OWN),
    *on("gpipe", g.StaleWeights, F.STALE_WEIGHTS, workload=OWN),
    *on("pipeline", p.StageNotReduced, F.NOT_REDUCED, layout=REPLICATED, workload=OWN),
    # Data
    *on("ddp fsdp2 megatron", g.DropsLast, F.DROPPED),
    *on("fsdp2 megatron", g.DropsFirst, F.DROPPED),
    *on("pipeline", p.DropsLastMicroBatch, F.DROPPED),
    *on("ddp fsdp2", g.SameRows, F.DROPPED),
    *on("ddp fsdp2", g.DropsRank, F.DROPPED),
    *on("ddp", g.LosesRareToken, F.MISSING),
    *on("ddp gpipe megatron", g.NextBatch, F.OTHER_BATCH),
    *on("ddp fsdp2", g.RankLags, F.OTHER_BATCH),
    *on("ddp fsdp2", d.TargetsOfNextMicroBatch, F.MISPLACED),
    *on("ddp", d.TwoExchangeTargets, F.MISPLACED),
    *on("ddp gpipe megatron", d.InputsOfMicroBatchBefore, F.MISPLACED),
    *on("ddp fsdp2", d.TargetsOfOtherRank, F.MISPLACED),
    *on("ddp gpipe", d.StaleMicroBatch, F.OTHER_BATCH),
    *on("ddp fsdp2", d.StaleInputs, F.OTHER_BATCH),
    *on("ddp gpipe", g.NoMask, F.MASK),
    # Staleness
    *on("ddp fsdp2 gpipe", g.StaleGradients, F.STALE_GRADIENT),
    *on("ddp gpipe", u.StaleUpdate, F.STALE_GRADIENT),
    *on("ddp fsdp2 gpipe", g.NotCleared, F.NOT_CLEARED),
    *on("ddp fsdp2 gpipe", g.StaleWeights, F.STALE_WEIGHTS),
    # Precision
    *on("ddp fsdp2 megatron", g.Bf16Accumulation, F.PRECISION),
    *on("ddp", g.CompressedReduction, F.PRECISION),
    *on("ddp", g.Bf16Forward, F.PRECISION),
    *on("ddp fsdp2 gpipe", u.Bf16Weights, F.PRECISION),
    *on("ddp fsdp2 megatron", u.Bf16Moments, F.PRECISION),
    *on("ddp", u.Bf16States, suite="memory"),
    # Start, randomness, function
    *on("ddp gpipe", u.OtherSeed, F.START),
    *on("ddp fsdp2", u.Bf16Start, F.START),
    *on("ddp", u.RankStartsElsewhere, F.DRIFT),
    *on("ddp fsdp2", g.Dropout, F.FORWARD),
    *on("ddp megatron", g.OtherEpsilon, F.VARIANT),
    *on("ddp gpipe", g.TellsOwnLoss, F.LOSS),
    *on("ddp", g.Frozen, F.MISSING),
    *on("ddp", v.NormalisesAsInEvaluation, F.FORWARD, workload=VIT_BN),
    *on("ddp", v.NormalisesWholeRank, F.FORWARD, workload=VIT_BN),
    *on("ddp", k.NormalisesWholeRankOfConvolutions, F.FORWARD, workload=RESNET),
    *on("ddp fsdp2", k.ShortcutsDetached, F.BACKWARD, workload=RESNET),
    *on("ddp fsdp2", k.OtherSideOfPositions, F.FORWARD, workload=COATNET),
    *on("ddp", k.HeadsShareBias, F.FORWARD, workload=COATNET),
    *on("ddp", k.PositionsNotUpdated, F.MISSING, workload=COATNET),
    *on("ddp fsdp2", k.NeighbouringGroups, F.FORWARD, workload=COATNET),
    *on("ddp gpipe", k.SkipsToTheOtherCell, F.FORWARD, workload=AMOEBANET),
    # Experts
    *on("ddp fsdp2", e.RoutesToOne, F.FORWARD, F.MISSING, workload=MIXTURE),
    *on("ddp gpipe", e.WeighsOverAll, F.VARIANT, workload=MIXTURE),
    *on("ddp", e.ExpertsSwapped, F.FORWARD, workload=MIXTURE),
    *on("ddp fsdp2", e.GateLearnsNothing, F.MISSING, workload=MIXTURE),
    *on("ddp", e.DropsTokens, F.VARIANT, workload=MIXTURE),
    *on("ddp", e.OneTokenElsewhere, F.FORWARD, workload=MIXTURE),
    # Buffers
    *on("gpipe pipeline", k.InfersOnStages, F.BUFFERS, workload=AMOEBANET),
    *on("ddp", k.SharesStatisticsOfConvolutions, F.BUFFERS, workload=COATNET_BN),
    *on("ddp fsdp2", k.KeepsStatisticsOfConvolutions, F.BUFFERS, workload=COATNET_BN),
    *on("ddp fairscale-oss", v.RankKeepsStatistics, F.BUFFERS, workload=VIT_BN),
    *on("ddp fsdp2", v.OtherMomentum, F.BUFFERS, workload=VIT_BN),
    *on("ddp", v.SharesStatistics, F.BUFFERS, workload=VIT_BN),
    *on("ddp", v.RoundsStatistics, F.BUFFERS, workload=VIT_BN),
    *on("ddp", k.ComputesAgain, F.BUFFERS, workload=RESNET),
    # Updates
    *on("ddp fsdp2 gpipe", u.NeverUpdates, F.NEVER_UPDATED),
    *on("ddp megatron gpipe", u.OneForgotten, F.NEVER_UPDATED),
    *on("ddp fairscale-oss", u.RankNeverUpdates, F.DRIFT),
    *on("ddp fsdp2", u.NoClipping, F.CLIPPING),
    *on("gpipe", u.PipelineNoClipping, F.CLIPPING),
    *on("ddp", u.ClipsEach, F.CLIPPING),
    *on("ddp", u.ClipsValues, F.CLIPPING),
    *on("fsdp2 megatron gpipe", u.OwnNorm, F.CLIPPING),
    *on("ddp", u.CountsReplicas, F.CLIPPING),
    *on("ddp fsdp2", u.NoWeightDecay, F.UPDATE),
    *on("ddp", u.CoupledDecay, F.UPDATE),
    *on("ddp gpipe", u.OtherBetas, F.UPDATE),
    *on("ddp", u.OtherEps, F.UPDATE),
    *on("ddp megatron", u.DoubleRate, F.UPDATE),
    *on("ddp", u.NoBiasCorrection, F.UPDATE),
    *on("ddp fsdp2", u.ForgetsStates, F.UPDATE),
    # Replicas that may differ
    *on("post-local-sgd", g.OverMicroBatches, F.SCALED),
    *on("post-local-sgd", u.DoubleRate, F.UPDATE),
    *on("post-local-sgd", u.NoClipping, F.CLIPPING),
    # Of other kinds of optimizers
    *on("ddp fsdp2", u.ForgetsMomentum, F.UPDATE, workload=workload("gpt-mini-momentum")),
    *on("ddp fsdp2 gpipe", u.Nesterov, F.UPDATE, workload=workload("gpt-mini-momentum")),
    *on("ddp megatron", u.Dampened, F.UPDATE, workload=workload("gpt-mini-momentum")),
    *on("ddp", u.NoNesterov, F.UPDATE, workload=workload("gpt-mini-nesterov")),
    *on("ddp gpipe", u.OtherBeta2Decay, F.UPDATE, workload=workload("gpt-mini-adafactor")),
    *on("ddp gpipe", u.NotOrthogonal, F.UPDATE, workload=workload("gpt-mini-muon")),
    *(
        mutant
        for end, defects in {
            "lars": (u.OneRateForAll, u.ForgetsLarsMomentum, u.LarsWithoutDecay, u.OtherLarsMomentum),
            "lamb": (u.OneRate, u.ForgetsLambMoments, u.LambWithoutDecay, u.OtherLambBetas),
        }.items()
        for defect in defects
        for mutant in on("ddp", defect, F.UPDATE, workload=workload(f"gpt-mini-{end}"))
    ),
    # Of DeepSpeed's variants
    *on("deepspeed-zero0", g.SummedOverRanks, F.SCALED),
    *on("deepspeed-zero0", s.KeepsGradientsUnnamed, suite="memory"),
    *on("deepspeed-offload/1 deepspeed-offload/2 deepspeed-offload/3", u.DoubleRate, F.UPDATE),
    *on("deepspeed-offload/2", s.KeepsMastersUnnamed, suite="memory"),
    *on("deepspeed-offload/2 deepspeed-offload/3", s.StaysOnDevice, suite="memory"),
    *on("deepspeed-offload-params", u.DoubleRate, F.UPDATE),
    *on("fairscale-oss-ddp", g.SummedOverRanks, F.SCALED),
    *on("fairscale-oss-ddp", s.ShardingIgnored, suite="memory"),
    # Of Fabric's
    *on("fabric-ddp", s.ReducesEveryMicroBatch, suite="communication"),
    *on("fabric-ddp-separate fabric-fsdp fabric-fsdp-separate", u.DoubleRate, F.UPDATE),
    *on("fabric-fsdp", s.ShardingIgnored, suite="memory"),
    # Two at once
    *on("ddp fsdp2", pairs.UnevenAtDoubleRate, F.UNEVEN, F.UPDATE),
    *on("ddp", pairs.ScaledUnclipped, F.SCALED, F.CLIPPING),
    *on("fsdp2", pairs.DropsRowsAndDecay, F.DROPPED, F.UPDATE),
    *on("ddp", pairs.CountsMaskedWithOtherBetas, F.SCALED, F.UPDATE),
    *on("ddp", pairs.StaleInBf16, F.STALE_GRADIENT, F.PRECISION),
    # On the clock alone
    *on("ddp", c.StepsUnreduced, suite="throughput"),
    *on("ddp fsdp2", c.StepsUnclipped, suite="throughput"),
    *on("ddp fsdp2", c.StepsUnclippedInTheEnd, suite="throughput"),
    *on("ddp fsdp2 megatron gpipe", c.StepsOnHalfTheBatch, suite="throughput"),
    *on("ddp", c.ReducesFirstSteps, suite="throughput"),
    # Not what was asked for
    *on("fsdp2 fairscale-oss", s.ShardingIgnored, suite="memory"),
    *on("ddp", s.KeepsGradients, suite="memory"),
    *on("ddp fsdp2 fairscale-oss", s.KeepsGradientsUnnamed, suite="memory"),
    *on("ddp fsdp2", s.KeepsMastersUnnamed, suite="memory"),
    *on("deepspeed/2", s.CopiesWhileItAccumulates, suite="memory"),
    *on("ddp gpipe", s.CacheGrows, suite="memory"),
    *on("ddp", s.ReducesEveryMicroBatch, suite="communication"),
    *on("ddp", s.ReducesAgain, suite="communication"),
    *on("fsdp2", s.StaysWhole, suite="communication"),
    *on("ddp", t.SameBytesInPairs, suite="communication", layout=FOUR),
    *on("megatron", t.ReplicasOverTensorRanks, suite="communication", layout=TENSOR_REPLICATED),
    *on("pipeline", t.NormOverAllRanks, suite="communication", layout=REPLICATED),
    *on("megatron", t.TwiceHalfTheBytes, suite="communication"),
    *on("gpipe", t.TwiceHalfTheBytes, suite="communication", workload=TIED),
    *on("fsdp2 accelerate-fsdp2", t.BroadcastsToGather, suite="communication"),
    *on("ddp megatron", t.ReducesOneAgain, suite="communication"),
    *on("ddp fsdp2 gpipe deepspeed/2", t.ReducesOneScalarMore, suite="communication"),
    *on("ddp fsdp2", m.ReduceDtypeForgotten, suite="communication", precision=Precision.BF16_REDUCE_BF16),
    *on("ddp fsdp2", m.ReduceDtypeOfAnother, suite="communication", precision=Precision.BF16),
    # In one step, or from some step on
    *on("ddp fsdp2", w.ReducesAgainAtStep3, suite="communication", steps=OBSERVED_STEPS),
    *on("ddp fsdp2", w.ReducesAgainAtFirst, suite="communication", steps=OBSERVED_STEPS),
    *on("ddp fsdp2 gpipe", w.TakesBufferAtStep3, suite="memory", steps=OBSERVED_STEPS),
    *on("ddp fsdp2 megatron", w.LeaksOnOneRank, suite="memory", steps=OBSERVED_STEPS),
    *on("ddp fsdp2", w.ScaledLate, F.SCALED, steps=ENDURANCE_STEPS),
    *on("ddp", w.ReducesAgainLate, suite="communication", steps=ENDURANCE_STEPS),
    *on("ddp", w.LeaksLate, suite="memory", steps=ENDURANCE_STEPS),
    *on("pipeline", p.AllForwardsFirst, suite="memory"),
    *on("pipeline", p.NotInterleaved, suite="communication", workload=DEEP, layout=INTERLEAVED),
]
