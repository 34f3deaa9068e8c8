"""A mixture of experts: what it computes, what is planned of it, and how the truth follows where experts tie."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from meshmark.adapter.registry import load_adapter
from meshmark.adapters import ADAPTERS
from meshmark.algorithms.contract import Tensors
from meshmark.errors import InputError
from meshmark.judge.faults import Fault
from meshmark.judge.truth import NEAR, exact_gradients, followed, initial_values
from meshmark.launch.launch import ForkserverLauncher
from meshmark.models.mixture import MIXTURE_MINI
from meshmark.models.mixture.module import Mixture
from meshmark.models.module import build_model, parameter_shapes, skeleton
from meshmark.reference.data import make_batch
from meshmark.run.runner import Runner, RunOptions
from meshmark.serial import decode, encode
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.precision import Precision
from meshmark.spec.workload import Workload
from meshmark.theory.model_theory import local_parameters, theory_of
from tests.broken.mutant import MIXTURE
from tests.broken.mutants import BY_NAME, target

GATE = "blocks.0.feed_forward.gate.weight"
MUTANT = "ddp_GateLearnsNothing"


def drawn_mixture() -> tuple[Mixture, Tensor]:
    """And some tokens."""
    mixture = Mixture(MIXTURE_MINI).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    return mixture, torch.randn(2, 9, MIXTURE_MINI.hidden, dtype=torch.float64, generator=generator)


def test_a_token_s_two_best_experts_are_weighed_by_the_softmax_of_their_scores() -> None:
    mixture, x_BTC = drawn_mixture()
    found = mixture(x_BTC)
    for row, token in np.ndindex(2, 9):
        x_C = x_BTC[row, token]
        scores = mixture.gate(x_C)
        first, second = scores.argsort(descending=True)[:2].tolist()
        share = torch.sigmoid(scores[first] - scores[second])
        one, other = (mixture.experts[i](x_C) for i in (first, second))
        torch.testing.assert_close(found[row, token], share * one + (1 - share) * other)


def test_an_expert_without_tokens_has_a_gradient_of_zero() -> None:
    mixture, x_BTC = drawn_mixture()
    mixture.router = lambda scores_NE: torch.tensor([[0, 1]]).expand(len(scores_NE), 2)
    mixture(x_BTC).sum().backward()
    gradients = [[p.grad for p in expert.parameters()] for expert in mixture.experts]
    assert all(g is not None and bool(g.any()) for own in gradients[:2] for g in own)
    assert all(g is not None and not bool(g.any()) for own in gradients[2:] for g in own)


def test_what_is_planned_of_it_is_what_it_has() -> None:
    shapes = parameter_shapes(MIXTURE_MINI)
    assert len(shapes) == MIXTURE_MINI.num_tensors
    assert sum(map(np.prod, shapes.values())) == MIXTURE_MINI.num_parameters
    idle = [name for name in shapes if ".experts.2." in name or ".experts.3." in name]
    assert MIXTURE_MINI.active_parameters == MIXTURE_MINI.num_parameters - sum(np.prod(shapes[n]) for n in idle)
    for stage in range(2):
        held = build_model(MIXTURE_MINI, [0, 1] if stage == 0 else [2, 3])
        layout = Layout(pp=2)
        assert local_parameters(MIXTURE_MINI, layout, stage) == sum(p.numel() for p in held.parameters())
        assert theory_of(MIXTURE_MINI).num_tensors(layout, stage) == len(list(held.parameters()))


def test_flops_are_those_of_the_experts_that_are_met() -> None:
    model = build_model(MIXTURE_MINI)
    model.initialize(0)
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:
        model(make_batch(MIXTURE, 0).inputs)
    assert counter.get_total_flops() == MIXTURE.tokens_per_step * MIXTURE_MINI.forward_flops


def test_it_comes_back_from_json_and_contradictions_are_refused() -> None:
    assert decode(Workload, encode(MIXTURE)) == MIXTURE
    with pytest.raises(InputError, match="4 experts a token of 4, expected at least one, and fewer"):
        dataclasses.replace(MIXTURE_MINI, experts_per_token=4)
    with pytest.raises(InputError, match="hidden 32 is not divisible by num_heads 5"):
        dataclasses.replace(MIXTURE_MINI, num_heads=5)


def test_who_trains_it_says_so_and_in_bf16_nobody_does() -> None:
    cases = {name: Case(adapter=name, workload=MIXTURE, layout=Layout()) for name in ADAPTERS}
    adapters = {name: load_adapter(path).capabilities for name, path in ADAPTERS.items()}
    for name, case in cases.items():
        narrow = dataclasses.replace(case, precision=Precision.BF16)
        assert "experts in bf16 (whose rounding" in (adapters[name].refusal(narrow, "cpu", "gloo") or "")
    assert "model family mixture (" in (adapters["megatron"].refusal(cases["megatron"], "cpu", "gloo") or "")
    assert adapters["ddp"].refusal(cases["ddp"], "cpu", "gloo") is None


def elsewhere(values: Tensors, token: int) -> Tensors:
    """Gradients when the first layer sends `token` to its third expert in the place of its second."""
    (mixture,) = [m for name, m in skeleton(MIXTURE_MINI).named_modules() if name == GATE.removesuffix(".gate.weight")]
    assert isinstance(mixture, Mixture)

    def choose(scores_NE: Tensor) -> Tensor:
        best = scores_NE.topk(3, dim=-1).indices
        chosen = best[:, :2].clone()
        chosen[token, 1] = best[token, 2]
        return chosen

    mixture.router = choose
    try:
        return exact_gradients(MIXTURE, values, make_batch(MIXTURE, 0)).gradients
    finally:
        mixture.router = None


def scores_of_first_layer(values: Tensors) -> tuple[Tensor, Tensor]:
    """Return the gate's input, and its scores."""
    model, seen = build_model(MIXTURE_MINI).double(), list[Tensor]()
    model.load_state_dict({name: torch.from_numpy(np.asarray(value)) for name, value in values.items()})
    model.get_submodule(GATE.removesuffix(".weight")).register_forward_hook(lambda m, i, o: seen.extend([i[0], o]))
    model(make_batch(MIXTURE, 0).inputs)
    return seen[0].detach(), seen[1].detach()


