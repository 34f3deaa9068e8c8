"""Further options of workloads: schedules, decay groups, frozen and unused parameters, recomputation.

Each against a loop written out by hand.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from meshmark.errors import InputError
from meshmark.judge.truth import ExactOptimizer, exact_gradients, initial_values
from meshmark.models.module import parameter_shapes
from meshmark.models.transformer.module import Transformer
from meshmark.reference.data import make_batch
from meshmark.reference.objective import build_optimizer, build_schedule, loss_share, parameter_groups
from meshmark.spec.optimizer import OptimizerSpec
from meshmark.spec.workload import Loss, Workload
from tests.factories import make_model, make_workload

FROZEN = ("embedding.", "blocks.0.attention.")


def built(workload: Workload) -> Transformer:
    model = Transformer(workload.model)
    model.initialize(workload.seed)
    return model


def test_the_learning_rate_grows_from_the_first_step_on_and_then_stays() -> None:
    spec = OptimizerSpec(warmup_steps=4)
    assert [spec.rate_factor(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert OptimizerSpec().rate_factor(0) == 1.0


def test_pytorchs_schedule_is_the_specs() -> None:
    spec = OptimizerSpec(warmup_steps=3, learning_rate=0.6)
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = build_optimizer(spec, [("weight", parameter)])
    schedule = build_schedule(spec, optimizer)
    rates = []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.6])
    assert build_schedule(OptimizerSpec(), optimizer) is None


def test_the_exact_optimizer_follows_the_schedule() -> None:
    """SGD without decay: the way it goes is the rate."""
    from meshmark.spec.optimizer import OptimizerKind

    spec = OptimizerSpec(kind=OptimizerKind.SGD, learning_rate=0.5, weight_decay=0.0, clip_norm=None, warmup_steps=2)
    exact, here, ways = ExactOptimizer(spec), {"w": np.zeros(3)}, []
    for _ in range(3):
        there = exact.step(here, {"w": np.ones(3)})
        ways.append(float(here["w"][0] - there["w"][0]))
        here = there
    assert ways == [0.25, 0.5, 0.5]


def test_norms_and_biases_do_not_decay_in_a_group_of_their_own() -> None:
    spec = OptimizerSpec(decay_matrices_only=True, weight_decay=0.3)
    model = built(make_workload())
    decaying, others = parameter_groups(spec, model.named_parameters())
    assert len(decaying["params"]) + len(others["params"]) == len(parameter_shapes(model.spec))
    assert all(p.dim() == 2 for p in decaying["params"]) and all(p.dim() == 1 for p in others["params"])
    assert others["weight_decay"] == 0.0
    (one,) = parameter_groups(OptimizerSpec(), model.named_parameters())
    assert len(one["params"]) == len(parameter_shapes(model.spec))


def test_frozen_parameters_have_no_gradient_and_are_not_given_to_the_optimizer() -> None:
    workload = make_workload(frozen=FROZEN)
    exact = exact_gradients(workload, initial_values(workload), make_batch(workload, 0))
    assert not any(name.startswith(FROZEN) for name in exact.gradients)
    assert exact.gradients.keys() == {n for n in parameter_shapes(workload.model) if not n.startswith(FROZEN)}
    model = built(workload)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(workload.trains(name))
    (group,) = parameter_groups(workload.optimizer, model.named_parameters())
    assert len(group["params"]) == len(exact.gradients)
    everything = exact_gradients(make_workload(), initial_values(workload), make_batch(workload, 0))
    for name, gradient in exact.gradients.items():
        np.testing.assert_allclose(gradient, everything.gradients[name], rtol=1e-12)


def test_every_second_step_leaves_a_block_out() -> None:
    workload = make_workload(skipped_block=1)
    assert [make_batch(workload, step).skipped_block for step in range(4)] == [None, 1, None, 1]
    assert make_batch(workload, 1).shard(1, 2).skipped_block == 1
    unused = {name for name in parameter_shapes(workload.model) if name.startswith("blocks.1.")}
    for step in range(2):
        exact = exact_gradients(workload, initial_values(workload), make_batch(workload, step))
        assert exact.unused == (unused if step else set())
        assert exact.unused == {name for name in exact.gradients if not workload.uses(name, step)}
        assert all(not exact.gradients[name].any() for name in exact.unused)


def test_a_model_without_a_block_is_the_model_less_that_block() -> None:
    spec = make_model(num_layers=3)
    workload = make_workload(model=spec)
    model, tokens = built(workload), make_batch(workload, 0).inputs
    model.skipped_block = 1
    x = model.embedding(tokens)
    for index in ("0", "2"):
        x = model.blocks[index](x)
    assert torch.equal(model(tokens), model.head(x))


def test_what_has_no_gradient_stays_with_its_moments_as_in_pytorch() -> None:
    spec = OptimizerSpec(clip_norm=None)
    draw = np.random.default_rng(0)
    gradients = [
        {"a": draw.normal(size=3), "b": draw.normal(size=3)},
        {"a": draw.normal(size=3)},
        {"a": draw.normal(size=3), "b": draw.normal(size=3)},
    ]
    exact, here = ExactOptimizer(spec), {"a": np.ones(3), "b": np.ones(3)}
    plain = {name: torch.nn.Parameter(torch.ones(3, dtype=torch.float64)) for name in here}
    optimizer = torch.optim.AdamW(
        plain.values(), lr=spec.learning_rate, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay
    )
    for own in gradients:
        before, here = here, exact.step(here, own)
        for name, parameter in plain.items():
            parameter.grad = torch.tensor(own[name]) if name in own else None
        optimizer.step()
        assert ("b" in own) == bool(np.any(before["b"] != here["b"]))
        for name, parameter in plain.items():
            np.testing.assert_allclose(here[name], parameter.detach().numpy(), rtol=1e-14)


def test_recomputation_runs_every_block_again_and_changes_nothing() -> None:
    workload = make_workload()
    batch, gradients, runs = make_batch(workload, 0), [], []
    for recompute in (None, functools.partial(checkpoint, use_reentrant=False)):
        model = built(workload)
        model.recompute = recompute
        count = []
        model.blocks["0"].register_forward_pre_hook(lambda module, args, count=count: count.append(1))
        loss_share(model(batch.inputs), batch, Loss.CROSS_ENTROPY).backward()
        gradients.append([p.grad for p in model.parameters()])
        runs.append(len(count))
    assert runs == [1, 2]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    model.eval()
    model(batch.inputs)
    assert len(count) == 3, "evaluation has no backward pass to compute again for"


@pytest.mark.parametrize(
    "changes, message", [({"skipped_block": 2}, "skipped_block is 2"), ({"skipped_block": -1}, "skipped_block is -1")]
)
def test_a_block_that_is_not_there_cannot_be_left_out(changes: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_workload(**changes)


def test_a_negative_warmup_is_refused() -> None:
    with pytest.raises(InputError, match="warmup_steps is -1"):
        OptimizerSpec(warmup_steps=-1)


def test_what_is_unfrozen_is_trained_from_its_step_on() -> None:
    plain = make_workload(frozen=("embedding.",), unfreeze_step=2, optimizer=OptimizerSpec())
    name = "embedding.tokens.weight"
    assert [plain.uses(name, step) for step in range(4)] == [False, False, True, True]
    assert [make_batch(plain, step).trains(name) for step in range(4)] == [False, False, True, True]
    assert plain.trains(name) and not plain.trains_at_first(name) and plain.uses("head.norm.weight", 0)
    exact = [exact_gradients(plain, initial_values(plain), make_batch(plain, step)) for step in (1, 2)]
    assert name in exact[0].unused and name in exact[1].used
    for changes in (
        {"frozen": ()},
        {"unfreeze_step": 0},
        {"optimizer": dataclasses.replace(plain.optimizer, warmup_steps=2)},
    ):
        with pytest.raises(InputError, match="unfreeze_step"):
            dataclasses.replace(plain, **changes)
