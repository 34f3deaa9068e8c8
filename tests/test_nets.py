"""Nets of the suite of convergence: several models at once are each what the reference computes alone."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from meshmark.models.module import initial_value
from meshmark.models.transformer import gpt
from meshmark.reference.data import IGNORED, load_corpus, load_digits
from meshmark.reference.objective import cross_entropy
from meshmark.spec.algorithm import algorithm_named
from studies.convergence import nets, published, targets
from studies.convergence.nets import Images, Net, Text
from studies.convergence.published import HeldOut, MaskedText
from studies.convergence.targets import Race

TINY = gpt("gpt-least", 1, 8, 2, vocab_size=256, seq_len=8, init_std=0.1)


def small(rate: float = 0.2) -> Net:
    data = Text(count=2, length=8, rows=8, fixed_rows=32, seeds=4)
    return Net(name="small", model=TINY, data=data, rate=rate, aim=4.6, most_steps=60)


def vision() -> Net:
    return dataclasses.replace(nets.vision_transformer(2), data=Images(count=2, rows=4, fixed_rows=16, seeds=2))


def residual() -> Net:
    return dataclasses.replace(published.residual_network(2), data=HeldOut(count=2, rows=4, seeds=2))


def encoder() -> Net:
    data = MaskedText(count=2, length=8, fixed_rows=32, seeds=2)
    return dataclasses.replace(small(), model=dataclasses.replace(TINY, causal=False), data=data)


@pytest.mark.parametrize(
    "net", [small(), vision(), residual(), encoder()], ids=["text", "images", "batch norms", "masked"]
)
def test_a_step_is_that_of_each_model_alone(net: Net) -> None:
    """By the reference's own gradients, of one seed and replica; and by DSGD, whose pair of replicas then meets."""
    inputs, targets_ = net.data.drawn(0)
    here = net.start()
    found = net.gradients(here, inputs, targets_)
    own, name = {}, next(iter(here))
    for replica in range(2):
        model = nets.build_model(net.model)
        model.initialize(1)
        loss = cross_entropy(model(inputs[1, replica]), targets_[1, replica]) / (targets_[1, replica] != IGNORED).sum()
        own[replica] = dict(zip(here, torch.autograd.grad(loss, list(model.parameters())), strict=True))
        for key, gradient in own[replica].items():
            np.testing.assert_allclose(found[key][1, replica], gradient.numpy(), rtol=1e-4, atol=1e-6)
    algorithm = nets.plain_transition(algorithm_named("dsgd-ring"), net.rate, 2)
    after = net.stepped(algorithm, here, found)[name]
    start = initial_value(net.model, name, here[name].shape[2:], seed=1).numpy()
    met = start - net.rate * (own[0][name] + own[1][name]).numpy() / 2
    np.testing.assert_allclose(after[1, 0], met, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(after[1, 0], after[1, 1])
    assert not np.array_equal(after[0], after[1]), "seeds differ"


def test_replicas_draw_of_parts_of_their_own() -> None:
    text, whole = Text(count=2, length=8, rows=64), bytes(load_corpus(None, 9).numpy())
    inputs, following = text.drawn(1)
    assert inputs.shape == (10, 2, 64, 8) and torch.equal(inputs[..., 1:], following[..., :-1])
    halves = whole[: len(whole) // 2 + 1], whole[len(whole) // 2 :]
    assert all(bytes(window.byte().numpy()) in halves[r] for r in range(2) for window in inputs[0, r])
    images = Images(count=2, rows=64)
    share = [(images.drawn(0)[1][:, r] >= 5).float().mean() for r in range(2)]
    assert share[1] - share[0] > 0.3, "half are dealt by label"
    assert sorted(images.whose[0].ravel()) == sorted(set(images.whose[0].ravel())) and images.whose.max() < len(
        load_digits()[1]
    )


def test_a_slow_one_and_one_that_never_gets_there_are_told() -> None:
    net = small()
    synchronous = targets.steps_to_target(net, targets.SYNCHRONOUS)
    assert np.isfinite(synchronous).all() and synchronous.min() > 5

    def verdict(rate: float) -> str:
        spec = algorithm_named("dsgd-ring")
        steps = targets.steps_to_target(small(rate), spec)
        return Race(task=net.name, spec=spec, count=2, steps=steps, synchronous=synchronous).verdict

    assert [verdict(rate) for rate in (0.2, 0.1, 1e-3)] == ["as promised", "too slow", "never there"]
