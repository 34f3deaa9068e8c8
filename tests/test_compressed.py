"""Algorithms that send less than gradients: compressors' invariants, engines for real in float64, and what breaks
them."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshmark.adapter.registry import load_adapter
from meshmark.adapters import ROSTER
from meshmark.adapters.compressed.codecs import check
from meshmark.algorithms.compressed import EF21, Compressed, Compressing, ErrorFeedback, MajorityVote
from meshmark.algorithms.compressed.compressor import Compressor, CompressorKind
from meshmark.algorithms.compressed.compressors import Draw, compressed
from meshmark.algorithms.compressed.transition import (
    EF21Transition,
    ErrorFeedbackTransition,
    MajorityVoteTransition,
    PowerSGDTransition,
)
from meshmark.algorithms.contract import Tensors
from meshmark.errors import InputError
from meshmark.judge.deviation import QuantityKind
from meshmark.judge.trace import Trace, gather_replicas
from meshmark.judge.truth import ExactOptimizer, assess_replicas
from meshmark.spec.algorithm import algorithm_named, algorithm_presets
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.optimizer import OptimizerKind, OptimizerSpec
from meshmark.spec.precision import Precision
from meshmark.spec.workload import Workload, workload
from meshmark.theory.traffic import step_traffic
from tests.factories import make_workload
from tests.test_gather import on_ranks
from tests.trained import Trial, furthest, train_all

PLAIN = OptimizerSpec(kind=OptimizerKind.SGD, learning_rate=0.1, weight_decay=0.0, clip_norm=None)
OURS = [CompressorKind.TOP_K, CompressorKind.RANDOM_K, CompressorKind.SIGN, CompressorKind.QSGD]
HOOKS = {CompressorKind.FP16, CompressorKind.BF16, CompressorKind.POWER_SGD}


def draw(step: int, replica: int = 0) -> Draw:
    return Draw(seed=0, step=step, replica=replica, name="a.weight")


def gradient(seed: int, size: int = 1000) -> Any:  # noqa: ANN401
    return np.random.default_rng(seed).standard_t(3, size=size)


def exact(algorithm: str, count: int = 3) -> Any:  # noqa: ANN401
    problem = make_workload(optimizer=PLAIN, algorithm=algorithm_named(algorithm))
    return problem.algorithm.transition(problem, [ExactOptimizer(PLAIN) for _ in range(count)])


# What is asked


@pytest.mark.parametrize(
    "wrong, reason",
    [
        ({"percent": 101}, "top-k of 101 percent of a tensor; expected 1 to 100, for k is at least one element and no"),
        ({"percent": 0}, "top-k of 0 percent"),
        ({"levels": 128}, "128 levels, expected 1 to 127: they travel as bytes"),
        ({"rank": 0}, "rank is 0, expected at least 1"),
    ],
)
def test_a_compressor_that_means_nothing_is_an_error(wrong: dict[str, int], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        Compressor(**{"kind": CompressorKind.TOP_K, **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong, reason",
    [
        ({"cls": Compressed}, "compressor none for compressed, which takes one of bf16, fp16, qsgd"),
        (
            {"cls": EF21, "compressor": "fp16"},
            "compressor fp16 for ef21, which takes one of sign, top-k",
        ),
        ({"cls": MajorityVote, "compressor": "sign"}, "compressor sign for majority-vote, which takes"),
        (
            {"cls": ErrorFeedback, "compressor": "power-sgd", "warmup_steps": 1},
            "warmup_steps is 1, expected at least 2 with power-sgd: PyTorch's hook remembers by bucket",
        ),
        (
            {"cls": ErrorFeedback, "compressor": "top-k", "warmup_steps": 1},
            "warmup_steps 1 means nothing in error-feedback training with top-k",
        ),
    ],
)
def test_an_algorithm_with_a_compressor_that_is_not_its_own_is_an_error(wrong: dict[str, Any], reason: str) -> None:
    wrong = dict(wrong)
    if "compressor" in wrong:
        wrong |= {"compressor": Compressor(kind=CompressorKind(wrong["compressor"]))}
    with pytest.raises(InputError, match=reason):
        wrong.pop("cls")(**wrong)


@pytest.mark.parametrize(
    "tensor, reason",
    [
        (torch.zeros(0), "'a.weight' is empty, so it cannot be compressed"),
        (torch.zeros(3, dtype=torch.int64), "'a.weight' holds torch.int64; gradients are compressed as floating-point"),
    ],
)
def test_what_has_nothing_to_compress_is_an_error(tensor: torch.Tensor, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        check("a.weight", tensor)


def test_each_adapter_says_which_compressors_it_has() -> None:
    def reason(adapter: str, algorithm: str) -> str | None:
        case = Case(adapter=adapter, workload=workload(f"gpt-mini-{algorithm}"), layout=Layout(dp=2))
        return load_adapter(ROSTER[adapter]).supports(case, "cpu", "gloo")

    ours = reason("compressed", "compressed-fp16") or ""
    assert "compressor fp16 (it has qsgd, random-k, sign, top-k alone)" in ours
    hooks = reason("ddp-compressed", "compressed-qsgd64") or ""
    assert "compressor qsgd (it has bf16, fp16, power-sgd alone)" in hooks
    assert reason("compressed", "compressed-qsgd64") is None and reason("ddp-compressed", "compressed-fp16") is None


# Compressors


@pytest.mark.parametrize("kind", [CompressorKind.TOP_K, CompressorKind.SIGN])
def test_what_feeds_back_is_a_contraction(kind: CompressorKind) -> None:
    """|x - C(x)|^2 <= (1 - d) |x|^2, with d = k / n for top-k, and |x|_1^2 / (n |x|_2^2) for scaled signs, exactly."""
    for seed in range(20):
        x = gradient(seed)
        left = np.sum((x - compressed(Compressor(kind=kind), x, draw(seed))) ** 2) / np.sum(x**2)
        share = 0.1 if kind is CompressorKind.TOP_K else np.abs(x).sum() ** 2 / (len(x) * np.sum(x**2))
        assert left <= 1 - share + 1e-7
        assert kind is CompressorKind.TOP_K or left == pytest.approx(1 - share, rel=1e-6)


def test_qsgd_is_unbiased_with_the_variance_that_the_paper_bounds() -> None:
    """E C(x) = x, and E |C(x) - x|^2 <= min(n / s^2, sqrt(n) / s) |x|^2 (arXiv:1610.02132, lemma 3.1)."""
    x, compressor = gradient(1, 200), Compressor(kind=CompressorKind.QSGD, levels=4)
    found = np.array([compressed(compressor, x, draw(step)) for step in range(4000)])
    places = np.abs(x) / np.linalg.norm(x) * 4
    variance = (places % 1) * (1 - places % 1)  # of rounding up with the probability of the fraction
    often = len(found) * variance > 20
    error = np.linalg.norm(x) / 4 * np.sqrt(variance / len(found))
    assert often.sum() > 150 and np.abs((found.mean(axis=0) - x) / error)[often].max() < 5
    spread = np.mean(np.sum((found - x) ** 2, axis=1)) / np.sum(x**2)
    assert spread <= min(200 / 16, math.sqrt(200) / 4)
    right = np.sum(variance) / 16
    assert spread == pytest.approx(right, rel=0.02)


def test_random_k_takes_every_element_as_often() -> None:
    times = sum(compressed(Compressor(kind=CompressorKind.RANDOM_K), np.ones(100), draw(step)) for step in range(3000))
    assert np.all(np.abs(times - 300) < 5 * math.sqrt(3000 * 0.1 * 0.9))
    own, other = (compressed(Compressor(kind=CompressorKind.RANDOM_K), np.ones(100), draw(7, r)) for r in range(2))
    assert np.array_equal(own, other), "all replicas draw the same"


def test_of_equal_magnitudes_the_first_is_sent() -> None:
    x = np.array([1.0, -3.0, 3.0, 3.0, 0.5])
    found = compressed(Compressor(kind=CompressorKind.TOP_K, percent=40), x, draw(0))
    assert found.tolist() == [0.0, -3.0, 3.0, 0.0, 0.0]
    assert compressed(Compressor(kind=CompressorKind.TOP_K, percent=1), x, draw(0)).tolist() == [0, -3, 0, 0, 0]


# Transitions


def replicas(step: int, count: int = 3) -> list[Tensors]:
    return [{"a.weight": gradient(10 * step + r, 60).reshape(6, 10)} for r in range(count)]


@pytest.mark.parametrize("name", ["top-k10", "random-k10", "sign", "power-sgd1w2"])
def test_what_is_sent_and_what_is_left_add_up_to_what_was_to_be_sent(name: str) -> None:
    """So over a run: all that was stepped on, and what is left, are all gradients."""
    algorithm = exact(f"error-feedback-{name}")
    assert isinstance(algorithm, ErrorFeedbackTransition)
    stepped, wanted = np.zeros((6, 10)), np.zeros((6, 10))
    for step in range(6):
        gradients = replicas(step)
        algorithm.transition(replicas(99), gradients)
        stepped += algorithm.taken[0]["a.weight"]
        wanted += np.mean([g["a.weight"] for g in gradients], axis=0)
        left = np.mean([e["a.weight"] for e in algorithm.left or [{"a.weight": np.zeros((6, 10))}]], axis=0)
        np.testing.assert_allclose(stepped + left, wanted, atol=1e-12)
    assert np.abs(left).max() > 0.1


def test_power_sgd_finds_a_matrix_of_its_rank() -> None:
    """From the second step that compresses at the latest; the first projects on a drawn direction."""
    algorithm = exact("error-feedback-power-sgd1w2")
    assert isinstance(algorithm, PowerSGDTransition)
    one = np.outer(np.arange(1.0, 11), np.linspace(-1, 1, 12))
    own: list[Tensors] = [{"a.weight": (r + 1) * one} for r in range(3)]
    for _ in range(5):
        algorithm.transition(own, own)
        np.testing.assert_allclose(algorithm.taken[0]["a.weight"], 2 * one, atol=1e-10)


def test_ef21_comes_to_know_a_gradient_that_stays() -> None:
    """Each step leaves at most 1 - k/n of what was not known (arXiv:2106.05203, lemma 1)."""
    algorithm, own = exact("ef21-top-k10"), replicas(0)
    assert isinstance(algorithm, EF21Transition)
    before = math.inf
    for _ in range(10):
        algorithm.transition(own, own)
        off = max(np.sum((h["a.weight"] - g["a.weight"]) ** 2) for h, g in zip(algorithm.known or [], own, strict=True))
        assert off <= 0.9 * before
        before = off
    assert before == 0, "ten times a tenth of the elements is all"


def test_most_signs_win_and_as_many_as_against_are_none() -> None:
    algorithm = exact("majority-vote", 4)
    assert isinstance(algorithm, MajorityVoteTransition)
    own: list[Tensors] = [{"a": np.array(x)} for x in ([1.0, 1, -9], [0.1, -1, 1], [-5.0, 2, -1], [0.0, -2, -1])]
    algorithm.transition(own, own)
    assert algorithm.taken[0]["a"].tolist() == [1, 0, -1], "the sign of zero is plus"


# Bytes


def test_bytes_are_those_of_what_is_sent() -> None:
    """By hand: gpt-mini's every tensor, over four replicas."""
    problem, layout = workload("gpt-mini"), Layout(dp=4)
    count = problem.model.num_parameters

    def sent(algorithm: str) -> tuple[str, int]:
        case = Case(adapter="a", workload=workload(f"gpt-mini-{algorithm}"), layout=layout)
        (flow,) = [f for f in step_traffic(case, 0) or [] if f.purpose == "gradients"]
        return flow.kind, flow.num_bytes

    assert sent("compressed-fp16") == ("all_reduce", 2 * count)
    kind, votes = sent("majority-vote")
    assert kind == "all_gather" and 4 * count / 8 <= votes < 4 * count / 8 * 1.02
    kind, signs = sent("error-feedback-sign")
    tensors = (signs - votes) / 4 / 4
    assert kind == "all_gather" and tensors == int(tensors) > 20
    assert sent("compressed-qsgd64") == ("all_gather", 4 * (count + 4 * int(tensors)))
    kind, sparse = sent("error-feedback-top-k10")
    assert kind == "all_gather" and 0.98 * 0.8 * 4 * count < sparse <= 0.8 * 4 * count
    kind, summed = sent("error-feedback-random-k10")
    assert kind == "all_reduce" and 8 * summed == sparse


