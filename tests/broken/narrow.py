"""The defects of fp32 in bf16, whose rounding must hide none of them; and those of bf16 alone."""

from __future__ import annotations

from dataclasses import replace

from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.judge.faults import Fault
from meshmark.spec.model_config import Dataset
from meshmark.spec.precision import Precision
from tests.broken import gradients as g
from tests.broken import mixed as m
from tests.broken.modules import ONE_MODULE
from tests.broken.mutant import Mutant, on
from tests.broken.suite_mutants import SUITE_MUTANTS

_ASKED_FOR = (g.Bf16Forward, *ONE_MODULE)
"""What is a defect in fp32 alone, or as small as only fp32 shows it."""


def _runs_in_bf16(mutant: Mutant) -> bool:
    real = load_adapter(builtin_adapters()[mutant.adapter.partition("/")[0]])
    if mutant.workload.routes or mutant.workload.dataset is Dataset.OWN:
        return False
    if mutant.steps:  # another noise of as many steps would take minutes, and shows nothing that a shorter run does not
        return False
    return Precision.BF16 in real.capabilities.precisions and mutant.defect not in _ASKED_FOR


NARROW_MUTANTS: list[Mutant] = [
    *(
        replace(mutant, precision=Precision.BF16)
        for mutant in SUITE_MUTANTS
        if mutant.suite == "equivalence" and mutant.precision == Precision.FP32 and _runs_in_bf16(mutant)
    ),
    *on("ddp fsdp2", m.ReduceDtypeOfAnother, Fault.PRECISION, precision=Precision.BF16),
]
