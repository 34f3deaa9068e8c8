"""FedAvg with unequal shares: its transition by hand, the engine for real in float64, and what breaks it."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from meshmark.adapter.registry import load_adapter
from meshmark.adapters import ROSTER
from meshmark.algorithms.contract import Tensors
from meshmark.algorithms.local_sgd import FedAvg
from meshmark.algorithms.local_sgd.client_shares import client_shares
from meshmark.algorithms.local_sgd.transition import client_rows
from meshmark.judge.truth import ExactOptimizer
from meshmark.reference.data import Batch, make_batch
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.optimizer import OptimizerKind, OptimizerSpec
from meshmark.spec.workload import workload
from tests.factories import make_workload

PLAIN = OptimizerSpec(kind=OptimizerKind.SGD, learning_rate=0.1, weight_decay=0.0, clip_norm=None)
SPEC = FedAvg(period=2)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_shares_are_unequal_and_all_rows(count: int) -> None:
    assert sum(client_shares(count)) == 1 and len(client_shares(count)) == count
    batch = make_batch(workload("gpt-mini"), 0)
    if count in (2, 4):
        parts = [client_rows(batch, replica, count) for replica in range(count)]
        assert [len(part) for part in parts] == ([2, 6] if count == 2 else [1, 3, 1, 3])
        assert torch.equal(torch.cat([part.inputs for part in parts]), batch.inputs)


def test_averages_and_losses_weigh_by_rows() -> None:
    """By hand; and the mean of replicas' gradients, by rows, is the global one (arXiv:1602.05629, algorithm 1)."""
    problem = make_workload(algorithm=SPEC, optimizer=PLAIN)
    exact = SPEC.transition(problem, [ExactOptimizer(PLAIN) for _ in range(2)])
    assert [x["a"].tolist() for x in exact.reported([{"a": np.ones(1)}] * 2)] == [[4.0], [4 / 3]]
    here: list[Tensors] = [{"a": np.array([x])} for x in (1.0, 5.0)]
    gradients: list[Tensors] = [{"a": np.array([g])} for g in (4.0, -10.0)]
    met = [x["a"] for x in exact.transition(here, gradients)]
    np.testing.assert_allclose(met, [[0.25 * 0.6 + 0.75 * 6.0]] * 2, rtol=1e-15)
    np.testing.assert_allclose([x["a"] for x in exact.transition(here, gradients)], [[0.6], [6.0]], rtol=1e-15)


def test_rows_that_make_no_micro_batches_are_refused() -> None:
    def reason(dp: int, micro_batches: int) -> str | None:
        layout = Layout(dp=dp, num_micro_batches=micro_batches)
        case = Case(adapter="fed-avg", workload=workload("gpt-mini-fed-avg2"), layout=layout)
        return load_adapter(ROSTER["fed-avg"]).supports(case, "cpu", "gloo")

    assert reason(2, 2) is None and reason(4, 1) is None
    assert "replica 0 has 1/8 of 8 rows, which makes no 2 equal micro-batches of whole rows; take" in str(reason(4, 2))
    with pytest.raises(AssertionError, match="refuses parts of rows"):
        none = torch.zeros(3, 1)
        client_rows(Batch(inputs=none, targets=none.long(), weights=none, total_weight=3.0), 0, 2)
    assert client_shares(2) == [Fraction(1, 4), Fraction(3, 4)]
