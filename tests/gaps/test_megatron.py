"""megatron-core 0.16.1: shards that are not marked as such, messages between two ranks that are mixed up, and a
distributed optimizer that loads no checkpoint."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.gaps.ranks import on_two_ranks


def is_marked(rank: int) -> dict[bool, bool]:
    """Whether a column-parallel weight says that it is a shard, by `perform_initialization`."""
    import torch
    from megatron.core import ModelParallelConfig, parallel_state
    from megatron.core.tensor_parallel import ColumnParallelLinear

    parallel_state.initialize_model_parallel(2, create_gloo_process_groups=False)
    found = {}
    for initialized in (True, False):
        config = ModelParallelConfig(
            tensor_model_parallel_size=2, perform_initialization=initialized, use_cpu_initialization=True
        )
        layer = ColumnParallelLinear(
            4,
            4,
            config=config,
            init_method=torch.nn.init.ones_,
            bias=False,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
        )
        found[initialized] = bool(getattr(layer.weight, "tensor_model_parallel", False))
    return found


def received(rank: int) -> tuple[float, float]:
    """By the first of two stages that both send a 1 forward and a 2 backward around a ring of two, as interleaving does
    in one batch: what it gets from the stage before, and from the next."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.p2p_communication import _batched_p2p_ops

    before, after = torch.zeros(()), torch.zeros(())
    waits = _batched_p2p_ops(
        tensor_send_prev=torch.tensor(2.0),
        tensor_recv_prev=before,
        tensor_send_next=torch.tensor(1.0),
        tensor_recv_next=after,
        group=parallel_state.get_tensor_model_parallel_group(),  # two ranks, whatever for
        prev_pipeline_rank=1 - rank,
        next_pipeline_rank=1 - rank,
    )
    for wait in waits:
        wait.wait()
    return before.item(), after.item()


def told(steps: int) -> str:
    """What comes of asking a distributed optimizer over PyTorch's AdamW, after so many steps, for its state."""
    import torch
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    weight = torch.ones(2, requires_grad=True)
    adam = torch.optim.AdamW([weight])
    for _ in range(steps):
        weight.sum().backward()  # type: ignore[no-untyped-call]
        adam.step()
    try:
        DistributedOptimizer.state_dict(SimpleNamespace(optimizer=adam, grad_scaler=None))
    except AssertionError:
        return "refused"
    return "told"


Found = tuple[dict[bool, bool], tuple[float, float], tuple[str, str]]


def both(rank: int) -> Found:
    return is_marked(rank), received(rank), (told(0), told(1))


@pytest.fixture(scope="module")
def found() -> Found:
    found: Found = on_two_ranks(both)
    return found


@pytest.fixture(scope="module")
def marked(found: Found) -> dict[bool, bool]:
    return found[0]


def test_a_shard_that_megatron_initializes_is_marked(marked: dict[bool, bool]) -> None:
    assert marked[True]


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="NVIDIA/Megatron-LM#4084")
def test_a_shard_is_marked_whoever_initializes_it(marked: dict[bool, bool]) -> None:
    """An unmarked one passes for a replica: the global gradient norm then counts the first rank's part alone."""
    assert marked[False]


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="NVIDIA/Megatron-LM#1450")
def test_two_stages_that_interleave_can_tell_what_goes_forward_from_what_goes_back(found: Found) -> None:
    """Interleaved over two ranks without `overlap_p2p_comm`, which nothing refuses, a stage takes gradients for
    activations: the loss is wrong, and gradients are hundreds of times too large."""
    assert found[1] == (1.0, 2.0)


def test_a_distributed_optimizer_that_has_stepped_tells_its_state(found: Found) -> None:
    assert found[2][1] == "told"


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="without Apex or Transformer Engine")
def test_a_distributed_optimizer_that_is_to_load_tells_its_state(found: Found) -> None:
    """`sharded_state_dict(is_loading=True)` begins with it, before there is any state."""
    assert found[2][0] == "told"
