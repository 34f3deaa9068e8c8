"""Closed forms against real modules, and against figures worked out by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from meshmark.measure.readings import Collective, wire_factor
from meshmark.models.module import parameter_shapes
from meshmark.models.transformer import MODELS, Family, ModelSpec
from meshmark.models.transformer.module import Transformer
from meshmark.spec.layout import Layout
from meshmark.spec.optimizer import OptimizerKind, OptimizerSpec
from meshmark.spec.precision import Precision
from meshmark.spec.workload import Loss
from meshmark.theory.memory import model_states
from meshmark.theory.model_theory import local_parameters, model_flops_per_token
from meshmark.theory.recipe import TrainingRecipe, recipe
from tests.factories import make_case, make_model, make_workload

SPECS = {
    "gpt": make_model(num_layers=5),
    "gpt tied": make_model(num_layers=5, tied_embeddings=True),
    "llama grouped": make_model(family=Family.LLAMA, num_layers=5, num_kv_heads=2),
}
EVERY_SPEC = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def real_parameters(spec: ModelSpec, num_stages: int, stage: int) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Transformer(spec, spec.stage_layers(num_stages, stage)).parameters())


@EVERY_SPEC
@pytest.mark.parametrize("pp", [1, 2, 3, 5])
def test_a_stage_holds_what_its_modules_hold(spec: ModelSpec, pp: int) -> None:
    """The planner's split of layers (no torch) and the model's are two codes: they must agree."""
    layout = Layout(pp=pp, dp=2)
    for stage in range(pp):
        for rank in (2 * stage, 2 * stage + 1):  # data parallelism is inside
            assert local_parameters(spec, layout, rank) == real_parameters(spec, pp, stage)


def tensor_parallel_share(name: str, shape: tuple[int, ...], tp: int) -> int:
    """Megatron's rule (arXiv:1909.08053, section 3), name by name: column-parallel layers are split with their biases,
    row-parallel ones without; vocabulary is split; the rest is whole on every rank."""
    split = name.startswith(("embedding.tokens", "head.output")) or any(
        f".{layer}." in name for layer in ("attention.q", "attention.k", "attention.v", "up", "gate")
    )
    row = name.endswith(("attention.out.weight", "feed_forward.down.weight"))
    return math.prod(shape) // (tp if split or row else 1)


@EVERY_SPEC
@pytest.mark.parametrize("tp", [1, 2])
def test_tensor_parallel_ranks_hold_their_shards(spec: ModelSpec, tp: int) -> None:
    expected = sum(tensor_parallel_share(name, shape, tp) for name, shape in parameter_shapes(spec).items())
    assert {local_parameters(spec, Layout(tp=tp, dp=2), rank) for rank in range(2 * tp)} == {expected}


@EVERY_SPEC
def test_stages_add_up_to_the_model_and_a_tied_head_s_copy(spec: ModelSpec) -> None:
    total = sum(local_parameters(spec, Layout(pp=3), rank) for rank in range(3))
    assert total == spec.num_parameters + (spec.vocab_size * spec.hidden if spec.tied_embeddings else 0)


def states(
    stage: int, dp: int = 4, using: TrainingRecipe | None = None, **changes: object
) -> tuple[float, float, float]:
    found = model_states(make_case(layout=Layout(dp=dp, zero_stage=stage), **changes), 0, using)
    return found.parameters, found.gradients, found.optimizer_states


P = make_model().num_parameters


@pytest.mark.parametrize(
    "stage, expected",
    [(0, (4 * P, 4 * P, 8 * P)), (1, (4 * P, 4 * P, 2 * P)), (2, (4 * P, P, 2 * P)), (3, (P, P, 2 * P))],
)
def test_zero_shards_stage_by_stage(stage: int, expected: tuple[float, ...]) -> None:
    """Float32 AdamW on 4 ranks: 1 shards moments, 2 also gradients, 3 also weights (arXiv:1910.02054, section 5)."""
    assert states(stage) == expected


@pytest.mark.parametrize(
    "stage, total",
    [(0, 16.0), (1, 2 + 2 + 12 / 64), (2, 2 + 14 / 64), (3, 16 / 64)],
)
def test_the_figures_of_the_zero_paper(stage: int, total: float) -> None:
    """arXiv:1910.02054, figure 1: 7.5B parameters on 64 ranks take 120, 31.4, 16.6 and 1.9 GB."""
    workload = make_workload(global_batch=64)
    found = states(stage, dp=64, using=recipe("zero"), workload=workload)
    assert sum(found) == pytest.approx(total * P)
    published = {0: 120e9, 1: 31.4e9, 2: 16.6e9, 3: 1.9e9}[stage]
    assert sum(found) / P * 7.5e9 == pytest.approx(published, rel=0.02)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sharded_states_add_up_to_the_whole_over_ranks(stage: int) -> None:
    layout = Layout(dp=4, zero_stage=stage)
    ranks = [model_states(make_case(layout=layout), rank) for rank in range(4)]
    assert sum(r.optimizer_states for r in ranks) == 8 * P
    if stage == 3:
        assert sum(r.parameters for r in ranks) == 4 * P


def test_zero_shards_only_what_a_stage_and_its_tensor_shard_hold() -> None:
    layout = Layout(dp=2, tp=2, pp=2, zero_stage=3)
    case = make_case(layout=layout)
    for rank in range(8):
        expected = 4 * local_parameters(case.workload.model, layout, rank) / 2
        assert model_states(case, rank).parameters == expected


@pytest.mark.parametrize(
    "precision, expected", [(Precision.FP64, (8, 8, 16)), (Precision.FP32, (4, 4, 8)), (Precision.BF16, (4, 4, 8))]
)
def test_bytes_of_plain_training_by_precision(precision: Precision, expected: tuple[int, ...]) -> None:
    """Mixed precision by autocast keeps float32 alone between operations."""
    assert states(0, precision=precision) == tuple(n * P for n in expected)


def test_sgd_keeps_no_state() -> None:
    workload = make_workload(optimizer=OptimizerSpec(kind=OptimizerKind.SGD))
    assert states(0, workload=workload) == (4 * P, 4 * P, 0)


@pytest.mark.parametrize(
    "kind, of_four",
    [
        ("all_reduce", 1.5),
        ("all_gather", 0.75),
        ("reduce_scatter", 0.75),
        ("broadcast", 0.75),
        ("reduce", 0.75),
        ("all_to_all", 0.75),
        ("send", 1.0),
        ("recv", 0.0),
        ("barrier", 0.0),
    ],
)
def test_wire_factors_of_ring_algorithms(kind: str, of_four: float) -> None:
    assert wire_factor(kind, 4) == of_four
    assert Collective(kind=kind, group_size=4, count=1, num_bytes=200).wire_bytes == 200 * of_four


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    for n in (1, 2, 3, 64):
        assert wire_factor("all_reduce", n) == wire_factor("reduce_scatter", n) + wire_factor("all_gather", n)


# Operations.


def test_operations_of_a_model_worked_out_by_hand() -> None:
    """One GPT layer of width 2, feed-forward 3, vocabulary 5, 7 tokens: q, k, v and out take 4 x 4 weights, up and down
    12, the head 10; attention 12 x 2 x 7."""
    spec = make_model(num_layers=1, hidden=2, num_heads=1, num_kv_heads=1, ffn_hidden=3, vocab_size=5, seq_len=7)
    assert model_flops_per_token(spec) == 6 * (16 + 12 + 10) + 12 * 2 * 7


def test_operations_of_a_llama_worked_out_by_hand() -> None:
    """Two layers; keys and values half as wide; three feed-forward matrices."""
    spec = make_model(
        family=Family.LLAMA, num_layers=2, hidden=4, num_heads=2, num_kv_heads=1, ffn_hidden=3, vocab_size=5, seq_len=7
    )
    assert model_flops_per_token(spec) == 6 * (2 * (16 + 8 + 8 + 16 + 3 * 12) + 20) + 12 * 2 * 4 * 7


def test_operations_are_those_that_pytorch_counts() -> None:
    """An independent count of a real forward and backward: matrices as PyTorch has them."""
    from torch.utils.flop_counter import FlopCounterMode

    from meshmark.reference.data import make_batch
    from meshmark.reference.objective import loss_share

    spec = MODELS["gpt-tiny"]
    workload = make_workload(model=spec, global_batch=2)
    model, batch = Transformer(spec), make_batch(make_workload(model=spec, global_batch=2), 0)
    model.initialize(0)
    with FlopCounterMode(display=False) as counter:
        loss_share(model(batch.inputs), batch, Loss.CROSS_ENTROPY).backward()
    counts = counter.get_flop_counts()["Global"]
    matrices = sum(n for op, n in counts.items() if "attention" not in str(op))
    attention = 12 * spec.num_layers * spec.hidden * spec.seq_len
    assert matrices / workload.tokens_per_step == model_flops_per_token(spec) - attention


def test_a_tied_head_computes_as_much() -> None:
    tied = dataclasses.replace(MODELS["gpt-1.3b"], tied_embeddings=True)
    assert model_flops_per_token(tied) == model_flops_per_token(MODELS["gpt-1.3b"])
