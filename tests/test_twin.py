"""The twin computes bit by bit what correct engines compute in mixed precision, and is itself judged by the truth."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from meshmark.adapter.contract import Arithmetic, Casting, Summing
from meshmark.adapter.engine import RankContext
from meshmark.adapter.single import Single, SingleEngine, reduced_backward
from meshmark.judge.deviation import Deviations, QuantityKind
from meshmark.judge.diagnosis import diagnose
from meshmark.judge.faults import Fault
from meshmark.judge.other_roundings import with_other_roundings
from meshmark.judge.tolerance_model import ToleranceModel, fit, noise_run
from meshmark.judge.trace import Trace, host_copies
from meshmark.judge.truth import assess
from meshmark.judge.twin import Twin, rounded_gradients, twin_of
from meshmark.models.module import Model, build_model
from meshmark.reference.data import make_batch
from meshmark.reference.own_model import describe
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.precision import Precision
from meshmark.spec.workload import workload
from tests.factories import make_case, make_workload

STEPS = 2
CPU = torch.device("cpu")
SHARP = 1e-6
"""Relative: of sums in float32 in another order."""


def case_in(precision: Precision) -> Case:
    layout = Layout(dp=2, num_micro_batches=2)
    return make_case(workload=make_workload(global_batch=8), layout=layout, precision=precision)


@cache
def honest(precision: Precision, casting: Casting) -> Trace:
    """Return the trace of two ranks of two micro-batches, computed by one engine."""
    case, narrow = case_in(precision), precision.narrows_reduction
    alone = dataclasses.replace(case, layout=Layout(num_micro_batches=2 if narrow else 4))
    context = RankContext(rank=0, world_size=1, device=CPU, backend="gloo", scratch=Path())
    engine = Single().build(alone, context)
    assert isinstance(engine, SingleEngine)
    engine.cast_weights = casting is Casting.WEIGHTS
    trace = Trace(parameters=[host_copies(engine.parameters())])
    for step in range(STEPS):
        batch = make_batch(case.workload, step)
        trace.losses.append(float(reduced_backward(engine, batch, 2) if narrow else engine.backward(batch)))
        trace.loss_scales.append(engine.loss_scale())
        trace.gradients.append(host_copies(engine.gradients()))
        norm = engine.update()
        trace.norms.append(None if norm is None else float(norm))
        trace.parameters.append(host_copies(engine.parameters()))
    return trace


def twin_in(precision: Precision, casting: Casting) -> Twin:
    arithmetic = Arithmetic(casting=casting, reduces_each=casting is Casting.WEIGHTS)
    twin = twin_of(case_in(precision), arithmetic, CPU)
    assert twin is not None
    return twin


def furthest(deviations: Deviations, kind: QuantityKind) -> float:
    return max(d.distance / d.scale for q, steps in deviations.items() if q.kind is kind for d in steps)


@pytest.mark.parametrize("casting", Casting)
@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16, Precision.BF16_REDUCE_BF16], ids=str)
def test_a_correct_run_is_its_twin_but_for_the_order_of_a_sum(precision: Precision, casting: Casting) -> None:
    trace, case = honest(precision, casting), case_in(precision)
    found = assess(trace, case.workload, twin=twin_in(precision, casting))
    assert furthest(found, QuantityKind.TWIN) < SHARP
    assert furthest(found, QuantityKind.TWIN_LOSS) < SHARP
    assert furthest(found, QuantityKind.GRADIENTS) > 100 * SHARP, "from float64 it is far"
    (other,) = set(Casting) - {casting}
    wrong = assess(trace, case.workload, twin=twin_in(precision, other))
    assert furthest(wrong, QuantityKind.TWIN) > 100 * SHARP, "one that casts otherwise rounds otherwise"


def test_a_reduction_in_bf16_that_nobody_declared_is_far_from_the_twin() -> None:
    trace = honest(Precision.BF16_REDUCE_BF16, Casting.AUTOCAST)
    found = assess(trace, case_in(Precision.BF16).workload, twin=twin_in(Precision.BF16, Casting.AUTOCAST))
    assert furthest(found, QuantityKind.TWIN) > 1e-3


@pytest.mark.parametrize("casting", Casting)
@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16, Precision.BF16_REDUCE_BF16], ids=str)
def test_a_gradient_that_is_rounded_unlike_the_twin_s_is_named(precision: Precision, casting: Casting) -> None:
    trace, twin = copy.deepcopy(honest(precision, casting)), twin_in(precision, casting)
    assert rounded_gradients(trace, twin) == []
    name = max(trace.gradients[0], key=lambda name: trace.gradients[0][name].size)
    trace.gradients[0][name] = torch.from_numpy(trace.gradients[0][name]).bfloat16().float().numpy()
    sent_once = precision is Precision.BF16_REDUCE_BF16 and not twin.arithmetic.reduces_each
    assert rounded_gradients(trace, twin) == ([] if sent_once else [name]), "a sum that is sent once is narrow anyway"


def test_no_twin_where_none_can_compute_the_same() -> None:
    own, case = Arithmetic(casting=Casting.AUTOCAST), case_in(Precision.BF16)
    assert twin_of(case_in(Precision.FP32), own, CPU) is None, "the truth is as sharp"
    assert twin_of(case, None, CPU) is None, "nothing is declared"
    assert twin_of(dataclasses.replace(case, layout=Layout(dp=2, tp=2)), own, CPU) is None, "products are split"
    of_six, narrow = make_workload(global_batch=6), Precision.BF16_REDUCE_BF16
    thirds = make_case(workload=of_six, layout=Layout(dp=3), precision=narrow)
    assert twin_of(thirds, own, CPU) is None, "thirds are rounded before or after"


@cache
def tolerance_model() -> tuple[ToleranceModel, Twin]:
    """On an honest run alone, three times as far."""
    case, twin = case_in(Precision.BF16), twin_in(Precision.BF16, Casting.AUTOCAST)
    found = assess(honest(Precision.BF16, Casting.AUTOCAST), case.workload, twin=twin)
    return fit([noise_run(found, case.precision)] * 2), twin


def slight_block(trace: Trace) -> None:
    trace.gradients[1] = {n: g * np.float32(1 + 3e-6 * n.startswith("blocks.")) for n, g in trace.gradients[1].items()}


def rare_token(trace: Trace) -> None:
    """The second rank's part is lost of a token that it has seen once, and the first rank too."""
    case, batch = case_in(Precision.BF16), make_batch(case_in(Precision.BF16).workload, 1)
    first, second = (batch.shard(rank, 2) for rank in range(2))
    tokens, counts = second.inputs.unique(return_counts=True)
    seen = first.inputs.unique().tolist()
    (token, *_) = [int(t) for t, n in zip(tokens, counts, strict=True) if n == 1 and int(t) in seen]
    name, twin = "embedding.tokens.weight", twin_in(case.precision, Casting.AUTOCAST)
    lost = trace.gradients[1][name].copy()
    lost[token] -= twin.step_of(trace, trace.parameters[1], second, 1).gradients[name][token].astype(np.float32)
    trace.gradients[1] = {**trace.gradients[1], name: lost}


