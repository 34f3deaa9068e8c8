"""Bytes of a logit under FSDP2 with PyTorch's own cross entropy, measured, beside the planner's recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812, its usual name
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from meshmark.theory.recipe import recipe

TOKENS, HIDDEN, VOCABULARY = 256, 4, 4096


@pytest.fixture(scope="module")
def head() -> Iterator[nn.Module]:
    """In bf16 beside fp32 weights; all but its logits is next to nothing."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    layer = nn.Linear(HIDDEN, VOCABULARY, bias=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(layer, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    yield layer
    dist.destroy_process_group()


def held(head: nn.Module, x: Tensor, y: Tensor) -> None:
    """As most scripts do: a variable keeps the logits."""
    logits = head(x)
    F.cross_entropy(logits.float(), y).backward()


def freed(head: nn.Module, x: Tensor, y: Tensor) -> None:
    """As torchtitan's trainer does."""
    logits = head(x)
    loss = F.cross_entropy(logits.float(), y)
    del logits
    loss.backward()


def upcast(head: nn.Module, x: Tensor, y: Tensor) -> None:
    logits = head(x).float()
    F.cross_entropy(logits, y).backward()


@pytest.mark.parametrize(("step", "expected"), [(held, 14), (freed, 12), (upcast, 16)])
def test_the_recipe_s_logit_is_that_of_a_script_that_holds_its_logits(
    step: Callable[[nn.Module, Tensor, Tensor], None], expected: int, head: nn.Module
) -> None:
    """At the gradient of the log-softmax: it, the log-softmax and its own gradient in fp32, and what is held."""
    x, y = torch.randn(TOKENS, HIDDEN), torch.randint(VOCABULARY, (TOKENS,))
    step(head, x, y)
    head.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        step(head, x, y)
    head.zero_grad()
    changes = [event for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"]
    peak = now = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    assert peak / (TOKENS * VOCABULARY) == pytest.approx(expected, rel=0.03)
    if step is held:
        assert recipe("fsdp2").activations.logit_bytes == expected
