"""Mutants of algorithms whose replicas differ: four of each at least, that the suite of equivalence must catch."""

from __future__ import annotations

from meshmark.judge.faults import Fault
from meshmark.spec.layout import Layout
from meshmark.spec.workload import workload
from tests.broken import mixing as m
from tests.broken.mutant import Mutant, on

_ALONG = "decentralised"
_DSGD, _DPSGD = workload("gpt-mini-dsgd-ring"), workload("gpt-mini-dpsgd-ring")
_ONE_PEER = workload("gpt-mini-dsgd-one-peer")
_DMSGD, _QUASI = workload("gpt-mini-heavy-ball-dmsgd-ring"), workload("gpt-mini-heavy-ball-quasi-global-ring")
_TRACKING, _DIFFUSION = workload("gpt-mini-sgd-gradient-tracking-ring"), workload("gpt-mini-sgd-exact-diffusion-ring")
_FOUR = Layout(dp=4)
"""Where two average all that they have, a momentum that is mixed is one that is not."""

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
]