# For real


def test_replicas_that_are_to_stand_together_must_to_the_last_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def gathered(rank: int) -> list[list[str]]:
        own = Trace(parameters=[{"a": np.array([1.0]), "b": np.array([1.0 + 1e-15 * (rank == 1)])}])
        own.gradients = [{"a": np.array([float(rank)])}]
        own.losses = [0.0]
        return [[str(d.quantity) for d in gather_replicas(own, [0, 1, 2], t)[1]] for t in (False, True)]

    assert on_ranks(tmp_path, gathered)[0] == [[], ["parameters/b"]]


def trial(problem: Workload) -> Trial:
    name = "ddp-compressed" if problem.algorithm.compressor_kind in HOOKS else "compressed"
    case = Case(adapter=name, workload=problem, layout=Layout(dp=2, num_micro_batches=2), precision=Precision.FP64)
    # Until replicas have met after two steps of their own, and one more.
    steps = 6 if problem.algorithm.steps_per_meeting > 1 else 4
    return Trial(case=case, steps=steps)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated")
def test_engines_do_what_is_specified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, where the truth is as good as exact, but for what is summed in fp16 or bf16."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    optimizer = dataclasses.replace(PLAIN, clip_norm=0.5)
    adam = OptimizerSpec(clip_norm=None, eps=1e-4)
    lamb = OptimizerSpec(kind=OptimizerKind.LAMB, learning_rate=0.01, weight_decay=0.01, clip_norm=None, eps=1e-4)
    optimizers = [optimizer, adam, dataclasses.replace(adam, weight_decay=0.0), lamb]
    problems = {
        name: make_workload(optimizer=next(o for o in optimizers if not spec.refusal(o)), algorithm=spec)
        for name, spec in algorithm_presets().items()
        if isinstance(spec, Compressing)
    }
    honest = [trial(problem) for problem in problems.values()]
    found = train_all(honest, tmp_path)
    for each, traces in zip(honest, found, strict=True):
        assert moved(traces) != each.case.workload.algorithm.replicas_agree, each.case.id
        deviations = assess_replicas(traces, each.case.workload)
        summed = each.case.workload.algorithm.compressor_kind in ("fp16", "bf16")
        assert furthest(deviations) < (1e-3 if summed else 1e-14), each.case.id
        clips = each.case.workload.optimizer.clip_norm is not None
        assert (QuantityKind.NORM in {q.kind for q in deviations}) == clips, "of what all step on"


def moved(traces: list[Trace]) -> bool:
    first, *others = (trace.parameters[-1] for trace in traces)
    return any(not np.array_equal(x, other[name]) for other in others for name, x in first.items())