def tells_more(trace: Trace) -> None:
    trace.losses[1] *= 1 + 1e-3


@pytest.mark.parametrize(
    "doctor, fault, detail",
    [
        (slight_block, Fault.SCALED, "1.000003"),
        (rare_token, Fault.MISSING, "in 1 of 256 rows"),
        (tells_more, Fault.LOSS, "1.001"),
    ],
)
def test_what_bf16_hides_from_the_truth_the_twin_sees_and_names(
    doctor: Callable[[Trace], None], fault: Fault, detail: str
) -> None:
    (stick, twin), case = tolerance_model(), case_in(Precision.BF16)
    trace = copy.deepcopy(honest(Precision.BF16, Casting.AUTOCAST))
    assert diagnose(case, trace, assess(trace, case.workload, twin=twin), (), stick, twin) is None
    doctor(trace)
    trace.norms = [None] * STEPS
    found = diagnose(case, trace, assess(trace, case.workload, twin=twin), (), stick, twin)
    assert found is not None and (found.fault, found.step) == (fault, 1), found
    assert detail in found.detail
    if doctor is not rare_token:  # which counts for more in so small a batch
        assert max(stick.judge(assess(trace, case.workload)))[0] < 1, "float64 alone does not see it"


def test_a_twin_that_is_wrong_itself_accuses_nobody() -> None:
    (stick, twin), case = tolerance_model(), case_in(Precision.BF16)
    other = dataclasses.replace(twin, arrange=lambda batch: make_batch(case.workload, 7))
    found = assess(honest(Precision.BF16, Casting.AUTOCAST), case.workload, twin=other)
    assert stick.twin_excess(found) > 1
    assert max(stick.judge(found))[0] < 1, "it is as it was from the truth"


OWN = """
import torch
from torch import nn

class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("table", torch.arange(16) / 7)
    def forward(self, x):
        return (self.q(x) * self.k(x)).tanh() + self.v(x) * self.table.to(x.dtype)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Reader() for _ in range(3))
    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)  # which thereby is read four times
        return x

class W:
    def model(self): return Net()
    def batch(self, step): return torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
    def loss(self, model, x): return model(x).square().sum(), torch.tensor(float(len(x)))
"""


