"""PyTorch 2.13: batch norms in what `torch.utils.checkpoint` computes again."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def counted(use_reentrant: bool) -> int:
    """Batches that a batch norm has put into its running statistics after one was trained on."""
    norm = nn.BatchNorm1d(2)
    x = torch.randn(4, 2, requires_grad=True)
    checkpoint(norm, x, use_reentrant=use_reentrant).square().sum().backward()
    return int(norm.num_batches_tracked)


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="the forward pass that is run again updates them again")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_running_statistics_see_a_batch_once(use_reentrant: bool) -> None:
    assert counted(use_reentrant) == 1


def test_fairscale_s_own_checkpoints_see_it_once() -> None:
    checkpoints = pytest.importorskip("fairscale.nn.checkpoint")
    norm = nn.BatchNorm1d(2)
    wrapped = checkpoints.checkpoint_wrapper(nn.Sequential(norm))
    wrapped(torch.randn(4, 2, requires_grad=True)).square().sum().backward()
    assert int(norm.num_batches_tracked) == 1
