"""Variants of modules and of losses, by which a wrong gradient is named: each is computed here by hand, in float64."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshmark.adapter.contract import Arithmetic, Casting
from meshmark.judge.diagnosis import diagnose
from meshmark.judge.failed_step import FailedStep
from meshmark.judge.faults import Diagnosis, Fault
from meshmark.judge.function_faults import _left
from meshmark.judge.trace import Trace
from meshmark.judge.truth import ExactOptimizer, assess, exact_gradients
from meshmark.judge.twin import Twin
from meshmark.models.module import build_model
from meshmark.reference.data import IGNORED, Batch, make_batch
from meshmark.reference.objective import loss_share
from meshmark.spec.precision import Precision
from tests.test_diagnosis import CASE, STEPS, WEIGHT, examine, gradients, honest, without_hurry

__all__ = ["without_hurry"]
STEP = 1
Patch = Callable[[nn.Module], None]
LossOf = Callable[[Tensor, Batch], Tensor]


def right_loss(outputs: Tensor, batch: Batch) -> Tensor:
    return loss_share(outputs, batch, CASE.workload.loss)


def nothing(_model: nn.Module) -> None:
    pass


def part_of(trace: Trace, rows: slice, patch: Patch, loss: LossOf) -> tuple[float, dict[str, np.ndarray]]:
    """Return loss and gradients of some rows, by a model that `patch` has changed."""
    model = build_model(CASE.workload.model).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(trace.parameters[STEP][name]))
    patch(model)
    batch = make_batch(CASE.workload, STEP).rows(rows.start, rows.stop)
    share = loss(model(batch.inputs), batch)
    share.backward()  # type: ignore[no-untyped-call]
    return float(share.detach()), {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}


def told(patch: Patch = nothing, loss: LossOf = right_loss, rows: slice = slice(0, 8), reported: float = 1.0) -> str:
    """Return the diagnosis of a run whose rows `rows` are computed so; `reported` is the share that the loss has of
    the error."""

    def doctor(trace: Trace) -> None:
        value, right = part_of(trace, slice(0, 8), nothing, right_loss)
        there, theirs = part_of(trace, rows, patch, loss)
        here, ours = part_of(trace, rows, nothing, right_loss)
        gradients(trace, STEP, lambda n, g: right[n] - ours[n] + theirs[n])
        trace.losses[STEP] = value + reported * (there - here)

    diagnosis = examine(doctor)
    assert diagnosis and diagnosis.step == STEP, diagnosis
    return diagnosis.text


def patched(name: str, forward: Callable[[Any, Tensor], Tensor]) -> Patch:
    """Return a patch of the modules of which this is the last name, or the whole."""

    def patch(model: nn.Module) -> None:
        for where, module in model.named_modules():
            if name in (where, where.rpartition(".")[2]):
                module.forward = lambda x, module=module: forward(module, x)  # type: ignore[method-assign]

    return patch


def normed(module: Any, x: Tensor) -> Tensor:  # noqa: ANN401
    return F.layer_norm(x, x.shape[-1:], module.weight, module.bias, 1e-6)


def sees(shift: int) -> Patch:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(shift)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def patch(model: Any) -> None:  # noqa: ANN401
        model.blocks["0"].attention.attend = attend

    return patch


@pytest.mark.slow
@pytest.mark.parametrize(
    "patch, rows, name",
    [
        (
            patched("blocks.1.feed_forward", lambda m, x: m.down(F.gelu(m.up(x)))),
            slice(0, 8),
            "blocks.1.feed_forward with exact GELU (erf) in place of GELU approximated by tanh",
        ),
        (
            patched("feed_forward", lambda m, x: m.down(F.relu(m.up(x)))),
            slice(4, 8),
            "all of feed_forward with ReLU in place of GELU approximated by tanh on data-parallel rank 1",
        ),
        (patched("head.norm", normed), slice(0, 8), "head.norm with eps 1e-06 in place of 1e-05"),
        (
            patched("embedding.positions", lambda m, x: F.embedding(x % (len(x) // 2), m.weight)),
            slice(0, 8),
            "embedding.positions with positions that start again at zero in the middle",
        ),
        (
            sees(1),
            slice(2, 4),
            "blocks.0.attention with a causal mask that shows one token too many"
            " on data-parallel rank 0 in micro-batch 1",
        ),
    ],
)
def test_a_variant_of_a_module_is_named(patch: Patch, rows: slice, name: str) -> None:
    text = told(patch, rows=rows)
    assert text.startswith(str(Fault.VARIANT)) and text.endswith(f": {name}"), text


@pytest.mark.slow
def test_a_function_that_is_no_variant_is_not_named_as_one() -> None:
    """An activation half way between two that are known."""
    text = told(
        patched("feed_forward", lambda m, x: m.down((F.gelu(m.up(x)) + F.gelu(m.up(x), approximate="tanh")) * 0.5))
    )
    assert text.startswith((str(Fault.FORWARD), str(Fault.BACKWARD))) and "GELU" not in text, text


def test_masked_targets_of_one_sequence_that_count_are_named() -> None:
    """The last target of a sequence is its next token, which the sequence does not hold."""
    whole = make_batch(dataclasses.replace(CASE.workload, masked=False), STEP).rows(7, 8)

    def loss(outputs: Tensor, batch: Batch) -> Tensor:
        targets = torch.cat((whole.targets[:, :-1], batch.targets[:, -1:]), 1)
        lost = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return lost / batch.total_weight

    text = told(loss=loss, rows=slice(7, 8))
    assert text.startswith(str(Fault.MASK)) and "sequences 7 of 8" in text, text


def z_loss(outputs: Tensor, batch: Batch) -> Tensor:
    each = outputs.logsumexp(-1).square() * (batch.targets != IGNORED)
    return right_loss(outputs, batch) + 2e-4 * each.sum() / batch.total_weight


@pytest.mark.parametrize("reported", [0.0, 1.0])
def test_a_term_that_is_added_to_the_loss_is_named(reported: float) -> None:
    text = told(loss=z_loss, reported=reported)
    assert text.startswith(str(Fault.OBJECTIVE)), text
    assert "the truth plus 0.0002 times the gradient of the squared log-sum-exp of the logits (a z-loss)" in text
    assert text.endswith("the reported loss has it too" if reported else "the reported loss is without it"), text


@pytest.mark.slow
def test_a_term_of_which_the_loss_has_a_part_is_not_named() -> None:
    text = told(loss=z_loss, reported=0.5)
    assert str(Fault.OBJECTIVE) not in text and "z-loss" not in text, text


def test_a_penalty_on_weights_is_named() -> None:
    def doctor(trace: Trace) -> None:
        gradients(trace, STEP, lambda n, g: g + 0.02 * trace.parameters[STEP][n])

    diagnosis = examine(doctor)
    assert diagnosis and diagnosis.fault is Fault.OBJECTIVE, diagnosis
    assert "0.02 times the gradient of half the squares of the parameters (an L2 penalty)" in diagnosis.detail


def test_a_loss_in_bf16_is_named() -> None:
    text = told(loss=lambda x, batch: right_loss(x.bfloat16().double(), batch))
    assert text.startswith(str(Fault.PRECISION)) and text.endswith("the loss is computed in bf16: of rounded logits")


def test_targets_that_are_left_out_are_named() -> None:
    def loss(outputs: Tensor, batch: Batch) -> Tensor:
        targets, weights = batch.targets.clone(), batch.weights.clone()
        last = (targets != IGNORED).sum(1) - 1
        rows = torch.arange(len(targets))
        targets[rows, last], weights[rows, last] = IGNORED, 0.0
        return right_loss(outputs, dataclasses.replace(batch, targets=targets, weights=weights))

    text = told(loss=loss)
    assert text.startswith(str(Fault.DROPPED)) and text.endswith("the last target of every sequence is left out"), text


def test_a_shard_that_has_one_micro_batch_alone_is_named() -> None:
    def doctor(trace: Trace) -> None:
        kept = [part_of(trace, slice(row, row + 2), nothing, right_loss)[1] for row in (2, 6)]

        def change(name: str, gradient: np.ndarray) -> np.ndarray:
            if name == WEIGHT:
                half = len(gradient) // 2
                gradient = gradient.copy()
                gradient[half:] = sum(part[name][half:] for part in kept)
            return gradient

        gradients(trace, STEP, change)

    diagnosis = examine(doctor)
    assert diagnosis and diagnosis.names == [WEIGHT], diagnosis
    assert diagnosis.fault is Fault.MISSING and "alone: 4 of 8 sequences" in diagnosis.detail, diagnosis.text


def test_a_factor_that_varies_is_not_told_as_a_constant() -> None:
    def doctor(trace: Trace, factors: tuple[float, ...]) -> None:
        for step, factor in enumerate(factors):
            gradients(trace, step, lambda n, g, factor=factor: g * factor)  # type: ignore[misc]

    varied = examine(lambda trace: doctor(trace, (1.5, 1.2, 0.9)))
    assert varied and varied.fault is Fault.SCALED
    assert varied.detail.endswith("and 1.2, 0.9 times in the next steps: no constant"), varied.detail
    same = examine(lambda trace: doctor(trace, (1.5, 1.5, 1.5)))
    assert same and "constant" not in same.detail


def updated(rule: ExactOptimizer) -> Diagnosis:
    """Return the diagnosis of a run whose updates are `rule`'s."""
    trace, tolerance_model = honest()
    trace = copy.deepcopy(trace)
    for step in range(STEPS):
        after = rule.step(trace.parameters[step], trace.gradients[step])
        trace.parameters[step + 1] = {n: x.astype(np.float32) for n, x in after.items()}
        if step + 1 < STEPS:
            right = exact_gradients(CASE.workload, trace.parameters[step + 1], make_batch(CASE.workload, step + 1))
            trace.losses[step + 1] = right.loss
            trace.gradients[step + 1] = {n: g.astype(np.float32) for n, g in right.gradients.items()}
    trace.norms = [None] * STEPS
    found = diagnose(CASE, trace, assess(trace, CASE.workload), (), tolerance_model)
    assert found
    return found


