"""PyTorch 2.13: batch norms in a stage of torch.distributed.pipelining that is told no shapes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pipelining = pytest.importorskip("torch.distributed.pipelining")
ROWS, WIDTH = 4, 2


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def counted(**shapes: Tensor) -> int:
    """Batches that a batch norm has put into its running statistics after a step of two micro-batches."""
    norm = nn.BatchNorm1d(WIDTH)
    stage = pipelining.PipelineStage(norm, 0, 1, torch.device("cpu"), **shapes)
    schedule = pipelining.ScheduleGPipe(stage, 2, loss_fn=lambda out, target: (out - target).square().sum())
    schedule.step(torch.randn(2 * ROWS, WIDTH), target=torch.randn(2 * ROWS, WIDTH))
    return int(norm.num_batches_tracked)


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="the stage is run once more, to find out its shapes")
def test_running_statistics_see_micro_batches_alone(alone: None) -> None:
    assert counted() == 2


def test_with_shapes_they_do(alone: None) -> None:
    x = torch.empty(ROWS, WIDTH, device="meta")
    assert counted(input_args=x, output_args=x.clone().requires_grad_()) == 2


@pytest.mark.parametrize("name", ["ScheduleZBVZeroBubble", "ScheduleDualPipeV"])
@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="between stages of one rank a gradient is handed over in evaluation too"
)
def test_a_schedule_that_is_folded_into_a_v_evaluates(alone: None, name: str) -> None:
    stages = [pipelining.PipelineStage(nn.Linear(WIDTH, WIDTH), i, 2, torch.device("cpu")) for i in range(2)]
    schedule = getattr(pipelining, name)(stages, 2, loss_fn=lambda out, target: (out - target).square().sum())
    schedule.eval(torch.randn(2 * ROWS, WIDTH), target=torch.randn(2 * ROWS, WIDTH), losses=[])