class Node(torch.autograd.Function):
    """The autograd function that DeepSpeed puts at the inputs of every module."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@pytest.mark.parametrize("sums", [Summing.TENSORS, Summing.MODULES])
@pytest.mark.parametrize("casting", Casting)
def test_the_twin_of_an_own_model_reads_its_tables_and_sums_where_it_is_declared(
    sums: Summing, casting: Casting, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    workload = describe(f"{tmp_path}/mine.py:W")
    layout = Layout(dp=2, zero_stage=3, num_micro_batches=2)
    case = make_case(workload=workload, layout=layout, precision=Precision.BF16)
    context = RankContext(rank=0, world_size=1, device=CPU, backend="gloo", scratch=tmp_path)
    engine = Single().build(dataclasses.replace(case, layout=Layout(num_micro_batches=4)), context)
    assert isinstance(engine, SingleEngine)
    engine.cast_weights = casting is Casting.WEIGHTS
    if sums is Summing.MODULES:
        for part in engine.module.modules():
            part.register_forward_pre_hook(lambda _, x: tuple(Node.apply(t) for t in x))  # type: ignore[no-untyped-call]
    batch, parameters = make_batch(workload, 0), host_copies(engine.parameters())
    engine.backward(batch)
    run = host_copies(engine.gradients())

    def apart(declared: Summing) -> float:
        twin = twin_of(case, Arithmetic(casting=casting, sums=declared), CPU)
        assert twin
        step = twin.step(parameters, batch)
        return max(float(np.abs(step.gradients[n] - x).max() / np.abs(x).max()) for n, x in run.items())

    (other,) = {Summing.TENSORS, Summing.MODULES} - {sums}
    assert apart(sums) < SHARP
    if casting is Casting.WEIGHTS:  # under autocast the residual stream is wide
        assert apart(other) > 100 * SHARP


def test_a_backward_pass_that_finds_other_weights_finds_them_in_every_rank_s_part() -> None:
    """Of products that are split over two ranks, whose parts are cast apart. A diagnosis ended in an error there."""
    case = dataclasses.replace(case_in(Precision.BF16), layout=Layout(tp=2, num_micro_batches=2))
    split = twin_of(case, Arithmetic(casting=Casting.AUTOCAST, splits_products=True), CPU)
    whole = twin_of(
        dataclasses.replace(case, layout=Layout(num_micro_batches=2)), Arithmetic(casting=Casting.AUTOCAST), CPU
    )
    assert split and whole
    parameters, batch = honest(Precision.BF16, Casting.AUTOCAST).parameters[0], make_batch(case.workload, 0)
    names = ["blocks.1.feed_forward.up.weight", "blocks.1.feed_forward.down.weight"]  # by columns, and by rows
    changed = {name: 2 * parameters[name] for name in names}
    found, expected, right = (
        twin.step(parameters, batch, changed=values).gradients["blocks.0.attention.q.weight"]
        for twin, values in ((split, changed), (whole, changed), (whole, {}))
    )
    far = np.linalg.norm(expected - right)
    assert far > 0.1 * np.linalg.norm(right)
    assert np.linalg.norm(found - expected) < 0.1 * far


class WideSum(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias if self.bias is not None else x @ self.weight.T


class NarrowSum(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight.T
        if self.bias is not None:
            y += self.bias
        return y


@pytest.mark.parametrize("casting", list(Casting))
@pytest.mark.parametrize("layer", [WideSum, NarrowSum])
def test_biases_that_are_added_to_rounded_products_are_no_defect(layer: type[nn.Linear], casting: Casting) -> None:
    """A bias below half of a product's last place is lost, as small ones are: no noise would allow for it."""

    def rewrite(model: nn.Module) -> None:
        for part in model.modules():
            if type(part) is nn.Linear:
                part.__class__ = layer

    case = Case(adapter="ddp", workload=workload("gpt-mini"), layout=Layout(dp=2), precision=Precision.BF16)
    twin = Twin(case=case, arithmetic=Arithmetic(casting=casting), device=torch.device("cpu"))
    values = {n: p.detach().numpy().copy() for n, p in initialized(case).named_parameters()}
    for name in values:
        values[name] += np.float32(2.5e-4) * name.endswith("bias")
    batch = make_batch(case.workload, 0)
    own = dataclasses.replace(twin, rewrite=rewrite).step(values, batch)
    plain = twin.step(values, batch)
    trace = Trace(parameters=[values], losses=[own.loss], gradients=[dict(own.gradients)])
    assert abs(plain.loss - own.loss) > 1e-5
    found = with_other_roundings(twin, plain, trace, values, batch, 0)
    assert found.loss == own.loss and all(np.array_equal(found.gradients[n], own.gradients[n]) for n in values)
    trace.gradients[0]["head.norm.weight"] = trace.gradients[0]["head.norm.weight"] * 1.00001
    assert with_other_roundings(twin, plain, trace, values, batch, 0) is plain


def initialized(case: Case) -> Model:
    model = build_model(case.workload.model)
    model.initialize(case.workload.seed)
    return model
