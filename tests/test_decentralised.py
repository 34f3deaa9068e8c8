"""Algorithms along graphs: their matrices, their invariants, engines for real in float64, and what breaks them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshmark.adapter.registry import load_adapter
from meshmark.adapters import ROSTER
from meshmark.algorithms import decentralised
from meshmark.algorithms.contract import Tensors, Transition
from meshmark.algorithms.decentralised import DPSGD, DSGD, ExactDiffusion, GradientTracking, QuasiGlobal
from meshmark.algorithms.decentralised.graph import Graph, GraphKind, lazy
from meshmark.algorithms.decentralised.transition import GradientTrackingTransition
from meshmark.algorithms.local_sgd import LocalSGD
from meshmark.errors import InputError, UnknownNameError
from meshmark.judge.truth import assess_replicas, local_rules
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.optimizer import OptimizerKind, OptimizerSpec
from meshmark.spec.precision import Precision
from meshmark.spec.workload import Workload, workload
from meshmark.theory.traffic import step_traffic
from tests.factories import make_workload
from tests.trained import Trial, furthest, train_all

PLAIN = OptimizerSpec(kind=OptimizerKind.SGD, learning_rate=0.1, weight_decay=0.0, clip_norm=None)
STATIC = [kind for kind in GraphKind if kind not in (GraphKind.OWN, GraphKind.ONE_PEER, GraphKind.MATCHING)]
PATH = ((0.75, 0.25, 0.0), (0.25, 0.5, 0.25), (0.0, 0.25, 0.75))


ALGORITHMS = {cls.kind: cls for cls in decentralised.ALGORITHMS}


def under(kind: str, graph: Graph) -> Workload:
    algorithm = ALGORITHMS[kind](graph=graph)
    optimizers = [OptimizerSpec(clip_norm=0.5), PLAIN, dataclasses.replace(PLAIN, momentum=0.9)]
    optimizer = next(each for each in optimizers if not algorithm.refusal(each))
    return make_workload(optimizer=optimizer, algorithm=algorithm)


def exact(problem: Workload, count: int) -> Transition:
    return problem.algorithm.transition(problem, local_rules(problem, count))


# Graphs


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 8, 12])
@pytest.mark.parametrize("kind", [kind for kind in GraphKind if kind is not GraphKind.OWN])
def test_every_matrix_is_doubly_stochastic_and_the_mean_of_all_is_reached(kind: GraphKind, count: int) -> None:
    graph, product = Graph(kind=kind), np.eye(count)
    for step in range(200):
        rows = np.array(graph.matrix(count, step))
        assert rows.min() >= 0
        np.testing.assert_allclose([rows.sum(0), rows.sum(1)], 1.0, rtol=1e-12)
        if kind in (GraphKind.RING, GraphKind.GRID, GraphKind.MATCHING):
            assert np.array_equal(rows, rows.T)
        product = rows @ product
    np.testing.assert_allclose(product, 1 / count, rtol=1e-2)


def test_spectra_are_those_that_the_papers_tell() -> None:
    """Ring: 1 - 2 (1 - cos(2 pi / n)) / 3. Exponential, of a power of two: 1 - 2 / (1 + log2 n) (arXiv:2110.13363).
    One-peer: exact averaging after log2 n steps (the same)."""

    def second(graph: GraphKind, count: int) -> float:
        return float(sorted(abs(np.linalg.eigvals(np.array(Graph(kind=graph).matrix(count, 0)))))[-2])

    for count in (4, 8, 16):
        assert second(GraphKind.RING, count) == pytest.approx(1 - 2 * (1 - np.cos(2 * np.pi / count)) / 3)
        assert second(GraphKind.EXPONENTIAL, count) == pytest.approx(1 - 2 / (1 + np.log2(count)))
        one_peer = [np.array(Graph(kind=GraphKind.ONE_PEER).matrix(count, k)) for k in range(int(np.log2(count)))]
        np.testing.assert_allclose(np.linalg.multi_dot(one_peer), 1 / count, rtol=1e-12)


def test_a_matching_is_drawn_anew_and_the_same_everywhere() -> None:
    drawn, again = ([Graph(kind=GraphKind.MATCHING, seed=3).matrix(5, step) for step in range(8)] for _ in range(2))
    assert len(set(drawn)) > 3 and drawn == again
    assert all(sum(row[i] == 1 for i, row in enumerate(rows)) == 1 for rows in drawn), "one stays alone"


@pytest.mark.parametrize(
    "rows, reason",
    [
        (((1.0, 0.0), (0.0, 1.0)), "not connected: nothing of replica 0 ever reaches 1; add an edge"),
        (((0.5, 0.5), (0.25, 0.75)), "column 0 sums to 0.75, expected 1: rows, or a replica would"),
        (((0.5, 0.4), (0.5, 0.6)), "row 0 sums to 0.9, expected 1"),
        (((1.5, -0.5), (-0.5, 1.5)), "weight 1.5 at row 0, column 0; expected 0 to 1"),
        (((0.5, 0.5), (1.0,)), "row 1 has 1 weights, expected 2, one a row"),
        (((float("nan"), 1.0), (1.0, 0.0)), "weight nan at row 0, column 0"),
    ],
)
def test_a_matrix_that_would_not_average_is_an_error_with_its_place(rows: Any, reason: str) -> None:  # noqa: ANN401
    with pytest.raises(InputError, match=reason):
        Graph(kind=GraphKind.OWN, rows=rows)


def test_exact_diffusion_over_a_changing_graph_is_an_error() -> None:
    with pytest.raises(InputError, match="changes from step to step"):
        ExactDiffusion(graph=Graph(kind=GraphKind.MATCHING))


def test_optimizers_that_an_algorithm_is_not_defined_on_are_errors() -> None:
    with pytest.raises(InputError, match="gradient-tracking-ring is defined on plain SGD; take kind sgd without"):
        workload("gpt-mini-gradient-tracking-ring")
    with pytest.raises(InputError, match="dmsgd-ring keeps the momentum of SGD itself; take kind sgd with a momentum"):
        workload("gpt-mini-sgd-dmsgd-ring")
    with pytest.raises(UnknownNameError, match="unknown algorithm of workload 'gpt-mini' 'dsgd-rign': did you mean"):
        workload("gpt-mini-dsgd-rign")


def test_a_graph_of_another_size_is_a_skip_with_its_reason() -> None:
    problem = under(DSGD.kind, Graph(kind=GraphKind.OWN, rows=PATH))
    adapter = load_adapter(ROSTER["decentralised"])
    case = Case(adapter="decentralised", workload=problem, layout=Layout(dp=4))
    assert "a graph of 3 nodes over 4 replicas" in (adapter.supports(case, "cpu", "gloo") or "")
    whole = under(DSGD.kind, Graph(kind=GraphKind.OWN, rows=((0.25,) * 4,) * 4))
    assert adapter.supports(dataclasses.replace(case, workload=whole), "cpu", "gloo") is None


# Transitions


def states(count: int, seed: int) -> list[Tensors]:
    drawn = np.random.default_rng(seed).normal(size=(count, 3))
    return [{"a.weight": row} for row in drawn]


def mean(replicas: Sequence[Tensors]) -> Any:  # noqa: ANN401
    return np.mean([tensors["a.weight"] for tensors in replicas], axis=0)


@pytest.mark.parametrize("kind", sorted(ALGORITHMS))
def test_the_mean_of_replicas_steps_on_the_mean_gradient(kind: str) -> None:
    """Whatever the doubly stochastic graph: with the momentum of SGD, where there is one."""
    problem = under(kind, Graph(kind=GraphKind.EXPONENTIAL))
    if kind in (DSGD.kind, DPSGD.kind):
        problem = dataclasses.replace(problem, optimizer=PLAIN)
    algorithm, here, beta = exact(problem, 6), states(6, 0), problem.optimizer.momentum
    together, momentum = mean(here), np.zeros(3)
    for step in range(5):
        gradients = states(6, step + 1)
        here = algorithm.transition(here, gradients)
        taken = beta * momentum + mean(gradients)
        together = together - 0.1 * taken
        # The quasi-global one follows what was taken, and damps it: B (B m + g) + ... of arXiv:2102.04761.
        momentum = beta * momentum + (1 - beta) * taken if kind == QuasiGlobal.kind else taken
        np.testing.assert_allclose(mean(here), together, rtol=1e-12)


def test_what_is_tracked_is_the_mean_gradient() -> None:
    algorithm = exact(under(GradientTracking.kind, Graph(kind=GraphKind.RING)), 5)
    assert isinstance(algorithm, GradientTrackingTransition)
    for step in range(4):
        gradients = states(5, step)
        algorithm.transition(states(5, 9), gradients)
        np.testing.assert_allclose(mean(algorithm.tracked or []), mean(gradients), rtol=1e-12)


def test_two_that_are_the_same_where_all_average_at_once() -> None:
    """DSGD over the whole graph is local SGD of period one."""
    rows = ((0.25,) * 4,) * 4
    one = exact(under(DSGD.kind, Graph(kind=GraphKind.OWN, rows=rows)), 4)
    other = exact(make_workload(optimizer=OptimizerSpec(clip_norm=0.5), algorithm=LocalSGD(period=2)), 4)
    here = states(4, 0)
    found = one.transition(here, states(4, 1)), other.transition(here, states(4, 1))
    np.testing.assert_allclose(*([t["a.weight"] for t in each] for each in found), rtol=1e-12)


def test_in_float32_a_transition_stays_there() -> None:
    """So that the noise floor has the rounding of the mixing."""
    for kind in sorted(ALGORITHMS):
        narrow = [{n: x.astype(np.float32) for n, x in t.items()} for t in states(4, 0)]

        class Rule:
            def step(self, parameters: Tensors, gradients: Tensors) -> Tensors:
                return {n: x - np.float32(0.1) * gradients[n] for n, x in parameters.items()}

        problem = under(kind, Graph(kind=GraphKind.RING))
        algorithm = problem.algorithm.transition(problem, [Rule() for _ in range(4)])
        for _ in range(3):
            narrow = algorithm.transition(narrow, narrow)
        assert {x.dtype for t in narrow for x in t.values()} == {np.dtype("float32")}


def test_lazy_halves_what_is_heard() -> None:
    assert lazy(PATH)[1] == (0.125, 0.75, 0.125)


# Traffic


def test_what_a_replica_sends_follows_from_the_graph() -> None:
    """i hears from i - 1 and i - 2, and of one-peer graphs in the metered step from i - 1 alone."""
    count = workload("gpt-mini").model.num_parameters

    def sent(name: str, rank: int) -> dict[tuple[str, tuple[int, ...]], int]:
        flows = step_traffic(Case(adapter="a", workload=workload(name), layout=Layout(dp=4)), rank) or []
        return {(flow.kind, flow.ranks): flow.num_bytes for flow in flows}

    once = {("send", (0, 1)): 4 * count, ("recv", (0, 3)): 4 * count}
    assert sent("gpt-mini-dsgd-one-peer", 0) == once
    both = {("send", (0, 2)): 4 * count, ("recv", (0, 2)): 4 * count}
    assert sent("gpt-mini-dsgd-exponential", 0) == once | both
    twice = {route: 2 * num_bytes for route, num_bytes in (once | both).items()}
    assert sent("gpt-mini-heavy-ball-dmsgd-exponential", 0) == twice


# For real


def trial(problem: Workload, dp: int) -> Trial:
    case = Case(adapter="decentralised", workload=problem, layout=Layout(dp=dp), precision=Precision.FP64)
    return Trial(case=case, steps=3)


def test_engines_do_what_is_specified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, where the truth is as good as exact; every algorithm, and every graph."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    graphs = [*STATIC, GraphKind.ONE_PEER, GraphKind.MATCHING]
    pairs = zip(sorted(ALGORITHMS), [*graphs, GraphKind.EXPONENTIAL], strict=True)
    honest = [
        trial(under(kind, Graph(kind=graph if kind != ExactDiffusion.kind else GraphKind.GRID)), 4)
        for kind, graph in pairs
    ]
    found = train_all(honest, tmp_path)
    for each, traces in zip(honest, found, strict=True):
        assert furthest(assess_replicas(traces, each.case.workload)) < 1e-14, each.case.id
        ends = [trace.parameters[-1]["head.output.weight"] for trace in traces]
        assert any((end != ends[0]).any() for end in ends), "replicas have come apart"
