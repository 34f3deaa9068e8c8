"""The activations that are planned are those that autograd saves: against PyTorch itself, and through real adapters."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.util
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmark.launch.launch import ForkserverLauncher
from meshmark.measure.readings import Bytes
from meshmark.models.transformer import TEXT_FAMILIES, Family, ModelSpec
from meshmark.models.transformer.module import Transformer
from meshmark.records.record import Record, Verdict
from meshmark.reference.data import make_batch
from meshmark.reference.objective import loss_share
from meshmark.run.runner import Runner, RunOptions
from meshmark.run.verdict import judge_memory
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout, Recompute, Schedule
from meshmark.spec.precision import Precision
from meshmark.spec.workload import Loss, Workload
from meshmark.theory.backward_pass import RNG_STATE_BYTES
from meshmark.theory.memory import ExtraMemory, ModelStates, model_states
from meshmark.theory.recipe import eager_recipe
from tests.factories import make_environment, make_good, make_memory, make_memory_evidence, make_model, make_workload

SCALARS = 64
"""Bytes of the loss and its parts, which are not planned."""
SPECS = {
    "gpt": make_model(),
    "gpt tied": make_model(tied_embeddings=True, num_layers=3),
    "llama": make_model(family=Family.LLAMA, hidden=32, ffn_hidden=40),
    "llama grouped": make_model(family=Family.LLAMA, num_kv_heads=2),
}


def one(spec: ModelSpec, precision: Precision = Precision.FP32) -> Case:
    """One process, one micro-batch."""
    return Case(
        adapter="single", workload=make_workload(model=spec, global_batch=2), layout=Layout(), precision=precision
    )


def held_activations(case: Case, rank: int, *, casts_weights: bool = False) -> float | None:
    return model_states(case, rank, eager_recipe(case, casts_weights=casts_weights)).activations


def visible_storages() -> set[int]:
    """Addresses of all storages that Python code can still reach."""
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    addresses = set()
    for tensor in tensors:
        with contextlib.suppress(RuntimeError, NotImplementedError):  # a wrapper around other tensors has no storage
            addresses.add(tensor.untyped_storage().data_ptr())
    return addresses


def saved_bytes(case: Case, *, casts_weights: bool = False) -> int:
    """Bytes that a forward pass allocates and that autograd saves, each storage once."""
    low = torch.bfloat16 if case.precision.is_mixed else None
    model = Transformer(case.workload.model)
    model.initialize(0)
    model.to(torch.float64 if case.precision == Precision.FP64 else low if casts_weights else None)
    batch = make_batch(case.workload, 0)
    with torch.no_grad():
        model(batch.inputs)  # fills the cache of rotary positions
    before, storages = visible_storages(), {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in before:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    autocast = torch.autocast("cpu", dtype=low) if low and not casts_weights else contextlib.nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with autocast:
            logits = model(batch.inputs)
        loss = loss_share(logits, batch, Loss.CROSS_ENTROPY)
    del loss
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize(
    "precision, casts_weights",
    [(Precision.FP64, False), (Precision.FP32, False), (Precision.BF16, False), (Precision.BF16, True)],
)
def test_the_plan_is_what_autograd_saves(spec: ModelSpec, precision: Precision, casts_weights: bool) -> None:
    case = one(spec, precision)
    planned = held_activations(case, 0, casts_weights=casts_weights)
    assert saved_bytes(case, casts_weights=casts_weights) == pytest.approx(planned, abs=SCALARS)


@pytest.mark.slow
@given(
    heads=st.integers(1, 4),
    head_dim=st.sampled_from([4, 6, 8]),
    ffn=st.integers(1, 50),
    layers=st.integers(1, 3),
    tokens=st.integers(2, 20),
    family=st.sampled_from(sorted(TEXT_FAMILIES)),
)
@settings(deadline=None, max_examples=25)
def test_whatever_the_dimensions(heads: int, head_dim: int, ffn: int, layers: int, tokens: int, family: Family) -> None:
    """(But one token, or one rotary pair a head, which PyTorch may lay out in either order.)"""
    spec = make_model(
        family=family,
        hidden=heads * head_dim,
        num_heads=heads,
        num_kv_heads=1,
        ffn_hidden=ffn,
        num_layers=layers,
        seq_len=tokens,
    )
    assert saved_bytes(one(spec)) == pytest.approx(held_activations(one(spec), 0), abs=SCALARS)


def held(layout: Layout, rank: int = 0, **model: object) -> float:
    work = make_workload(model=make_model(num_layers=4, **model), global_batch=8)
    found = held_activations(Case(adapter="any", workload=work, layout=layout), rank)
    assert found is not None
    return found


def test_replicas_and_micro_batches_divide_and_a_pipeline_holds_every_micro_batch() -> None:
    positions = 8 * 12
    whole = held(Layout()) - positions
    assert held(Layout(dp=2)) - positions == whole / 2
    assert held(Layout(num_micro_batches=4)) - positions == whole / 4
    assert held(Layout(pp=2, num_micro_batches=4)) == held(Layout(pp=2)) + 3 * positions
    # What the second stage receives is in no category of the plan's: one stream.
    assert held(Layout(pp=2)) + held(Layout(pp=2), rank=1) == held(Layout()) - 8 * 12 * 16 * 4


def test_tensor_parallelism_divides_what_is_between_norms_and_the_logits() -> None:
    norms = 8 * 12 * 4 * (2 * 16 + 2) * 9 + 8 * 12
    assert held(Layout(tp=4)) - norms == (held(Layout()) - norms) / 4


def test_recomputation_keeps_a_blocks_input_and_a_random_state() -> None:
    stream = 8 * 12 * 16 * 4
    block = held(Layout(pp=4), rank=1) + stream
    assert held(Layout()) - held(Layout(recompute=Recompute.FULL)) == 4 * (block - stream - RNG_STATE_BYTES)


@pytest.mark.parametrize(
    "layout, dropout",
    [
        (Layout(recompute=Recompute.SELECTIVE), 0.0),
        (Layout(cp=2), 0.0),
        (Layout(tp=2, sequence_parallel=True), 0.0),
        (Layout(pp=2, schedule=Schedule.ZERO_BUBBLE), 0.0),
        (Layout(), 0.1),
    ],
)
def test_what_the_forms_do_not_know_is_not_planned(layout: Layout, dropout: float) -> None:
    work = make_workload(model=make_model(dropout=dropout))
    assert held_activations(Case(adapter="any", workload=work, layout=layout), 0) is None


# The verdict.


def judged(measured: int, planned: float | None, device: str = "cpu", declared: float = 0.0) -> Record:
    reading = dataclasses.replace(make_memory(), held=Bytes(activations=measured))
    plan = ModelStates(parameters=400, gradients=400, optimizer_states=800, activations=planned)
    remainder = ExtraMemory(category="activations", num_bytes=declared, reason="masks")
    return make_good(
        environment=make_environment(device=device),
        memory=make_memory_evidence(
            readings=[make_memory(), reading], planned=[plan, plan], extra_memory=[[], [remainder]]
        ),
    )


@pytest.mark.parametrize("measured, passed", [(10_000, True), (10_099, True), (10_101, False), (9_899, False)])
def test_activations_are_judged_like_states(measured: int, passed: bool) -> None:
    verdict = judge_memory(judged(measured, 10_000.0))
    assert verdict.passed is passed
    assert (verdict.evidence["category"], verdict.evidence["rank"]) == ("activations", 1) or measured == 10_000


def test_a_declared_remainder_of_activations_counts() -> None:
    assert judge_memory(judged(15_000, 10_000.0, declared=5_000.0)).passed
    assert not judge_memory(judged(10_000, 10_000.0, declared=5_000.0)).passed, "declared, but not there"


def test_activations_are_judged_where_they_are_planned_and_measured_alone() -> None:
    assert judge_memory(judged(99_999, None)).passed
    assert judge_memory(judged(99_999, 10_000.0, device="cuda")).passed, "the forms are the CPU's"
    unread = dataclasses.replace(judged(1, 10_000.0), memory=make_memory_evidence(extra_memory=[[], []]))
    assert judge_memory(unread).passed, "a record of before they were read"


# Through the launcher.

BROKEN = ("KeepsLogits", "Recomputes", "Copies")
"""Engines of tests/broken/activations.py."""
GPT = make_workload(model=make_model(hidden=32, ffn_hidden=64, seq_len=32))
LLAMA = make_workload(model=make_model(family=Family.LLAMA, hidden=32, ffn_hidden=64, seq_len=32, num_kv_heads=1))


@pytest.fixture(scope="module")
def runner(launcher: ForkserverLauncher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    known = {name: f"tests.broken.activations:{name}" for name in BROKEN}
    known |= {
        "single": "meshmark.adapter.single:Single",
        "ddp": "meshmark.adapters.ddp:DDP",
        "gpipe": "meshmark.adapters.pipeline:GPipe",
        "fsdp2": "meshmark.adapters.fsdp2:FSDP2",
        "accelerate": "meshmark.adapters.accelerate:Accelerate",
        "accelerate-fsdp2": "meshmark.adapters.accelerate:AccelerateFSDP2",
    }
    options = RunOptions(observed_steps=3)
    running = Runner(launcher, known, options, tmp_path_factory.mktemp("results"))
    yield running
    running.close()


@pytest.mark.parametrize(
    "adapter, layout, work",
    [
        ("single", Layout(num_micro_batches=2), LLAMA),
        ("ddp", Layout(dp=2, num_micro_batches=2), GPT),
        ("fsdp2", Layout(dp=2, zero_stage=3), GPT),
        ("fsdp2", Layout(dp=2, zero_stage=3), LLAMA),
        ("gpipe", Layout(pp=2, num_micro_batches=4), GPT),
    ],
    ids=lambda value: getattr(value, "id", None) or getattr(value, "name", str(value)),
)
def test_adapters_hold_what_is_planned(runner: Runner, adapter: str, layout: Layout, work: Workload) -> None:
    record = runner.observe(Case(adapter=adapter, layout=layout, workload=work))
    verdict = record.verdict("memory")
    assert verdict is not None and verdict.passed, verdict
    for reading, plan, declared in zip(
        record.memory.readings, record.memory.planned, record.memory.extra_memory, strict=True
    ):
        assert reading.held is not None and plan.activations is not None
        expected = plan.activations + sum(r.num_bytes for r in declared if r.category == "activations")
        assert reading.held.activations == pytest.approx(expected, abs=2 * SCALARS)
        assert reading.held.total <= reading.peak.total


@pytest.mark.parametrize(
    "adapter, layout, buckets", [("single", Layout(), False), ("ddp", Layout(dp=2), True)], ids=["single", "ddp"]
)
def test_the_peak_is_planned_category_by_category(runner: Runner, adapter: str, layout: Layout, buckets: bool) -> None:
    """Where the vocabulary is wide beside a layer the peak is at the loss: two more logits are alive, the gradients of
    the log-softmax and of the logits; of the parameters' gradients, none but DDP's buckets."""
    record = runner.observe(Case(adapter=adapter, layout=layout, workload=GPT))
    for reading, plan in zip(record.memory.readings, record.memory.planned, strict=True):
        assert plan.activations is not None
        logits = GPT.tokens_per_step / layout.dp * GPT.model.vocab_size * 4
        assert reading.peak.activations == pytest.approx(plan.activations + 2 * logits, abs=SCALARS)
        assert reading.peak.gradients == (plan.gradients if buckets else 0)
        assert reading.peak.parameters == plan.parameters
        assert reading.peak.optimizer_states == pytest.approx(plan.optimizer_states, rel=0.02)


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
@pytest.mark.parametrize(
    "one, other, layout",
    [
        ("ddp", "accelerate", Layout(dp=2, num_micro_batches=2)),
        ("fsdp2", "accelerate-fsdp2", Layout(dp=2, zero_stage=3)),
    ],
)
def test_two_adapters_of_one_algorithm_hold_the_same(runner: Runner, one: str, other: str, layout: Layout) -> None:
    """Within 1 % on every rank, of all that the allocator counted; what gloo had late at the peak is told. Accelerate
    keeps FSDP2's root whole from its forward to its backward pass, which its plan tells."""
    mine, theirs = (runner.observe(Case(adapter=name, layout=layout, workload=GPT)).memory for name in (one, other))
    for rank in range(2):
        assert mine.readings[rank].steady.total == pytest.approx(theirs.readings[rank].steady.total, rel=0.01)
        beyond = [
            (held.readings[rank].peak.total - held.planned[rank].peak, held.readings[rank].late_bytes)
            for held in (mine, theirs)
        ]
        (less, _), (more, late) = sorted(beyond)
        assert more - late <= less + 0.01 * mine.planned[rank].peak


def verdict_on(runner: Runner, name: str) -> Verdict:
    """Return the memory suite's verdict on an engine that trains correctly."""
    record = runner.observe(Case(adapter=name, layout=Layout(dp=2), workload=GPT))
    equivalence, memory = record.verdict("equivalence"), record.verdict("memory")
    assert equivalence is not None and equivalence.passed
    assert memory is not None and memory.evidence["category"] == "activations"
    return memory


@pytest.mark.parametrize("name", ["KeepsLogits", "Recomputes"])
def test_an_engine_that_holds_other_activations_fails(runner: Runner, name: str) -> None:
    assert not verdict_on(runner, name).passed


def test_eight_bytes_a_token_show_within_the_tolerance(runner: Runner) -> None:
    verdict = verdict_on(runner, "Copies")
    more = verdict.evidence["measured_bytes"] - verdict.evidence["planned_bytes"]
    assert more == pytest.approx(8 * GPT.tokens_per_step / 2, abs=SCALARS)
    assert verdict.passed