def nearly_tied(gap: float) -> tuple[Tensors, int]:
    """Values at which one token's second and third score are `gap` of the largest apart, and that token."""
    values = {name: value.astype(np.float64) for name, value in initial_values(MIXTURE).items()}
    x_NC, scores_NE = scores_of_first_layer(values)
    best = scores_NE.topk(3, dim=-1)
    token = int((best.values[:, 1] - best.values[:, 2]).argmin())
    wanted = best.values[token, 1] - best.values[token, 2] - gap * scores_NE.abs().max()
    x_C = x_NC[token]
    values[GATE][int(best.indices[token, 2])] += (wanted * x_C / x_C.square().sum()).numpy()
    return values, token


def followed_from(values: Tensors, own: Tensors) -> Tensors:
    batch = make_batch(MIXTURE, 0)
    return followed(MIXTURE, own, lambda: exact_gradients(MIXTURE, values, batch).gradients, lambda found: found)


def apart(one: Tensors, other: Tensors) -> float:
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


@pytest.mark.parametrize("gap, follows", [(NEAR / 4, True), (NEAR * 4, False)])
def test_the_truth_goes_where_the_run_went_if_experts_tie(gap: float, follows: bool) -> None:
    values, token = nearly_tied(gap)
    here, there = exact_gradients(MIXTURE, values, make_batch(MIXTURE, 0)).gradients, elsewhere(values, token)
    assert apart(here, there) > 1e-5
    assert apart(followed_from(values, here), here) == 0
    assert apart(followed_from(values, there), there if follows else here) == 0


@pytest.fixture(scope="module")
def runner(launcher: ForkserverLauncher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    known = {MUTANT: target(MUTANT), "ddp": "meshmark.adapters.ddp:DDP"}
    running = Runner(launcher, known, RunOptions(observed_steps=3), tmp_path_factory.mktemp("results"))
    yield running
    running.close()


@pytest.mark.slow
def test_ddp_trains_it_correctly_and_a_gate_that_learns_nothing_is_named(runner: Runner) -> None:
    record = runner.observe(dataclasses.replace(BY_NAME[MUTANT].case, adapter="ddp"))
    judged = {v.suite: v.passed for v in record.verdicts}
    assert judged == {"equivalence": True, "memory": True, "communication": True}, record.outcome.message
    diagnosis = runner.observe(BY_NAME[MUTANT].case).equivalence.diagnosis
    assert diagnosis is not None and diagnosis.fault is Fault.MISSING and GATE in diagnosis.names
