"""Horovod 0.28.1 (`make horovod`): an optimizer's state that is broadcast before it is there, parameters that no rank
uses, and PyTorch's argument of `zero_grad`."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshmark.adapter.registry import builtin_adapters, load_adapter
from tests.gaps.ranks import on_two_ranks

MISSING = next((r.missing for r in load_adapter(builtin_adapters()["horovod"]).requires), None)
pytestmark = pytest.mark.skipif(MISSING is not None, reason=MISSING or "")


def start(rank: int) -> Any:  # noqa: ANN401
    """Horovod among two ranks of one machine, as its own launcher starts it."""
    import os

    import horovod.torch as hvd
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousServer

    plan, port = get_host_assignments(parse_hosts("localhost:2"), 2), [0]
    if rank == 0:
        server = RendezvousServer()
        port = [server.start()]
        server.init(plan)
    dist.broadcast_object_list(port)
    variables = create_slot_env_vars(plan[rank]) | create_run_env_vars("127.0.0.1", ["lo"], port[0])
    os.environ.update({name: str(value) for name, value in variables.items()})
    hvd.init()
    return hvd


def state_of_a_first_step(broadcast: bool, rank: int) -> tuple[float, float]:
    """The weight after one step of AdamW, and the number of steps in its state."""
    hvd = start(rank)
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    if broadcast:
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    optimizer.zero_grad()
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    return float(model.weight), float(optimizer.state[model.weight]["step"])


def test_a_first_step_is_the_first() -> None:
    weight, steps = on_two_ranks(functools.partial(state_of_a_first_step, False))
    assert weight == pytest.approx(1 - 0.1 * 0.5 - 0.1) and steps == 1


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="state is made by a step with gradients of zero")
def test_a_first_step_is_the_first_when_the_state_was_broadcast() -> None:
    weight, steps = on_two_ranks(functools.partial(state_of_a_first_step, True))
    assert weight == pytest.approx(1 - 0.1 * 0.5 - 0.1) and steps == 1


def gradient_of_what_no_rank_uses(rank: int) -> bool:
    """Whether it has none, as it has without Horovod."""
    hvd = start(rank)
    used, unused = nn.Linear(1, 1), nn.Linear(1, 1)
    both = nn.ModuleDict({"used": used, "unused": unused})
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(both.parameters(), lr=0.1), named_parameters=both.named_parameters()
    )
    used(torch.ones(1, 1)).sum().backward()
    optimizer.synchronize()
    return unused.weight.grad is None


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="Horovod makes one of zeros: moments decay, weights too")
def test_what_no_rank_uses_has_no_gradient() -> None:
    assert on_two_ranks(gradient_of_what_no_rank_uses)


def takes_pytorch_s_argument(rank: int) -> bool:
    hvd = start(rank)
    model = nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    try:
        optimizer.zero_grad(set_to_none=True)
    except TypeError:
        return False
    return True


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="DistributedOptimizer.zero_grad takes no arguments")
def test_zero_grad_takes_what_pytorch_s_takes() -> None:
    assert on_two_ranks(takes_pytorch_s_argument)
