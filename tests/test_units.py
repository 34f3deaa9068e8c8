"""The peak of FSDP's units: planned as PyTorch's lines have it, tensor by tensor, and measured where the root is most
of the model and where a block is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.judge.deviation import Assess
from meshmark.launch.launch import ForkserverLauncher
from meshmark.models.transformer import ModelSpec, gpt
from meshmark.run.runner import Runner, RunOptions
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.precision import Precision
from meshmark.spec.workload import workload
from meshmark.theory.backward_pass import INDEX_BYTES, Widths, block_bytes
from meshmark.theory.memory import ModelStates, model_states

GPT = workload("gpt-mini")
WORDS = gpt("words", 2, 32, 4, vocab_size=2048, seq_len=16)
"""The root is three quarters of it."""
DEEP = gpt("deep", 9, 48, 4, vocab_size=256, seq_len=16)
ONE = np.ones(1)
LAYOUT = Layout(dp=4, zero_stage=3, num_micro_batches=2)


def planned(name: str, model: ModelSpec, layout: Layout, precision: Precision) -> tuple[ModelStates, Case]:
    case = Case(
        adapter=name,
        workload=dataclasses.replace(GPT, name=model.name, model=model),
        layout=layout,
        precision=precision,
    )
    found = model_states(case, 0, load_adapter(builtin_adapters()[name]).recipe(case))
    assert found and found.peak and found.activations
    return found, case


def resting(found: ModelStates) -> float:
    """Model states, and of the micro-batch before all gradients' shards."""
    return found.parameters + found.optimizer_states + found.gradients


def test_fsdp1_widens_a_flat_gradient_that_stays_until_it_is_reduced() -> None:
    """When the last block's are reduced, the first in the backward pass."""
    found, case = planned("fsdp1", GPT.model, LAYOUT, Precision.BF16)
    model, tokens = GPT.model, GPT.global_batch // 8 * GPT.model.seq_len
    unit, root = model.block_parameters, model.num_parameters - 2 * model.block_parameters
    saved = tokens * block_bytes(model, Widths.of(case.precision, casts_weights=True), ONE, ONE)
    there = {
        "the root's weights, from the forward pass": 2 * root,
        "the first block's, gathered ahead": 2 * unit,
        "the head's gradient": 2 * model.vocab_size * model.hidden,
        "the flat gradient that autograd made": 2 * unit,
        "its wide copy": 4 * unit,
        "gloo's copy of that": 4 * unit,
        "this rank's part": 4 * unit / 4,
        "what the first block saved": float(saved[0]),
        "the gradient of what it gave": 2 * tokens * model.hidden,
        "positions": INDEX_BYTES * model.seq_len,
    }
    assert found.peak == resting(found) + sum(there.values())


def test_what_is_reduced_adds_up_to_the_last_block_but_one() -> None:
    """In replicas of two shards. Its reduction is beside the weights of the last, gathered ahead; that of the last has
    none to follow it."""
    found, case = planned("fsdp1-hybrid", DEEP, Layout(dp=4, zero_stage=3), Precision.BF16)
    tokens, unit = GPT.global_batch // 4 * DEEP.seq_len, DEEP.block_parameters
    saved = float((tokens * block_bytes(DEEP, Widths.of(case.precision, casts_weights=True), ONE, ONE))[0])
    root = DEEP.num_parameters - 9 * unit
    beside = 2 * root + 2 * DEEP.vocab_size * DEEP.hidden + 2 * tokens * DEEP.hidden + INDEX_BYTES * DEEP.seq_len
    own = 2 * unit + 2 * 4 * unit + 4 * unit / 2
    more = [2 * unit * (done < 8) + (8 - done) * saved + done * 4 * unit / 2 for done in range(9)]
    assert more.index(max(more)) == 7
    assert found.peak == found.parameters + found.optimizer_states + beside + own + max(more)


@pytest.mark.parametrize("name", ["fsdp2", "fsdp2-recommended"])
def test_fsdp2_reduces_the_root_at_the_end_beside_its_last_gradient(name: str) -> None:
    """Whether or not it was kept from the forward pass: it is given up before."""
    found, _ = planned(name, WORDS, dataclasses.replace(LAYOUT, dp=2), Precision.BF16)
    root = WORDS.num_parameters - 2 * WORDS.block_parameters
    there = {
        "what is reduced": 4 * root,
        "gloo's copy of that": 4 * root,
        "this rank's part": 4 * root / 2,
        "the head's gradient, by a loop's variable": 2 * WORDS.vocab_size * WORDS.hidden,
        "positions": INDEX_BYTES * WORDS.seq_len,
    }
    assert found.peak == resting(found) + sum(there.values())


@pytest.mark.parametrize("name", ["fsdp2", "fsdp2-recommended"])
def test_fsdp2_alone_copies_the_root_s_gradients_twice_and_sends_nothing(name: str) -> None:
    found, _ = planned(name, WORDS, Layout(zero_stage=3, num_micro_batches=8), Precision.BF16)
    root = WORDS.num_parameters - 2 * WORDS.block_parameters
    there = {"one flat tensor": 4 * root, "its copy": 4 * root, "positions": INDEX_BYTES * WORDS.seq_len}
    assert found.peak == resting(found) + sum(there.values())


def test_a_root_that_is_kept_is_kept_by_a_rank_that_is_alone_too() -> None:
    layout = Layout(zero_stage=3, num_micro_batches=2)
    freed, kept = (planned(name, WORDS, layout, Precision.BF16)[0] for name in ("fsdp2", "fsdp2-recommended"))
    root = WORDS.num_parameters - 2 * WORDS.block_parameters
    assert kept.activations is not None and freed.activations is not None
    assert kept.activations - freed.activations == 2 * root


@pytest.fixture(scope="module")
def runner(launcher: ForkserverLauncher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    options = RunOptions(observed_steps=3, assess=Assess.OFF)
    running = Runner(launcher, builtin_adapters(), options, tmp_path_factory.mktemp("results"))
    yield running
    running.close()


@pytest.mark.parametrize(
    "name, model, dp",
    [
        ("fsdp1", GPT.model, 2),
        ("fsdp2-recommended", WORDS, 2),
        ("fsdp2-recommended", WORDS, 1),
        ("fsdp2-noreshard", DEEP, 1),
        ("fsdp2-collectives", DEEP, 1),
        ("fsdp2-collectives", DEEP, 2),
    ],
)
def test_what_is_planned_is_what_is_measured(runner: Runner, name: str, model: ModelSpec, dp: int) -> None:
    _, case = planned(name, model, dataclasses.replace(LAYOUT, dp=dp), Precision.BF16)
    record = runner.observe(case)
    verdict = record.verdict("memory")
    assert verdict and verdict.passed, verdict
    for reading, plan in zip(record.memory.readings, record.memory.planned, strict=True):
        assert plan and plan.peak
        measured = reading.peak.total - reading.peak.inputs
        assert max(measured - reading.late_bytes - plan.peak, plan.peak - measured) <= 0.001 * plan.peak
