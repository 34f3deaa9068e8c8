"""Published results beside the same at our scale: data that nobody trains on, and verdicts on orders and ratios."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from meshmark.reference.data import HIDDEN, IGNORED, load_digits
from studies.convergence import published
from studies.convergence.published import COMPRESSED, ENCODER, RESNET, RUNS, HeldOut, MaskedText, Run
from studies.convergence.published_page import (
    AGREES,
    DIFFERS,
    UNTOLD,
    Pair,
    compressed,
    parallel,
    section,
    times,
    within,
)
from studies.convergence.quadratics import Array

SCATTER = np.linspace(-0.1, 0.1, published.SEEDS)


def pair(difference: float, here: float, spread: float | None = 0.1) -> Pair:
    other = 90 + SCATTER[::-1]
    return Pair(what="", published=(90 + difference, 90.0), spread=spread, here=(other + here + SCATTER, other))


def test_an_order_agrees_differs_or_cannot_be_told() -> None:
    assert [pair(1, here).order for here in (0.5, -0.5, 0.01)] == [AGREES, DIFFERS, UNTOLD]
    assert [pair(-1, here).order for here in (0.5, -0.5)] == [DIFFERS, AGREES]
    assert pair(0.1, 0.5).order.startswith(UNTOLD) and pair(0.1, 0.5, spread=None).order == AGREES


def test_a_ratio_agrees_where_all_that_it_may_be_is_near() -> None:
    assert [pair(1, here).ratio for here in (0.5, -9.0)] == [AGREES, DIFFERS]
    wide = dataclasses.replace(pair(1, 1), here=(90 + 60 * SCATTER, np.full(published.SEEDS, 90.0)))
    assert wide.ratio == UNTOLD
    assert [within(found, 1.0, 0.1) for found in ((0.95, 1.05), (1.05, 1.2), (1.11, 1.2))] == [AGREES, UNTOLD, DIFFERS]


def test_nobody_trains_on_what_is_held_out() -> None:
    data, labels = HeldOut(count=4), load_digits()[1]
    dealt = data.whose[0].ravel()
    assert len(set(dealt)) == len(dealt) and (dealt % published.HELD_OUT).all()
    assert torch.equal(data.fixed()[1], labels[:: published.HELD_OUT])
    shares = [(labels[torch.from_numpy(rows)] >= 5).double().mean() for rows in data.whose[0]]
    assert max(shares) - min(shares) < 0.2, "dealt by chance"
    assert published.residual_network(8).most_steps == 2 * published.residual_network(16).most_steps + 1


def test_masked_text_hides_what_is_to_be_found() -> None:
    inputs, targets = MaskedText(count=2, length=32, rows=64, seeds=2).drawn(0)
    found = targets != IGNORED
    assert inputs.shape == targets.shape == (2, 2, 64, 32) and 0.12 < found.double().mean() < 0.18
    assert 0.7 < (inputs[found] == HIDDEN).double().mean() < 0.9 and not (inputs[~found] == HIDDEN).any()
    assert 0.05 < (inputs[found] == targets[found]).double().mean() < 0.2 and (targets[found] > 0).all()


def test_every_published_pair_is_on_the_page() -> None:
    def final(run: Run) -> Array:
        return np.asarray((95.0 if run.net == RESNET else 2.0) + SCATTER)

    finals = {run: final(run) for run in RUNS}
    assert len(RUNS) == len(COMPRESSED) + 2 * len(published.WORKERS) - 1 + 2
    assert len(compressed(finals)) == 2 * 10 and len(parallel(finals)) == 4 + 1 and len(times()) == 4
    assert {run.net for run in RUNS} == {RESNET, ENCODER}
    page = section(finals)
    assert "| ResNet18: PSGD, MEM-SGD | 93.99, 94.35 | 95, 95 |" in page and "of 20 orders" in page.lower()
    assert "1.94 (BERT-Large)" in page and "| BERT-Large, loss | 1.75, 1.77 | 2, 2 |" in page