class ClipsModules(ExactOptimizer):
    def clip(self, max_norm: float) -> None:
        modules: dict[str, list[nn.Parameter]] = {}
        for name, parameter in self.parameters.items():
            modules.setdefault(name.rpartition(".")[0], []).append(parameter)
        for parameters in modules.values():
            nn.utils.clip_grad_norm_(parameters, max_norm)


class CountsFrom(ExactOptimizer):
    """Counts other steps, for the bias correction of each parameter."""

    def __init__(self, count: Callable[[int, int, int], int]) -> None:
        super().__init__(CASE.workload.optimizer)
        self.count = count

    def step(self, parameters: dict[str, np.ndarray], gradients: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if self.optimizer is None:
            self.parameters = {n: nn.Parameter(torch.tensor(p, dtype=torch.float64)) for n, p in parameters.items()}
            self.optimizer = self.build()
        assert self.optimizer
        for index, parameter in enumerate(self.parameters.values()):
            zero = torch.zeros_like(parameter)
            state = self.optimizer.state[parameter] or {"exp_avg": zero, "exp_avg_sq": zero.clone()}
            count = self.count(self.steps, index, len(self.parameters))
            self.optimizer.state[parameter] = {**state, "step": torch.tensor(count - 1.0)}
        return super().step(parameters, gradients)


@pytest.mark.parametrize(
    "rule, fault, name",
    [
        (ClipsModules(CASE.workload.optimizer), Fault.CLIPPING, "each module clipped on its own"),
        (CountsFrom(lambda step, index, count: step * count + index + 1), Fault.UPDATE, "which each of them increases"),
        (CountsFrom(lambda step, index, count: step + 4), Fault.UPDATE, "bias correction of step 4 in place of 1"),
        (CountsFrom(lambda step, index, count: step + 1 + index % 3), Fault.UPDATE, "by tensor of steps 2 to 3"),
    ],
)
def test_an_update_of_other_units_or_counts_is_named(rule: ExactOptimizer, fault: Fault, name: str) -> None:
    found = updated(rule)
    assert found.fault is fault and name in found.detail, found.text


@pytest.mark.parametrize("casting", [Casting.AUTOCAST, Casting.WEIGHTS])
def test_a_twin_whose_weights_change_between_passes(casting: Casting) -> None:
    """It is as near to float64 with the same change as a twin without is to float64 without."""
    trace = honest()[0]
    batch, case = make_batch(CASE.workload, STEP), dataclasses.replace(CASE, precision=Precision.BF16)
    twin = Twin(case=case, arithmetic=Arithmetic(casting=casting, averages=False), device=torch.device("cpu"))
    now = trace.parameters[STEP]
    then = {name: now[name] * 1.5 for name in now if name.startswith("blocks.1.") and now[name].ndim > 1}
    plain, changed = twin.step(now, batch), twin.step(now, batch, changed=then)
    right = exact_gradients(CASE.workload, now, batch).gradients
    other = exact_gradients(CASE.workload, now, batch, changed=now | then).gradients
    assert changed.loss == plain.loss

    def apart(own: np.ndarray, exact: np.ndarray) -> float:
        return float(np.linalg.norm(own - exact) / np.linalg.norm(exact))

    for name in right:
        if np.linalg.norm(right[name]) < 1e-6:  # all rounding
            continue
        rounding = apart(plain.gradients[name], right[name])
        assert apart(changed.gradients[name], other[name]) <= 3 * rounding, name
        if name.startswith("embedding."):
            assert apart(other[name], right[name]) > 10 * rounding, name
    again = twin.step(now, batch)
    assert all(np.array_equal(again.gradients[n], plain.gradients[n]) for n in right), "the weights are put back"


def test_a_candidate_that_overflows_explains_nothing() -> None:
    """A gradient in bf16 may overflow where that of fp16 is scaled: NaN is no small distance."""
    failed = FailedStep(case=CASE, trace=copy.deepcopy(honest()[0]), step=STEP, tolerances={WEIGHT: 1e-9})
    exact = failed.exact
    assert _left(failed, exact, exact, 0.0) > 1.0  # what is single precision's rounding is more than 1e-9
    overflows = {**exact, WEIGHT: np.full_like(exact[WEIGHT], np.nan)}
    assert _left(failed, overflows, exact, 0.0) == math.inf
