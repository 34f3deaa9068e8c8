"""GPTModel's order of operations is another order of the reference's: what it computes is the same but for rounding."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from meshmark.judge.split_products import GPTModelOrder, split_loss_share
from meshmark.models.module import build_model
from meshmark.reference.data import make_batch
from meshmark.reference.objective import loss_share
from meshmark.spec.workload import workload

FLOAT32 = 2e-5
"""Relative, of gradients: sums in float32 in another order."""


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name, kv_heads", [("gpt-mini", 4), ("gpt-mini", 2), ("bert-mini", 4)])
def test_its_loss_and_gradients_are_the_reference_s(name: str, kv_heads: int, tp: int) -> None:
    problem = workload(name)
    spec, batch = dataclasses.replace(problem.transformer, num_kv_heads=kv_heads), make_batch(problem, 0)
    reference = build_model(spec)
    reference.initialize(seed=1)
    with torch.device("meta"):
        ordered = GPTModelOrder(spec, tp)
    weights = {name: p.detach().clone().requires_grad_() for name, p in reference.named_parameters()}
    expected = loss_share(reference(batch.inputs), batch, problem.loss)
    share = split_loss_share(torch.func.functional_call(ordered, weights, (batch.inputs,)), batch, tp)
    assert share.item() == pytest.approx(expected.item(), rel=1e-6)
    found, truth = _gradients(share, weights), _gradients(expected, dict(reference.named_parameters()))
    scale = max(g.abs().max().item() for g in truth.values())
    for parameter, gradient in truth.items():
        torch.testing.assert_close(found[parameter], gradient, rtol=FLOAT32, atol=FLOAT32 * scale, msg=parameter)


def _gradients(loss: Tensor, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
