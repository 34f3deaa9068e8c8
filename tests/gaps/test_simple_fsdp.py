"""SimpleFSDP of torchtitan 0.3.0 (`pip install torchtitan`): frozen parameters, shared ones, and a second model of the
same classes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from meshmark.adapter.registry import builtin_adapters, load_adapter
from tests.gaps.ranks import on_two_ranks

MISSING = next((r.missing for r in load_adapter(builtin_adapters()["simple-fsdp"]).requires if r.missing), None)
pytestmark = pytest.mark.skipif(MISSING is not None, reason=MISSING or "")


def sharded(model: nn.Module, **choices: Any) -> nn.Module:  # noqa: ANN401
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.experiments.graph_trainer.simple_fsdp import data_parallel

    result: nn.Module = data_parallel(model, init_device_mesh("cpu", (2,)), mode="fully_shard", **choices)
    return result


def trained(frozen: bool, rank: int) -> bool:
    """Whether the weight would be trained."""
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(not frozen)
    return dict(sharded(model).named_parameters())["weight"].requires_grad


def tied(shares: bool, rank: int) -> int:
    """Parameters of two layers."""
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    if shares:
        second.weight = first.weight
    return len([*sharded(nn.Sequential(first, second)).parameters()])


def dtypes(policies: tuple[torch.dtype | None, ...], rank: int) -> list[torch.dtype]:
    """That each of several models computes in."""
    from torchtitan.experiments.graph_trainer.simple_fsdp import MixedPrecisionPolicy

    models = [sharded(nn.Linear(2, 2), mp_policy=MixedPrecisionPolicy(param_dtype=dtype)) for dtype in policies]
    return [model.weight.dtype for model in models]


def test_what_trains_is_trained() -> None:
    assert on_two_ranks(functools.partial(trained, False))


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="every shard is a new parameter, which trains")
def test_what_is_frozen_stays_frozen() -> None:
    assert not on_two_ranks(functools.partial(trained, True))


def test_two_weights_are_two() -> None:
    assert on_two_ranks(functools.partial(tied, False)) == 2


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="what two modules share is sharded for each, and is two")
def test_a_shared_weight_is_one() -> None:
    assert on_two_ranks(functools.partial(tied, True)) == 1


def test_a_model_computes_as_asked() -> None:
    assert on_two_ranks(functools.partial(dtypes, (torch.bfloat16,))) == [torch.bfloat16]


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="classes are kept with the first model's choices")
def test_a_second_model_computes_as_asked() -> None:
    assert on_two_ranks(functools.partial(dtypes, (torch.bfloat16, torch.float16))) == [torch.bfloat16, torch.float16]
