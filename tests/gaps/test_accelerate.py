"""Accelerate 1.15: what its defaults do without a word. The adapters set them otherwise, or refuse."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshmark.adapters.deepspeed import operators
from tests.gaps.ranks import on_two_ranks


def defaults(rank: int) -> dict[str, float | str]:
    """Steps that a schedule makes in one optimizer step, and the dtype of a product under `mixed_precision="fp16"`."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    inner = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - 0.1 * step)
    model, optimizer, schedule = accelerator.prepare(inner, optimizer, schedule)
    dtypes = []
    inner.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    accelerator.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
    schedule.step()
    return {"steps": round((1.0 - schedule.get_last_lr()[0] / 0.1) / 0.1, 3), "dtype": str(dtypes[0])}


@pytest.fixture(scope="module")
def found() -> dict[str, float | str]:
    answer: dict[str, float | str] = on_two_ranks(defaults)
    return answer


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="each rank is thought to bring a batch of its own")
def test_a_schedule_makes_one_step_an_optimizer_step(found: dict[str, float | str]) -> None:
    """`split_batches=True` mends it. Warm-up is otherwise over in half of the steps on two ranks."""
    assert found["steps"] == 1


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="fp16 is dropped on a CPU, without a word")
def test_fp16_is_fp16_or_an_error(found: dict[str, float | str]) -> None:
    assert found["dtype"] == "torch.float16"


def loaded(rank: int) -> str:
    """What comes of an FSDP2 model whose weights one rank loads, as `accelerate launch --use_fsdp` has it."""
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    # Its one mode for several CPUs ignores plugins.
    PartialState(backend="gloo", cpu=True).distributed_type = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=True, auto_wrap_policy="no_wrap")
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        Accelerator(fsdp_plugin=plugin).prepare(model, optimizer)
    except AttributeError as error:
        return str(error)
    return "loaded"


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="huggingface/accelerate#3898: buffers are no DTensors")
def test_one_rank_loads_a_model_with_buffers() -> None:
    assert on_two_ranks(loaded) == "loaded"


@pytest.fixture
def cpu_adam() -> None:
    if reason := operators.missing("cpu_adam"):
        pytest.skip(reason)
    operators.load("cpu_adam")


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="it is another object that shares its groups until then")
def test_a_schedule_reaches_the_optimizer_that_accelerate_puts_in_its_place_after_loading(cpu_adam: None) -> None:
    """With states on the host it replaces PyTorch's AdamW by DeepSpeedCPUAdam, of the same groups. `load_state_dict`
    makes new ones, and the schedule goes on with the old optimizer's."""
    from accelerate.utils.deepspeed import map_pytorch_optim_to_deepspeed

    given = torch.optim.AdamW(nn.Linear(2, 2).parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(given, lambda step: 1.0 / (1 + step))
    put = map_pytorch_optim_to_deepspeed(given)
    given.step()  # without gradients: PyTorch warns of a schedule that goes first
    schedule.step()
    if put.param_groups[0]["lr"] != 0.5:
        raise RuntimeError("it does not follow before either")
    put.load_state_dict(put.state_dict())
    schedule.step()
    assert put.param_groups[0]["lr"] == pytest.approx(1 / 3)
