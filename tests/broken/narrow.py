"""The defects of fp32 in bf16, whose rounding must hide none of them; and those of bf16 alone."""

from __future__ import annotations

from dataclasses import replace

from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.judge.faults import Fault
from meshmark.models.config import Dataset
from meshmark.spec.precision import Precision
from tests.broken import gradients as g
from tests.broken import mixed as m
from tests.broken import pipelines as p
from tests.broken import regional as r
from tests.broken import variants as x
from tests.broken.algorithms.local_sgd import MUTANTS as LOCAL_SGD_MUTANTS
from tests.broken.engine import Broken
from tests.broken.modules import ONE_MODULE
from tests.broken.mutant import Mutant, on
from tests.broken.suite_mutants import SUITE_MUTANTS

_OF_FP32 = (g.Bf16Forward, x.LossInBf16, *ONE_MODULE)
"""Defects of fp32 alone: what bf16 asks for, and single modules, which are localised in fp32."""
HIDDEN_BY_BF16: tuple[type[Broken], ...] = (r.OtherActivationOnLastRank,)
"""Defects that bf16 hides: they change less than correct engines differ by. The two forms of GELU are 5e-4 apart at
most, where bf16 rounds by 4e-3: in one of two replicas the worst gradient is 1.4 times its noise off, and attention by
hand, which is correct, may be 3.5 times off (gpt-mini, DDP)."""
_BY_SYMPTOM = {
    x.SmoothsLabels: frozenset({Fault.SCALED}),
    x.ScaledByModelWidthOnLastRank: frozenset({Fault.FORWARD}),
    g.OtherEpsilon: frozenset({Fault.FORWARD}),
    x.EpsOfAllNorms: frozenset({Fault.FORWARD}),
    x.EntropyRewarded: frozenset({Fault.BACKWARD}),
}
"""Defects of which bf16 shows a symptom alone. Labels smoothed by 0.05 scale the gradient by 0.95; the rest of it is
no larger than bf16's rounding, and other terms fit as well. Other scores in half of the heads of one block move the
loss by less than bf16's rounding does, so that the loss does not lead to them. Nor does it to another epsilon of all
norms."""


def _runs_in_bf16(mutant: Mutant) -> bool:
    real = load_adapter(builtin_adapters()[mutant.adapter.partition("/")[0]])
    if mutant.workload.routes or mutant.workload.dataset is Dataset.OWN:
        return False
    if mutant.steps:  # another noise of as many steps would take minutes, and shows nothing that a shorter run does not
        return False
    return Precision.BF16 in real.capabilities.precisions and mutant.defect not in (*_OF_FP32, *HIDDEN_BY_BF16)


NARROW_MUTANTS: list[Mutant] = [
    *(
        replace(mutant, precision=Precision.BF16, faults=_BY_SYMPTOM.get(mutant.defect, mutant.faults))
        for mutant in (*SUITE_MUTANTS, *LOCAL_SGD_MUTANTS)
        if mutant.suite == "equivalence" and mutant.precision == Precision.FP32 and _runs_in_bf16(mutant)
    ),
    *on("ddp fsdp2", m.ReduceDtypeOfAnother, Fault.PRECISION, precision=Precision.BF16),
    *on("ddp", m.CopyNotRefreshed, Fault.STALE_WEIGHTS, precision=Precision.BF16),
    *on("ddp", m.CopyRefreshedBySecondUpdates, Fault.STALE_WEIGHTS, precision=Precision.BF16),
    *on("ddp", m.NarrowFinalNorm, Fault.PRECISION, precision=Precision.BF16),
    *on("pipeline", p.RoundsMessages, Fault.PRECISION, precision=Precision.BF16),
]
