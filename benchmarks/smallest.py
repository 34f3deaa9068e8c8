"""The smallest defect that is caught, of each kind: by bisection, each size a launch."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from benchmarks.trials import MutantRunner
from meshmark.conformance.finding import ClauseResult
from meshmark.conformance.scenario import plain_workload
from meshmark.records.record import Record
from meshmark.spec.case import Case
from meshmark.spec.precision import Precision
from tests.broken.mutant import GPT, LAYOUTS, base_layout
from tests.broken.mutants import sized
from tests.broken.sizes import SIZED

RANGES = {"DropoutProbability": (0.02, 0.9), "WeightDecay": (1e-5, 1e-1), "SecondBeta": (1e-6, 1e-2)}
"""Ranges of sizes; other kinds are searched within DEFAULT."""
DEFAULT = (1e-8, 1e-4)
NARROW = (
    ("ddp", Precision.BF16),
    ("ddp", Precision.FP16),
    ("megatron", Precision.BF16),
)
"""In which GRADIENTS are sought too: no product is split, and some are."""
GRADIENTS = ("NormGradient", "AllGradients")
SPLIT = (1e-6, 1e-1)
"""Range for a gradient whose narrow products are split."""
STEPS_OF_SEARCH = 5
"""Bisections, of the logarithm: the answer is good to a few tens of percent."""


@dataclass(frozen=True, kw_only=True)
class Smallest:
    """Smallest defect of one kind that is caught."""

    kind: str
    adapter: str = "ddp"
    precision: Precision = Precision.FP32
    caught: float | None
    """The smallest size that was; None when none was."""
    survived: float
    """The largest that was not."""
    loss: float
    """By how much the loss of any step then differs, relatively, from a correct run's."""
    evidence: str


def sizes(kind: str, adapter: str = "ddp") -> list[float]:
    """Every size that a bisection could ask for: a launcher must know its adapters beforehand."""
    low, high = RANGES.get(kind, DEFAULT if LAYOUTS[adapter].tp == 1 else SPLIT)
    count = 2**STEPS_OF_SEARCH
    return [low * (high / low) ** (i / count) for i in range(count + 1)]


def searches() -> list[tuple[str, str, Precision]]:
    """Return the searches: kind, adapter and precision."""
    narrow = [(kind, adapter, precision) for adapter, precision in NARROW for kind in GRADIENTS]
    return [*((kind, "ddp", Precision.FP32) for kind in SIZED), *narrow]


def find(mutant_runner: MutantRunner, kind: str, correct: Record) -> Smallest:
    """Between the smallest size of its range, taken to survive, and the largest, taken to be caught; in the place of
    the `correct` run's adapter."""
    case = correct.case
    candidates, low, high = sizes(kind, case.adapter), 0, 2**STEPS_OF_SEARCH
    best = Smallest(
        kind=kind,
        adapter=case.adapter,
        precision=case.precision,
        caught=None,
        survived=candidates[-1],
        loss=math.nan,
        evidence="nothing was caught",
    )
    while high - low > 1:
        middle = (low + high) // 2
        caught, loss, evidence = _attempt(mutant_runner, kind, candidates[middle], correct)
        if caught:
            high = middle
            best = dataclasses.replace(best, caught=candidates[high], loss=loss, evidence=evidence)
        else:
            low = middle
    return dataclasses.replace(best, survived=candidates[low])


def _attempt(mutant_runner: MutantRunner, kind: str, by: float, correct: Record) -> tuple[bool, float, str]:
    """Whether it is caught, what its loss shows, and by what it is caught."""
    name = sized(correct.case.adapter, kind, by)
    if kind == "DropoutProbability":
        finding, _ = mutant_runner.judge("dropout", dataclasses.replace(_base(), adapter=name))
        return finding.result is ClauseResult.FAIL, math.nan, finding.evidence
    record = mutant_runner.suites.observe(dataclasses.replace(correct.case, adapter=name))
    verdict = record.verdict("equivalence")
    assert verdict is not None, record.outcome
    pairs = zip(record.training.losses, correct.training.losses, strict=True)
    return not verdict.passed, max(abs(a / b - 1) for a, b in pairs), verdict.summary


def _base() -> Case:
    return Case(adapter="ddp", workload=plain_workload(), layout=base_layout("ddp"))


def correct_case(adapter: str = "ddp", precision: Precision = Precision.FP32) -> Case:
    """Return the correct case that sized mutants are compared with."""
    return Case(adapter=adapter, workload=GPT, layout=LAYOUTS[adapter], precision=precision)
