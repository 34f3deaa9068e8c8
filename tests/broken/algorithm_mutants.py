"""Mutants of algorithms whose replicas differ: four of each at least, that the suite of equivalence must catch."""

from __future__ import annotations

from collections.abc import Iterator

from meshmark.judge.faults import Fault
from meshmark.spec.layout import Layout
from meshmark.spec.workload import workload
from tests.broken import compressing as c
from tests.broken import downpour as d
from tests.broken import mixing as m
from tests.broken import one_bit as b
from tests.broken import outer as o
from tests.broken import serving as s
from tests.broken import stale as v
from tests.broken import weighing as w
from tests.broken.engine import Broken
from tests.broken.mutant import Mutant, on

_ALONG = "decentralised"
_DSGD, _DPSGD = workload("gpt-mini-dsgd-ring"), workload("gpt-mini-dpsgd-ring")
_ONE_PEER = workload("gpt-mini-dsgd-one-peer")
_DMSGD, _QUASI = workload("gpt-mini-heavy-ball-dmsgd-ring"), workload("gpt-mini-heavy-ball-quasi-global-ring")
_TRACKING, _DIFFUSION = workload("gpt-mini-sgd-gradient-tracking-ring"), workload("gpt-mini-sgd-exact-diffusion-ring")
_ONE_BIT = workload("gpt-mini-adam-one-bit-adam-signw2")
_ONE_BIT_LAMB = workload("gpt-mini-unclipped-lamb-one-bit-lamb-signw2")
_ZERO_ONE = workload("gpt-mini-plain-adam-zero-one-adam2-signw2")
_PIPEDREAM, _TWO_BUFFERED = workload("gpt-mini-sgd-pipedream"), workload("gpt-mini-sgd-pipedream-2bw")
_VERTICAL, _MARE = workload("gpt-mini-sgd-pipedream-vertical"), workload("gpt-mini-sgd-pipemare")
_DOWNPOUR = workload("gpt-mini-sgd-downpour-p2f3l1")
_FOUR = Layout(dp=4)
"""Where two average all that they have, a momentum that is mixed is one that is not."""


def _compressing(
    adapter: str, algorithm: str, *defects: type[Broken], layout: Layout | None = None
) -> Iterator[Mutant]:
    """Plain SGD's, whose step is as long as what it is made of."""
    for defect in defects:
        yield from on(adapter, defect, Fault.ALGORITHM, workload=workload(f"gpt-mini-sgd-{algorithm}"), layout=layout)


