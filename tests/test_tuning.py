"""How a case is tuned: in its id, refused with a reason, in use or an error, and held to the same truth."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from meshmark.adapter.engine import RankContext
from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.adapter.single import Single
from meshmark.errors import InputError
from meshmark.judge.truth import initial_values
from meshmark.judge.twin import twin_of
from meshmark.launch.launch import ForkserverLauncher
from meshmark.passes.noise import noise_key
from meshmark.passes.observe import ROUNDED, UNFUSED, WIDE, unused
from meshmark.records.record import Status
from meshmark.reference.data import make_batch
from meshmark.reference.objective import ROWS, build_optimizer, chunked_cross_entropy, loss_share
from meshmark.run.runner import Runner, RunOptions
from meshmark.serial import decode, encode
from meshmark.spec.case import Attention, Case, Matmul, Tuning
from meshmark.spec.layout import Layout
from meshmark.spec.optimizer import OptimizerKind, OptimizerSpec
from meshmark.spec.precision import Precision
from meshmark.spec.workload import Loss, workload
from meshmark.theory.memory import model_states
from tests.factories import make_case, make_workload

REGION, FUSED, LOSS = "Torch-Compiled Region", "aten::_fused_", "ChunkedCrossEntropy"
CHUNKED = Tuning(chunked_loss=True)
FLASH, MATH = "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_attention_math"


def test_a_tuning_is_written_in_its_words_and_stands_in_ids_where_there_is_one() -> None:
    tuning = Tuning.parse("fused,compile,math")
    assert tuning == Tuning(compile=True, fused_optimizer=True, attention=Attention.MATH)
    assert str(tuning) == "compile+fused+math" and Tuning.parse(str(tuning)) == tuning
    assert Tuning.parse("none") == Tuning.parse("") == Tuning() and not Tuning()
    plain, tuned = make_case(), make_case(tuning=tuning)
    assert tuned.id == f"{plain.id}-compile+fused+math"
    assert decode(Case, encode(tuned)) == tuned
    before = {name: value for name, value in encode(plain).items() if name != "tuning"}
    assert decode(Case, before) == plain, "as records have it that are older"


@pytest.mark.parametrize(
    "text, told",
    [
        ("fuse", "unknown tuning 'fuse': did you mean 'fused'"),
        ("none,fused", "unknown tuning 'none'"),
        ("flash,math", "expected one kind of attention"),
    ],
)
def test_what_is_no_tuning_is_refused(text: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        Tuning.parse(text)


def test_noise_is_that_of_eager_kernels_but_where_the_arithmetic_is_another() -> None:
    plain = make_case()
    for tuning in (Tuning(compile=True), Tuning(fused_optimizer=True), Tuning(chunked_loss=True)):
        assert noise_key(make_case(tuning=tuning), 5) == noise_key(plain, 5)
    assert noise_key(make_case(tuning=Tuning(matmul=Matmul.TF32)), 5) != noise_key(plain, 5)


@pytest.mark.parametrize(
    "adapter, tuning, device, told",
    [
        ("ddp", Tuning(attention=Attention.CUDNN), "cpu", "attention cudnn (a CPU has flash and math alone)"),
        ("ddp", Tuning(matmul=Matmul.TF32), "cpu", "matmul tf32 (a setting of CUDA's products)"),
        ("ddp", Tuning(matmul=Matmul.TF32), "cuda", None),
        ("ddp", Tuning(compile=True, fused_optimizer=True, attention=Attention.FLASH), "cpu", None),
        ("ddp-zero1", Tuning(fused_optimizer=True), "cpu", "tuning its optimizer (not tried)"),
    ],
)
def test_what_an_adapter_or_a_device_has_not_is_refused_with_its_reason(
    adapter: str, tuning: Tuning, device: str, told: str | None
) -> None:
    target = {"ddp": "meshmark.adapters.ddp:DDP", "ddp-zero1": "meshmark.adapters.zero_redundancy:DDPZero1"}[adapter]
    stage = int(adapter.endswith("zero1"))
    case = make_case(adapter=adapter, layout=Layout(dp=2, zero_stage=stage), tuning=tuning)
    refused = load_adapter(target).supports(case, device, "gloo")
    assert refused is None if told is None else refused == f"{adapter} does not support {told}"


def test_an_optimizer_without_a_fused_kernel_is_refused() -> None:
    own = make_workload(optimizer=OptimizerSpec(kind=OptimizerKind.LAMB))
    refused = Single.supports(
        make_case("single", Layout(), workload=own, tuning=Tuning(fused_optimizer=True)), "cpu", ""
    )
    assert refused == "single does not support a fused lamb (PyTorch has adamw and sgd fused)"


def test_a_fused_optimizer_is_fused_in_every_group() -> None:
    named = [("blocks.0.weight", torch.nn.Parameter(torch.ones(2, 2))), ("bias", torch.nn.Parameter(torch.ones(2)))]
    spec = OptimizerSpec(decay_matrices_only=True)
    built = {tuned: build_optimizer(spec, named, Tuning(fused_optimizer=tuned)) for tuned in (True, False)}
    assert [group["fused"] for group in built[True].param_groups] == [True, True]
    assert [group["fused"] for group in built[False].param_groups] == [None, None]


@pytest.mark.parametrize("loss", [loss for loss in Loss if loss is not Loss.OWN])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_loss_in_chunks_is_the_loss(loss: Loss, dtype: torch.dtype) -> None:
    """With more rows than a chunk has, some of them masked: equal to the last of 16 bits, which both round once."""
    batch = make_batch(dataclasses.replace(workload("gpt-tiny"), global_batch=9), 0)
    assert batch.targets.numel() > 2 * ROWS and (batch.targets < 0).any()
    outputs = torch.randn(*batch.targets.shape, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = list[tuple[Tensor, Tensor]]()
    for chunked in (False, True):
        own = outputs.clone().requires_grad_()
        share = loss_share(own, batch, loss, chunked=chunked)
        (share * 3).backward()
        assert own.grad is not None
        found.append((share.detach(), own.grad))
    (plain, its), (chunked_loss, own_gradient) = found
    assert chunked_loss.dtype == plain.dtype and own_gradient.dtype == dtype
    torch.testing.assert_close(chunked_loss, plain, rtol=1e-6, atol=0)
    torch.testing.assert_close(own_gradient, its, rtol=8e-3 if dtype is torch.bfloat16 else 2e-5, atol=1e-9)
    assert not own_gradient[batch.targets < 0].any()


def test_a_loss_in_chunks_keeps_the_outputs_alone() -> None:
    kept = list[Tensor]()
    outputs = torch.randn(3 * ROWS, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        chunked_cross_entropy(outputs, torch.zeros(3 * ROWS, dtype=torch.int64), torch.ones(3 * ROWS))
    assert [tensor.data_ptr() for tensor in kept if tensor.is_floating_point() and tensor.dim() == 2] == [
        outputs.data_ptr()
    ]


def test_a_twin_runs_the_kernels_of_its_case() -> None:
    """In 16 bits others round in other places, which it would take for faults."""
    for tuning in (Tuning(fused_optimizer=True), Tuning(compile=True), CHUNKED, Tuning(attention=Attention.MATH)):
        own = twin_of(make_case(precision=Precision.BF16, tuning=tuning), Single.arithmetic, torch.device("cpu"))
        assert own is not None
        compiled = [block._compiled_call_impl is not None for block in own._model.blocks.values()]  # noqa: SLF001
        assert compiled == [tuning.compile] * len(compiled) and own._model is own._model  # noqa: SLF001
    split = make_case(layout=Layout(tp=2), precision=Precision.BF16, tuning=CHUNKED)
    declared = dataclasses.replace(Single.arithmetic, splits_products=True)
    assert twin_of(split, declared, torch.device("cpu")) is None, "of split products eager kernels alone"


def test_a_twins_loss_is_in_chunks_where_the_cases_is() -> None:
    """Whose gradients of 16-bit logits are rounded elsewhere than those of the whole."""
    problem = dataclasses.replace(workload("gpt-tiny"), global_batch=9)
    batch, parameters = make_batch(problem, 0), initial_values(problem)
    found = list[dict[str, np.ndarray]]()
    for tuning in (CHUNKED, Tuning()):
        case = make_case("single", Layout(), workload=problem, precision=Precision.BF16, tuning=tuning)
        context = RankContext(rank=0, world_size=1, device=torch.device("cpu"), backend="gloo", scratch=Path())
        engine, own = Single().build(case, context), twin_of(case, Single.arithmetic, torch.device("cpu"))
        assert own is not None
        engine.backward(batch)
        step = own.step(parameters, batch)
        found.append(dict(step.gradients))
        for name, gradient in engine.gradients().items():
            distance = np.linalg.norm(gradient.double().numpy() - step.gradients[name])
            assert distance <= 1e-6 * np.linalg.norm(step.gradients[name])
    assert any((found[0][name] != found[1][name]).any() for name in found[0])


def test_activations_are_planned_of_eager_kernels_alone() -> None:
    plain, tuned = (model_states(make_case(tuning=tuning), 0) for tuning in (Tuning(), Tuning(compile=True)))
    assert plain and tuned and plain.activations and plain.peak
    assert tuned.activations is None and tuned.peak is None and tuned.parameters == plain.parameters


ALL = Tuning(compile=True, fused_optimizer=True, attention=Attention.FLASH, chunked_loss=True)


@pytest.mark.parametrize(
    "tuning, own, told",
    [
        (ALL, {REGION: 4, FUSED: 1, FLASH: 4, LOSS: 2}, []),
        (ALL, {REGION: 3, FUSED: 1, FLASH: 4, LOSS: 2}, ["ran 3 compiled regions"]),
        (ALL, {REGION: 4, FUSED: 1, UNFUSED: 1, FLASH: 4, LOSS: 2}, ["optimizer that is not fused"]),
        (ALL, {REGION: 4, FLASH: 4, LOSS: 2}, ["optimizer that is not fused"]),
        (ALL, {REGION: 4, FUSED: 1, FLASH: 3, MATH: 1, LOSS: 2}, ["ran flash, math attention"]),
        (ALL, {REGION: 4, FUSED: 1, FLASH: 4, LOSS: 1}, ["no rank computed the loss in chunks"]),
        (Tuning(attention=Attention.MATH), {}, ["ran no attention"]),
        (Tuning(attention=Attention.MATH, compile=True), {REGION: 4}, []),
        (Tuning(matmul=Matmul.TF32), {FLASH: 4}, ["multiplies whole float32 numbers"]),
        (Tuning(matmul=Matmul.TF32), {ROUNDED: 1}, []),
        (Tuning(matmul=Matmul.WIDE_SUMS), {}, ["summed in 16 bits"]),
        (Tuning(matmul=Matmul.WIDE_SUMS), {WIDE: 1}, []),
    ],
)
def test_what_did_not_run_is_told(tuning: Tuning, own: dict[str, int], told: list[str]) -> None:
    """On the second of two ranks, of two blocks and two micro-batches."""
    right = {REGION: 4, FUSED: 1, FLASH: 4, LOSS: 1, ROUNDED: 1, WIDE: 1}
    if tuning.attention is Attention.MATH:
        right = {REGION: 4, MATH: 4} if not tuning.compile else right | {FLASH: 0}
        right = {name: count for name, count in right.items() if count}
    found = list(unused(make_case(tuning=tuning), [right, own], 0))
    assert len(found) == len(told) and all(part in text for part, text in zip(told, found, strict=True))


@pytest.fixture(scope="module")
def runner(launcher: ForkserverLauncher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    broken = Path(__file__).parent / "broken" / "tuned.py"
    known = {name: f"{broken}:{name}" for name in ("Untuned", "HalfCompiled", "Miscompiled")} | builtin_adapters()
    running = Runner(launcher, known, RunOptions(observed_steps=3), tmp_path_factory.mktemp("results"))
    yield running
    running.close()


def tuned(adapter: str, words: str, precision: Precision = Precision.FP32) -> Case:
    layout = Layout(dp=2 if adapter == "ddp" else 1, num_micro_batches=2)
    return Case(
        adapter=adapter, workload=workload("gpt-mini"), layout=layout, precision=precision, tuning=Tuning.parse(words)
    )


def test_a_tuned_run_is_held_to_the_same_truth_and_says_what_it_ran(runner: Runner) -> None:
    record = runner.observe(tuned("ddp", "fused,chunked,math"))
    assert [v.suite for v in record.verdicts if v.passed] == ["equivalence", "memory", "communication"]
    seen = record.kernels["tuning fused+math+chunked"]
    assert "aten::_fused_ x 1" in seen and "ChunkedCrossEntropy x 2" in seen and MATH in seen and FLASH not in seen


@pytest.mark.parametrize(
    "name, words, told",
    [
        ("Untuned", "fused,chunked", "not fused; no rank computed the loss in chunks"),
        ("HalfCompiled", "compile", "ran 2 compiled regions for 2 micro-batches of at least 2 blocks"),
    ],
)
def test_a_tuning_in_name_alone_is_an_error(runner: Runner, name: str, words: str, told: str) -> None:
    record = runner.observe(tuned(name, words))
    assert record.outcome.status is Status.RAISED and told in record.outcome.message


@pytest.mark.slow
def test_a_compiler_that_computes_something_else_is_caught(runner: Runner) -> None:
    record = runner.observe(tuned("Miscompiled", "compile"))
    verdict = record.verdict("equivalence")
    assert record.outcome.status is Status.OK and verdict is not None and not verdict.passed
    assert record.launch.compile_seconds > 0
