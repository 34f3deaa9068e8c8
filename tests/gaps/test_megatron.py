"""megatron-core 0.16.1: shards that are not marked as such."""

from __future__ import annotations

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


@pytest.fixture(scope="module")
def marked() -> dict[bool, bool]:
    found: dict[bool, bool] = on_two_ranks(is_marked)
    return found


def test_a_shard_that_megatron_initializes_is_marked(marked: dict[bool, bool]) -> None:
    assert marked[True]


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="NVIDIA/Megatron-LM#4084")
def test_a_shard_is_marked_whoever_initializes_it(marked: dict[bool, bool]) -> None:
    """An unmarked one passes for a replica: the global gradient norm then counts the first rank's part alone."""
    assert marked[False]
