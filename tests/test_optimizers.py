"""Kinds of optimizers: what each keeps, one exact step of each, and real runs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from meshmark.adapter.registry import load_adapter
from meshmark.adapters import ADAPTERS
from meshmark.errors import InputError
from meshmark.judge.truth import ExactOptimizer
from meshmark.launch.launch import ForkserverLauncher
from meshmark.models import module as model_module
from meshmark.models.transformer import Family, ModelSpec
from meshmark.reference.objective import newton_schulz, reference_optimizer
from meshmark.run.runner import Runner, RunOptions
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.optimizer import OptimizerKind, OptimizerSpec
from meshmark.spec.precision import Dtype, Precision
from meshmark.spec.workload import WORKLOADS, workload
from meshmark.theory.memory import model_states
from meshmark.theory.partition import parameter_shapes, uniform_stages
from tests.broken.mutant import LAYOUTS, under
from tests.broken.mutants import BY_NAME, target
from tests.factories import make_case, make_model, make_workload

MATRIX, VECTOR = "blocks.0.attention.q.weight", "blocks.0.attention.q.bias"
SPECS = [
    OptimizerSpec(),
    OptimizerSpec(kind=OptimizerKind.SGD),
    *(
        WORKLOADS[f"gpt-mini-{kind}"].optimizer
        for kind in ("momentum", "nesterov", "adafactor", "muon", "lars", "lamb")
    ),
]
MUTANTS = {
    "fsdp2_Nesterov": "with Nesterov's look-ahead",
    "ddp_OtherBeta2Decay": "with a beta2_decay of -0.5",
    "ddp_NotOrthogonal": "not made orthogonal",
}


def ids(spec: OptimizerSpec) -> str:
    return f"{spec.kind}-{spec.momentum}" + ("-nesterov" if spec.nesterov else "")


@pytest.mark.parametrize("spec", SPECS, ids=ids)
@pytest.mark.parametrize("name, shape", [(MATRIX, (3, 5)), (VECTOR, (7,)), ("embedding.tokens.weight", (4, 3))])
@pytest.mark.parametrize("dtype", [Dtype.FP32, Dtype.FP64])
def test_states_are_those_that_pytorch_keeps(
    spec: OptimizerSpec, name: str, shape: tuple[int, ...], dtype: Dtype
) -> None:
    parameter = nn.Parameter(torch.ones(shape, dtype=getattr(torch, dtype)))
    optimizer = reference_optimizer(spec).build([(name, parameter)])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = {n: (tuple(t.shape), t.dtype) for n, t in optimizer.state[parameter].items() if isinstance(t, Tensor)}
    assert kept == {s.name: (s.shape, getattr(torch, s.dtype)) for s in spec.states(name, shape, dtype)}
    assert sum(s.num_bytes for s in spec.states(name, shape, dtype)) == sum(
        t.nbytes for t in optimizer.state[parameter].values() if isinstance(t, Tensor)
    )


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"momentum": 0.9}, "adamw has no momentum, got 0.9; sgd, muon and lars have"),
        ({"kind": OptimizerKind.SGD, "momentum": 1.0}, "momentum is 1.0, expected at least 0 and less than 1"),
        ({"kind": OptimizerKind.SGD, "nesterov": True}, "nesterov looks ahead by the momentum, and momentum is 0"),
        ({"kind": OptimizerKind.LARS, "momentum": 0.9, "nesterov": True}, "lars is defined without nesterov; take sgd"),
        ({"kind": OptimizerKind.ADAFACTOR, "beta2_decay": 0.8}, "beta2_decay is 0.8, expected 0 or less"),
    ],
)
def test_options_that_contradict_each_other_are_refused(changes: dict[str, float], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        dataclasses.replace(OptimizerSpec(), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "model",
    [make_model(), make_model(tied_embeddings=True), make_model(family=Family.LLAMA, num_kv_heads=2)],
    ids=["gpt", "tied", "llama"],
)
def test_theory_knows_the_reference_s_shapes(model: ModelSpec) -> None:
    assert parameter_shapes(model, uniform_stages(model, 1)[0]) == model_module.parameter_shapes(model)


# One step of each rule by numpy alone, from zero states: parameter, gradient, learning rate, moments and steps so far.

Moments = dict[str, NDArray[np.float64]]


def sgd(spec: OptimizerSpec, p: NDArray[np.float64], g: NDArray[np.float64], m: Moments, t: int) -> None:
    g = g + spec.weight_decay * p
    m["momentum"] = spec.momentum * m.get("momentum", np.zeros_like(p)) + g
    p -= spec.learning_rate * (g + spec.momentum * m["momentum"] if spec.nesterov else m["momentum"])


def adafactor(spec: OptimizerSpec, p: NDArray[np.float64], g: NDArray[np.float64], m: Moments, t: int) -> None:
    fresh, square = t**spec.beta2_decay, g * g
    if p.ndim > 1:
        for name, axis in (("row", -1), ("column", -2)):
            mean = square.mean(axis=axis, keepdims=True)
            m[name] = (1 - fresh) * m.get(name, np.zeros_like(mean)) + fresh * mean
        second = m["row"] * m["column"] / m["row"].mean()
    else:
        second = m["second"] = (1 - fresh) * m.get("second", np.zeros_like(p)) + fresh * square
    rate = max(1e-3, float(np.sqrt(np.mean(p * p)))) * min(spec.learning_rate, t**-0.5)
    update = g / np.sqrt(second)
    p *= 1 - spec.learning_rate * spec.weight_decay
    p -= rate * update / max(1.0, float(np.sqrt(np.mean(update * update))))


def muon(spec: OptimizerSpec, p: NDArray[np.float64], g: NDArray[np.float64], m: Moments, t: int) -> None:
    """With the singular values taken apart, in place of products of whole matrices."""
    m["momentum"] = spec.momentum * m.get("momentum", np.zeros_like(p)) + (1 - spec.momentum) * g
    ahead = spec.momentum * m["momentum"] + (1 - spec.momentum) * g if spec.nesterov else m["momentum"]
    u, s, v = np.linalg.svd(ahead / np.linalg.norm(ahead), full_matrices=False)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    p *= 1 - spec.learning_rate * spec.weight_decay
    p -= spec.learning_rate * 0.2 * max(p.shape) ** 0.5 * (u * s) @ v


def lars(spec: OptimizerSpec, p: NDArray[np.float64], g: NDArray[np.float64], m: Moments, t: int) -> None:
    norm, decay = np.sqrt(np.sum(p * p)), spec.weight_decay
    rate = spec.learning_rate * 0.001 * norm / (np.sqrt(np.sum(g * g)) + decay * norm)
    m["momentum"] = spec.momentum * m.get("momentum", np.zeros_like(p)) + rate * (g + decay * p)
    p -= m["momentum"]


def lamb(spec: OptimizerSpec, p: NDArray[np.float64], g: NDArray[np.float64], m: Moments, t: int) -> None:
    for name, beta, new in zip(("first", "second"), spec.betas, (g, g * g), strict=True):
        m[name] = beta * m.get(name, np.zeros_like(p)) + (1 - beta) * new
    first, second = (m[name] / (1 - beta**t) for name, beta in zip(("first", "second"), spec.betas, strict=True))
    update = first / (np.sqrt(second) + spec.eps) + spec.weight_decay * p
    p -= spec.learning_rate * np.sqrt(np.sum(p * p) / np.sum(update * update)) * update


RULES = {"momentum": sgd, "nesterov": sgd, "adafactor": adafactor, "muon": muon, "lars": lars, "lamb": lamb}


@pytest.mark.parametrize("kind", ["lars", "lamb"])
def test_a_tensor_that_is_zero_or_has_no_gradient_has_the_rate_of_all(kind: str) -> None:
    """For there is no ratio of norms: a bias that begins at zero must be able to leave it."""
    spec = dataclasses.replace(workload(f"gpt-mini-{kind}").optimizer, clip_norm=None, weight_decay=0.0)
    found = ExactOptimizer(spec).step({"a.bias": np.zeros(3)}, {"a.bias": np.array([1.0, -2.0, 0.5])})["a.bias"]
    right = np.array([1.0, -2.0, 0.5]) if kind == "lars" else np.array([1.0, -1.0, 1.0])
    np.testing.assert_allclose(found, -spec.learning_rate * right, rtol=1e-6)
    still = ExactOptimizer(spec).step({"a.weight": np.ones(3)}, {"a.weight": np.zeros(3)})["a.weight"]
    assert still.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(("kind", "name"), [*itertools.product(RULES, [MATRIX]), ("adafactor", VECTOR)])
def test_the_exact_step_is_the_rule_s(kind: str, name: str) -> None:
    spec = dataclasses.replace(workload(f"gpt-mini-{kind}").optimizer, clip_norm=None)
    draw = np.random.default_rng(3)
    shape = (6, 4) if name == MATRIX else (6,)
    own, moments, exact = draw.normal(size=shape), Moments(), ExactOptimizer(spec)
    for step in range(1, 5):
        gradient = draw.normal(size=shape)
        found = exact.step({name: own}, {name: gradient})[name]
        RULES[kind](spec, own, gradient, moments, step)
        np.testing.assert_allclose(found, own, rtol=1e-12, atol=1e-14)


def test_pytorch_s_muon_is_the_exact_one_but_for_bf16() -> None:
    spec = dataclasses.replace(workload("gpt-mini-muon").optimizer, weight_decay=0.0)
    start, gradient = (
        torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in (1, 2)
    )
    ends = []
    for builder in (reference_optimizer(spec).build, reference_optimizer(spec).build_exact):
        parameter = nn.Parameter(start.clone())
        parameter.grad = gradient.clone()
        builder([(MATRIX, parameter)]).step()
        ends.append(parameter.detach() - start)
    away = float((ends[0] - ends[1]).norm() / ends[1].norm())
    assert 1e-5 < away < 0.03, "bf16 has 8 bits, and five iterations add up"


def test_newton_schulz_brings_singular_values_near_one() -> None:
    matrix = torch.randn(5, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    values = torch.linalg.svdvals(newton_schulz(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7))
    assert 0.6 < float(values.min()) and float(values.max()) < 1.3


def test_several_optimizers_as_one_go_on_from_a_checkpoint() -> None:
    spec = workload("gpt-mini-muon").optimizer

    def start() -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
        parameters = [nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4))]
        return reference_optimizer(spec).build(zip((MATRIX, VECTOR), parameters, strict=True)), parameters

    def step(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], seed: int) -> None:
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        optimizer.step()

    (never, own), (stopped, kept) = start(), start()
    for each in ((never, own), (stopped, kept)):
        step(*each, seed=0)
    resumed, loaded = start()
    resumed.load_state_dict(stopped.state_dict())
    with torch.no_grad():
        for into, value in zip(loaded, kept, strict=True):
            into.copy_(value)
    for each in ((never, own), (resumed, loaded)):
        step(*each, seed=1)
    assert all(a.equal(b) for a, b in zip(own, loaded, strict=True))
    assert len(resumed.state) == 2, "both parts write into the state of the whole"


@pytest.mark.parametrize("name", ["momentum", "adafactor", "muon", "lars", "lamb"])
def test_planned_states_follow_from_the_optimizer(name: str) -> None:
    spec, model = workload(f"gpt-mini-{name}").optimizer, make_model()
    case = make_case(workload=make_workload(optimizer=spec), layout=Layout(pp=2, num_micro_batches=2))
    of_stages = [model_states(case, rank).optimizer_states for rank in range(2)]
    shapes = model_module.parameter_shapes(model).items()
    assert sum(of_stages) == sum(s.num_bytes for n, shape in shapes for s in spec.states(n, shape, Dtype.FP32))
    exact = dataclasses.replace(case, precision=Precision.FP64, layout=Layout())
    assert model_states(exact, 0).optimizer_states == sum(
        s.num_bytes for n, shape in shapes for s in spec.states(n, shape, Dtype.FP64)
    )
    assert model_states(exact, 0).peak is None, "temporaries of these updates are not planned"


def test_adapters_that_part_matrices_refuse_matrix_wise_optimizers_with_a_reason() -> None:
    running = set()
    for name, path in ADAPTERS.items():
        adapter = load_adapter(path)
        for kind in ("adafactor", "muon", "lars", "lamb"):
            case = Case(adapter=name, workload=under(name, workload(f"gpt-mini-{kind}")), layout=Layout())
            refusal = adapter.capabilities.refusal(case, "cpu", "gloo") or ""
            assert "whole matrices (" in refusal or not refusal.count("matrices")
            running |= set() if "whole matrices" in refusal else {name}
    assert running == {"single", "ddp", "gpipe", "pipeline", "accelerate", "post-local-sgd"}


@pytest.fixture(scope="module")
def runner(launcher: ForkserverLauncher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    known = {name: target(name) for name in MUTANTS} | {name: ADAPTERS[name] for name in ("single", "ddp", "fsdp2")}
    running = Runner(launcher, known, RunOptions(observed_steps=3), tmp_path_factory.mktemp("results"))
    yield running
    running.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adapter", "kind"),
    [("ddp", "nesterov"), ("ddp", "adafactor"), ("ddp", "muon"), ("fsdp2", "momentum")],
)
def test_a_real_run_passes_with_its_states_planned_to_the_byte(runner: Runner, adapter: str, kind: str) -> None:
    record = runner.observe(Case(adapter=adapter, workload=workload(f"gpt-mini-{kind}"), layout=LAYOUTS[adapter]))
    assert [v.suite for v in record.verdicts if v.passed] == ["equivalence", "memory", "communication"]
    measured = [reading.states.optimizer_states for reading in record.memory.readings]
    assert measured == [planned.optimizer_states for planned in record.memory.planned]
    assert min(measured) > 0


@pytest.mark.parametrize(
    "name", [name if name == "ddp_OtherBeta2Decay" else pytest.param(name, marks=pytest.mark.slow) for name in MUTANTS]
)
def test_a_wrong_update_is_caught_and_explained(runner: Runner, name: str) -> None:
    record = runner.observe(BY_NAME[name].case)
    verdict = record.verdict("equivalence")
    assert verdict is not None and not verdict.passed, record.outcome.message
    assert record.equivalence.diagnosis is not None and record.equivalence.diagnosis.fault in BY_NAME[name].faults
    assert MUTANTS[name] in record.equivalence.diagnosis.text