ALGORITHM_MUTANTS: list[Mutant] = [
    *on(_ALONG, m.NeverMixes, Fault.ALGORITHM, workload=_DSGD),
    *on(_ALONG, m.SelfWeightWrong, Fault.ALGORITHM, workload=_DSGD),
    *on(_ALONG, m.RowStochastic, Fault.ALGORITHM, workload=_DSGD),
    *on(_ALONG, m.MixesFirst, Fault.ALGORITHM, workload=_DSGD),
    *on(_ALONG, m.MixesLate, Fault.ALGORITHM, workload=_ONE_PEER, layout=_FOUR),
    *on(_ALONG, m.StaleNeighboursEarly, Fault.ALGORITHM, workload=_DPSGD),
    *on(_ALONG, m.MixesAfter, Fault.ALGORITHM, workload=_DPSGD),
    *on(_ALONG, m.NeverMixesEarly, Fault.ALGORITHM, workload=_DPSGD),
    *on(_ALONG, m.RowStochasticEarly, Fault.ALGORITHM, workload=_DPSGD),
    *on(_ALONG, m.MomentumNotMixed, Fault.ALGORITHM, workload=_DMSGD, layout=_FOUR),
    *on(_ALONG, m.MomentumReset, Fault.ALGORITHM, workload=_DMSGD),
    *on(_ALONG, m.StaleMomentum, Fault.ALGORITHM, workload=_DMSGD),
    *on(_ALONG, m.RowStochasticMomentum, Fault.ALGORITHM, workload=_DMSGD),
    *on(_ALONG, m.MomentumBeforeMixing, Fault.ALGORITHM, workload=_QUASI, layout=_FOUR),
    *on(_ALONG, m.GlobalMomentumReset, Fault.ALGORITHM, workload=_QUASI),
    *on(_ALONG, m.StaleNeighbours, Fault.ALGORITHM, workload=_QUASI),
    *on(_ALONG, m.LocalMomentum, Fault.ALGORITHM, workload=_QUASI),
    *on(_ALONG, m.TracksWithoutLast, Fault.ALGORITHM, workload=_TRACKING),
    *on(_ALONG, m.TracksAlone, Fault.ALGORITHM, workload=_TRACKING),
    *on(_ALONG, m.StepsOnOwn, Fault.ALGORITHM, workload=_TRACKING),
    *on(_ALONG, m.NeverTracks, Fault.ALGORITHM, workload=_TRACKING),
    *on(_ALONG, m.Uncorrected, Fault.ALGORITHM, workload=_DIFFUSION),
    *on(_ALONG, m.WholeWeights, Fault.ALGORITHM, workload=_DIFFUSION),
    *on(_ALONG, m.StaleDiffusion, Fault.ALGORITHM, workload=_DIFFUSION),
    *on(_ALONG, m.SelfWeightOfDiffusion, Fault.ALGORITHM, workload=_DIFFUSION),
    *(
        mutant
        for defect in (o.OuterMomentumReset, o.NoOuterStep, o.OuterHeavyBall, o.MeetsLate, o.OuterAlone)
        for mutant in on("diloco", defect, Fault.ALGORITHM, workload=workload("gpt-mini-sgd-diloco2"))
    ),
    *(
        mutant
        for defect in (w.WeighsAlike, w.WeighsByOthers, w.WeighsTwice, w.NeverMeets, w.MeetsAStepLate)
        for mutant in on("fed-avg", defect, Fault.ALGORITHM, workload=workload("gpt-mini-sgd-fed-avg2"))
    ),
    *(mutant for defect in d.DEFECTS for mutant in on("downpour", defect, Fault.ALGORITHM, workload=_DOWNPOUR)),
    *on("fed-avg", w.OwnMeanForGlobal, Fault.SCALED, workload=workload("gpt-mini-sgd-fed-avg2")),
    *_compressing("compressed", "compressed-top-k10", c.LargestSigned, c.SendsWhole, c.SumsReplicas, c.SendsHalf),
    *_compressing("compressed", "compressed-qsgd64", c.DrawsAlike, c.DrawsOnce, c.RoundsToNearest, c.DividesTwice),
    *_compressing("compressed", "error-feedback-top-k10", c.ForgetsLeft, c.AddsLeftTwice, c.AddsLeftLate),
    *_compressing("compressed", "error-feedback-random-k10", c.SameElements, c.LeavesWhatWasSent),
    *_compressing("compressed", "error-feedback-sign", c.ScalesByNorm, c.NeverScales, c.ScalesByRow),
    *_compressing("compressed", "ef21-top-k10", c.ForgetsKnown, c.StepsOnChanges, c.ChangeOfMean, c.StepsOnFirst),
    *_compressing("compressed", "majority-vote", c.SignOfMean, c.TiesArePlus, c.FirstVotes),
    *_compressing("compressed", "majority-vote", c.MeanOfSigns, layout=_FOUR),  # of two signs, the mean is the vote
    *_compressing(
        "compressed",
        "double-squeeze-top-k10",
        *(s.ServerForgets, s.ServerAddsTwice, s.ServerSums, s.ServerSendsAll, s.WorkersForget),
    ),
    *_compressing("compressed", "double-squeeze-signx3", s.OneRound),
    *(
        mutant
        for defect in (s.VarianceGoesOn, s.MomentumLost, s.BiasCorrected, s.AdaptsLonger)
        for mutant in on("compressed", defect, Fault.ALGORITHM, workload=_ONE_BIT)
    ),
    *(
        mutant
        for defect in (b.RatesStay, b.RatesOfNorms, b.RatesOfLast, b.MeanRatio)
        for mutant in on("compressed", defect, Fault.ALGORITHM, workload=_ONE_BIT_LAMB)
    ),
    *(
        mutant
        for defect in (b.MeetsAlways, b.MomentaStay, b.OfLastRate, b.StepsStay, b.CountsAgain, b.AdaptsAlways)
        for mutant in on("compressed", defect, Fault.ALGORITHM, workload=_ZERO_ONE)
    ),
    *on("pipedream", v.StashTooOld, Fault.ALGORITHM, workload=_PIPEDREAM),
    *on("pipedream", v.NothingInFlight, Fault.ALGORITHM, workload=_PIPEDREAM),
    *on("pipedream", v.FirstStageTooOld, Fault.ALGORITHM, workload=_PIPEDREAM),
    *on("pipedream", v.WeightsOfStart, Fault.ALGORITHM, workload=_PIPEDREAM),
    *on("pipedream", v.NotStashed, Fault.ALGORITHM, workload=_PIPEDREAM),
    *on("pipedream", v.VerticalTooOld, Fault.ALGORITHM, workload=_VERTICAL),
    *on("pipedream", v.OwnNewest, Fault.ALGORITHM, workload=_VERTICAL),
    *on("pipedream", v.VerticalOfStart, Fault.ALGORITHM, workload=_VERTICAL),
    *on("pipedream", v.LastStageTooOld, Fault.ALGORITHM, workload=_VERTICAL),
    *on("pipedream", v.MareNotCorrected, Fault.ALGORITHM, workload=_MARE),
    *on("pipedream", v.MareOneTooLate, Fault.ALGORITHM, workload=_MARE),
    *on("pipedream", v.MareStashes, Fault.ALGORITHM, workload=_MARE),
    *on("pipedream", v.MareForgetsVelocity, Fault.ALGORITHM, workload=_MARE),
    *on("pipedream", v.MareNotRescheduled, Fault.ALGORITHM, workload=_MARE),
    *on("pipedream", v.MareNeverAnnealed, Fault.ALGORITHM, workload=_MARE),
    *on("pipedream", v.NoShadow, Fault.ALGORITHM, workload=_TWO_BUFFERED),
    *on("pipedream", v.ShadowTooOld, Fault.ALGORITHM, workload=_TWO_BUFFERED),
    *on("pipedream", v.LastStageFresh, Fault.ALGORITHM, workload=_TWO_BUFFERED),
    *on("pipedream", v.ShadowIsStepped, Fault.ALGORITHM, workload=_TWO_BUFFERED),
    *_compressing("ddp-compressed", "compressed-bf16", c.OtherFormat, c.HookSums, c.HookDividesTwice),
    *on("ddp-compressed", c.InNoFormat, suite="communication", workload=workload("gpt-mini-sgd-compressed-bf16")),
    *_compressing(
        "ddp-compressed",
        "error-feedback-power-sgd1w2",
        *(c.PowerForgets, c.PowerAddsTwice, c.PowerIsCold, c.WarmsUpLonger),
    ),
]
