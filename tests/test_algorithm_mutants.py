"""Engines of algorithms that are not synchronous SGD, in float64: right ones follow the truth, wrong ones are named."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from meshmark.judge.truth import assess_replicas
from meshmark.spec.algorithm import algorithm_classes
from meshmark.spec.case import Case
from meshmark.spec.precision import Precision
from tests.broken.algorithms import ALGORITHM_MUTANTS
from tests.broken.engine import Broken
from tests.broken.mutant import Mutant
from tests.broken.mutants import MUTANTS
from tests.factories import make_workload
from tests.trained import Trial, diagnosed, furthest, train_all

NAMED = [mutant for mutant in ALGORITHM_MUTANTS if mutant.diagnosis]
EXACT = 1e-13
"""Furthest that a right engine is from the truth, relative to its values."""
IN_BF16 = 1e-3
"""The same where an algorithm rounds what it sums."""


def test_every_algorithm_has_at_least_four_mutants() -> None:
    counts = Counter(mutant.workload.algorithm.kind for mutant in MUTANTS)
    assert {str(kind): counts[kind] for kind in algorithm_classes() if counts[kind] < 4} == {}


def small(mutant: Mutant) -> Case:
    """Return the mutant's case with a model of a few hundred parameters, in float64, by the real adapter."""
    trained = mutant.workload
    problem = make_workload(optimizer=trained.optimizer, algorithm=trained.algorithm, global_batch=8)
    return dataclasses.replace(mutant.case, adapter=mutant.adapter, workload=problem, precision=Precision.FP64)


@pytest.mark.slow
@pytest.mark.parametrize("adapter, world_size", sorted({(m.adapter, m.layout.world_size) for m in NAMED}))
@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated")
@pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated")  # PyTorch's averager imports scripted optimizers
def test_engines_follow_the_truth_and_defects_are_named(
    adapter: str, world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    mutants = defaultdict[Case, list[Mutant]](list)
    for mutant in NAMED:
        if (mutant.adapter, mutant.layout.world_size) == (adapter, world_size):
            mutants[small(mutant)].append(mutant)
    trials = []
    for case, broken in mutants.items():
        trials.append(Trial(case=case, steps=6))
        for mutant in broken:
            assert issubclass(mutant.defect, Broken)
            trials.append(Trial(case=case, steps=6, defect=mutant.defect))
    runs = iter(zip(trials, train_all(trials, tmp_path), strict=True))
    wrong = {}
    for case, broken in mutants.items():
        _, honest = next(runs)
        rounds = case.workload.algorithm.compressor_kind in ("fp16", "bf16")
        assert furthest(assess_replicas(honest, case.workload, layout=case.layout)) < (IN_BF16 if rounds else EXACT)
        for mutant in broken:
            diagnosis = diagnosed(*next(runs), honest)
            expected = diagnosis and diagnosis.fault in mutant.faults and re.search(mutant.diagnosis, diagnosis.detail)
            if not expected:
                wrong[mutant.name] = diagnosis and (diagnosis.fault, diagnosis.detail)
    assert wrong == {}
