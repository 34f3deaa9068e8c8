"""PyTorch 2.13: DistributedDataParallel with `static_graph=True` and gradients that are accumulated under `no_sync`."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.gaps.ranks import on_two_ranks


def accumulate(rank: int) -> float:
    """The gradient of one weight after two micro-batches, of which the first is not reduced."""
    inner = nn.Linear(1, 1, bias=False)
    model: DistributedDataParallel = DistributedDataParallel(inner, static_graph=True)
    with model.no_sync():
        model(torch.ones(1, 1)).sum().backward()
    model(torch.ones(1, 1)).sum().backward()
    assert inner.weight.grad is not None
    return float(inner.weight.grad)


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="the reducer's first iteration must reduce")
def test_a_static_graph_s_first_micro_batch_need_not_be_reduced() -> None:
    try:
        found = on_two_ranks(accumulate)
    except RuntimeError as error:
        assert "expect_autograd_hooks_ INTERNAL ASSERT FAILED" not in str(error)
        raise
    assert found == 2.0
