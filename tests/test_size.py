"""Models too large for memory: the truth layer by layer, tensors on disk, and what a sample of a run is worth."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import size, size_page
from meshmark.adapter.engine import Gathered
from meshmark.adapters import ADAPTERS
from meshmark.algorithms.contract import Tensors
from meshmark.conformance.scenario import SCENARIOS
from meshmark.conformance.scenario_runner import ScenarioRunner
from meshmark.judge import layered
from meshmark.judge.deviation import (
    LARGEST_FULL,
    Assess,
    Drift,
    QuantityKind,
    Sample,
    assess_of,
    global_norm,
    sample_of,
)
from meshmark.judge.diagnosis import diagnose_sample
from meshmark.judge.faults import Fault
from meshmark.judge.layered import LayeredTruth, assess_pieces
from meshmark.judge.tolerance_model import ToleranceModel, compare, noise_run
from meshmark.judge.trace import StoredTensors, Trace
from meshmark.judge.truth import ExactOptimizer, assess, exact_gradients, initial_values
from meshmark.launch.cluster import Cluster, ClusterSpec
from meshmark.launch.launch import ForkserverLauncher
from meshmark.measure.allocations import ExtraPeak
from meshmark.pytest_plugin.plugin import expect
from meshmark.records.record import Record, Verdict
from meshmark.records.request import Request
from meshmark.reference.data import make_batch
from meshmark.report.results import results
from meshmark.report.tables import equivalence
from meshmark.run.runner import Runner, RunOptions
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout, Schedule
from meshmark.spec.precision import Precision
from meshmark.spec.workload import Workload, workload
from tests.broken.mutant import LAYOUTS
from tests.broken.mutants import target
from tests.factories import make_case, make_equivalence, make_good

MINI = workload("gpt-mini")
TIED = dataclasses.replace(MINI, model=dataclasses.replace(MINI.model, tied_embeddings=True))
WORKLOADS = {
    "plain": MINI,
    "tied": TIED,
    "skipped": dataclasses.replace(MINI, skipped_block=1),
    "frozen": dataclasses.replace(TIED, frozen=("embedding",)),
    "llama": workload("llama-tiny"),
    "images": workload("vit-digits"),
    "muon": workload("gpt-mini-muon"),
}
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", WORKLOADS)
def test_gradients_by_layers_are_those_of_the_whole_bit_for_bit(name: str) -> None:
    problem, parameters = WORKLOADS[name], initial_values(WORKLOADS[name])
    batch = make_batch(problem, 1)
    whole, truth = exact_gradients(problem, parameters, batch), LayeredTruth(problem, parameters, batch, CPU)
    pieces = [piece for piece in truth.pieces() if piece]
    found = {name: gradient for piece in pieces for name, gradient in piece.items()}
    assert truth.loss == whole.loss
    assert found.keys() == whole.gradients.keys() and len(found) == sum(map(len, pieces)), "each comes once"
    assert {name for name, gradient in found.items() if gradient is None} == whole.unused
    told = {name: gradient.numpy() for name, gradient in found.items() if gradient is not None}
    assert all(np.array_equal(gradient, whole.gradients[name]) for name, gradient in told.items())


def test_rows_are_taken_in_turn_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters, batch = initial_values(TIED), make_batch(TIED, 0)
    whole = exact_gradients(TIED, parameters, batch)
    monkeypatch.setattr(layered, "MOST_BYTES", 1)
    truth = LayeredTruth(TIED, parameters, batch, CPU)
    found = {name: gradient for piece in truth.pieces() for name, gradient in piece.items()}
    assert truth.loss == pytest.approx(whole.loss, rel=1e-14)
    for name, x in whole.gradients.items():
        gradient = found[name]
        assert gradient is not None
        assert np.linalg.norm(gradient.numpy() - x) <= 1e-13 * global_norm(whole.gradients)


def rounded(problem: Workload, seed: int, steps: int = 2) -> Trace:
    """A run that is right but for its rounding."""
    random, rule = np.random.default_rng(seed), ExactOptimizer(problem.optimizer)

    def float32(tensors: Tensors) -> Tensors:
        return {n: np.float32(x * (1 + 2**-24 * random.standard_normal(x.shape))) for n, x in tensors.items()}

    trace = Trace(parameters=[initial_values(problem)])
    for step in range(steps):
        exact = exact_gradients(problem, trace.parameters[-1], make_batch(problem, step))
        trace.gradients.append(float32({name: exact.gradients[name] for name in exact.used}))
        trace.losses.append(exact.loss * (1 + 2**-24 * random.standard_normal()))
        trace.norms.append(global_norm(trace.gradients[-1]) * (1 + 2**-24))
        trace.parameters.append(float32(rule.step(trace.parameters[-1], trace.gradients[-1])))
    return trace


@pytest.mark.parametrize("name", ["plain", "skipped", "frozen", "muon"])
def test_a_run_stands_as_far_from_the_truth_by_tensors_as_it_does_whole(name: str) -> None:
    """Every comparison, as a multiple of its noise: what verdicts and their ratios are made of."""
    problem = WORKLOADS[name]
    noise, run = rounded(problem, 1), rounded(problem, 2)
    run.gradients[1] = {n: x * np.float32(1.5) if n.endswith("norm.weight") else x for n, x in run.gradients[1].items()}
    del run.parameters[2]["head.norm.weight"]
    stick = ToleranceModel(noise=noise_run(assess(noise, problem), Precision.FP32), factors={})
    whole, pieces = assess(run, problem), assess_pieces(run, problem)
    assert whole.keys() == pieces.keys()
    before = {(q, step): ratio for ratio, q, step in stick.ratios(compare(whole))}
    after = {(q, step): ratio for ratio, q, step in stick.ratios(compare(pieces))}
    # A multiple's distance from one has the rounding of one, which is a millionth of its noise.
    assert after == pytest.approx(before, rel=1e-6, abs=1e-6)
    assert max(after.values()) == np.inf, "what is missing is infinitely far"


def test_tensors_on_disk_are_those_that_were_written(tmp_path: Path) -> None:
    stored = StoredTensors(tmp_path / "a")
    stored.write("blocks.0.x", np.arange(6, dtype=np.float32).reshape(2, 3).T)
    stored.write("y", np.zeros(1))
    assert list(stored) == ["blocks.0.x", "y"] and "z" not in stored and stored.get("z") is None
    assert stored["blocks.0.x"].tolist() == [[0, 3], [1, 4], [2, 5]]
    stored.remove("y")
    assert list(stored) == ["blocks.0.x"] and len(list((tmp_path / "a").iterdir())) == 1
    assert len(StoredTensors(tmp_path / "a")) == 0, "a step that is told again leaves nothing behind"


def test_what_is_judged_follows_from_size_unless_it_is_asked_for() -> None:
    small, large = make_case(), make_case(workload=workload("gpt2-124m"))
    assert large.workload.model.num_parameters > LARGEST_FULL
    assert [assess_of(case, None) for case in (small, large)] == [Assess.FULL, Assess.SAMPLED]
    assert [assess_of(large, asked) for asked in Assess] == list(Assess)
    coupled = make_case(workload=workload("vit-digits-bn"))
    replicas = make_case(layout=Layout(dp=2), workload=workload("gpt-mini-local-sgd2"))
    assert [assess_of(case, Assess.SAMPLED) for case in (coupled, replicas)] == [Assess.FULL] * 2
    big = dataclasses.replace(replicas.workload, model=large.workload.model)
    assert assess_of(dataclasses.replace(replicas, workload=big), None) is Assess.OFF
    assert sample_of(large).steps == 2
    assert sample_of(make_case(precision=Precision.FP16)).steps == 3, "loss scaling may leave the metered step out"


# A sample is told apart from the whole, and from nothing.


def test_pages_say_that_a_verdict_is_of_a_sample() -> None:
    found = results([make_good(equivalence=make_equivalence(sample=Sample(steps=2, noise_runs=6)), steps=3)])
    assert found[0].correct and found[0].correctness.text == "yes (sampled)"
    assert equivalence(found, None)[0]["judged"] == "2 steps, noise of 6 runs, of 3 steps"  # type: ignore[arg-type]
    assert "judged" not in equivalence(results([make_good()]), None)[0]  # type: ignore[arg-type]


def test_what_was_not_judged_is_skipped_with_the_reason() -> None:
    unjudged = make_good(verdicts=[])
    assert results([unjudged])[0].correct is None and results([unjudged])[0].correctness.text == "not judged"
    with pytest.raises(pytest.skip.Exception, match="not judged: --assess off"):
        expect(unjudged, "equivalence")
    coupled = dataclasses.replace(unjudged, case=make_case(workload=workload("vit-digits-bn")))
    with pytest.raises(pytest.skip.Exception, match="not judged: its rows are normalised together"):
        expect(coupled, "equivalence")


def scaled(trace: Trace) -> None:
    trace.gradients[1] = {name: np.float32(0.5) * x for name, x in trace.gradients[1].items()}


def zeroed(trace: Trace) -> None:
    trace.gradients[0] = {
        **trace.gradients[0],
        "head.norm.weight": np.zeros_like(trace.gradients[0]["head.norm.weight"]),
    }


def elsewhere(trace: Trace) -> None:
    trace.parameters[0] = {name: x + np.float32(1) for name, x in trace.parameters[0].items()}


def louder(trace: Trace) -> None:
    trace.losses[1] *= 1.5


def clipped(trace: Trace) -> None:
    trace.norms[1] = 2 * (trace.norms[1] or 0.0)


def moved(trace: Trace) -> None:
    trace.parameters[2] = {name: np.float32(1.1) * x for name, x in trace.parameters[2].items()}


@pytest.mark.parametrize(
    ("defect", "fault", "step"),
    [
        (scaled, Fault.SCALED, 1),
        (zeroed, Fault.MISSING, 0),
        (elsewhere, Fault.START, 0),
        (louder, Fault.LOSS, 1),
        (clipped, Fault.CLIPPING, 1),
        (moved, Fault.UPDATE, 1),
    ],
)
def test_deviations_alone_name_what_is_wrong(defect: Callable[[Trace], None], fault: Fault, step: int) -> None:
    stick = ToleranceModel(noise=noise_run(assess(rounded(MINI, 1), MINI), Precision.FP32), factors={})
    run = rounded(MINI, 2)
    assert diagnose_sample(assess_pieces(run, MINI), [], stick) is None
    defect(run)
    found = diagnose_sample(assess_pieces(run, MINI), [], stick)
    assert found is not None and (found.fault, found.step) == (fault, step)
    drift = Drift(quantity=QuantityKind.GRADIENTS.of("head.norm.weight"), step=0, ranks=[1])
    first = diagnose_sample(assess_pieces(run, MINI), [drift], stick)
    assert first is not None and (first.fault is Fault.DRIFT or fault in (Fault.START, Fault.MISSING))


# One at a time.


def test_tensors_are_brought_together_one_call_at_a_time() -> None:
    """The last call's are let go before the next one's come."""
    alive, calls = list[weakref.ref[torch.Tensor]](), list[str]()

    def gather(kind: str) -> list[torch.Tensor]:
        calls.append(kind)
        assert not any(tensor() is not None for tensor in alive), "there is no room for two"
        found = [torch.zeros(2), torch.ones(3)]
        alive.extend(weakref.ref(tensor) for tensor in found)
        return found

    told = Gathered(([f"{kind}.a", f"{kind}.b"], functools.partial(gather, kind)) for kind in "xy")
    assert list(told) == ["x.a", "x.b", "y.a", "y.b"] and len(told) == 4
    assert "x.a" in told and "z" not in told and not calls, "to ask for a name is no collective call"
    assert [told[name].numel() for name in told] == [2, 3, 2, 3] and calls == ["x", "y"]


def test_memory_beside_what_was_held_is_measured() -> None:
    beside, size_bytes = ExtraPeak(CPU), 64 * 2**20
    held = torch.ones(size_bytes, dtype=torch.uint8)
    for share in (2, 1):
        with beside:
            torch.ones(size_bytes // share, dtype=torch.uint8)
        assert 0.98 < beside.num_bytes * share / size_bytes < 1.1, "Linux counts pages in batches"
    del held
    with beside:
        torch.ones(1)
    assert beside.num_bytes > 0.98 * size_bytes, "the most of all visits"


# Through the launcher.


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    known = {name: ADAPTERS[name] for name in ("pipeline", "ddp")} | {"ddp_AveragedTwice": target("ddp_AveragedTwice")}
    options = RunOptions(assess=Assess.SAMPLED)
    with Cluster(ClusterSpec()) as cluster, contextlib.closing(ForkserverLauncher(cluster)) as launcher:
        running = Runner(launcher, known, options, tmp_path_factory.mktemp("results"))
        yield running
        running.close()


@pytest.mark.slow
def test_a_sample_of_a_run_whose_ranks_hold_different_tensors_is_judged(runner: Runner) -> None:
    layout = Layout(pp=2, num_micro_batches=4, schedule=Schedule.ONE_F_ONE_B)
    record = runner.observe(Case(adapter="pipeline", workload=MINI, layout=layout))
    verdict = record.verdict("equivalence")
    assert verdict is not None and verdict.passed, verdict or record.outcome.message
    assert [v.suite for v in record.verdicts] == ["equivalence", "memory", "communication"], "of the step that follows"
    assert record.equivalence.sample == Sample() and record.steps == 3
    assert {len(steps) for q, steps in record.equivalence.deviations.items() if q.kind is QuantityKind.GRADIENTS} == {2}
    assert float(verdict.evidence["detection_limit"]) < 1e-4
    assert len(record.equivalence.gathering_bytes) == 2


def test_clauses_are_judged_in_full_whatever_is_asked_of_cases(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Request]()
    monkeypatch.setattr(runner, "once", lambda request, needs, misfit: asked.append(request))
    base = make_case()
    for how in Assess:
        monkeypatch.setattr(runner, "options", dataclasses.replace(runner.options, assess=how))
        ScenarioRunner(runner).perform(SCENARIOS["plain"], base)
    assert [(request.assess, request.sample) for request in asked] == [(True, None)] * 3


@pytest.mark.slow
def test_a_sample_of_a_wrong_run_is_not_taken_for_right(runner: Runner) -> None:
    record = runner.observe(Case(adapter="ddp_AveragedTwice", workload=MINI, layout=LAYOUTS["ddp"]))
    verdict = record.verdict("equivalence")
    assert verdict is not None and not verdict.passed and not verdict.undecided
    assert record.equivalence.diagnosis is not None and record.equivalence.diagnosis.fault is Fault.SCALED
    assert "0.5" in record.equivalence.diagnosis.detail
    assert record.equivalence.num_replicated, "each rank of ddp tells all, and all were compared"
    told = size.complaints([record], {"ddp": size.Cost(peak_bytes=13 * 2**30)})
    assert len(told) == 2 and "x its noise" in told[0] and "ddp: a peak of 13.0 GiB" in told[1]
    unjudged: Record = dataclasses.replace(record, verdicts=[])
    assert "nothing was judged" in size.complaints([unjudged], {})
    assert "| not judged | –" in re.sub(" +", " ", size_page.page([unjudged], {}, {}, {}, "a machine"))


_BUSY = """
import sys, time
while time.process_time() < 1: pass
print(flush=True)
sys.stdin.read()
"""
_NOBODY_WAITS = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {_BUSY!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
time.sleep(1)
"""


def test_cpu_seconds_are_of_all_that_descend_from_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a child that its parent never waits for, which `os.times` would not tell of."""
    monkeypatch.setattr(size, "_EVERY", 0.1)
    code, cost = size.measured([sys.executable, "-c", _NOBODY_WAITS])
    assert code == 0 and 1 <= cost.cpu_seconds < 3 and cost.peak_bytes > 2**20


def test_a_run_that_ends_without_records_is_none_as_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(size, "measured", lambda command: (4, size.Cost(seconds=1.0)))
    where = ("--results", str(tmp_path), "--output", str(tmp_path / "page.md"))
    monkeypatch.setattr(sys, "argv", ["size", "--adapters", "gpipe", *where])
    assert size.main()
    assert "gpipe: pytest ended with 4" in capsys.readouterr().out
    page = (tmp_path / "page.md").read_text()
    assert "Nothing was run." in page and "**Not run, so not judged:** ddp," in page


def test_a_mutant_that_passes_is_complained_of() -> None:
    """And one that fails is as it should be; the page tells it from an adapter that is wrong."""
    name, good = next(iter(size.MUTANTS)), make_good()
    mutant = dataclasses.replace(good, case=dataclasses.replace(good.case, adapter=name))
    assert "what is wrong was taken for right" in size.complaints([mutant], {})[0]
    coupled = dataclasses.replace(good, case=make_case(workload=workload("vit-digits-bn")), verdicts=[])
    assert size.complaints([coupled], {}) == ["nothing was judged"], "what no sample can judge is told, and no more"
    caught = dataclasses.replace(mutant, verdicts=[Verdict(suite="equivalence", passed=False, summary="too far")])
    assert not size.complaints([caught], {}) and size.complaints([dataclasses.replace(caught, case=good.case)], {})
    page = size_page.page(
        [caught, good], {"ddp": size.Cost(seconds=12.0)}, {name: True, "fsdp2": False}, {}, "a machine"
    )
    assert "**Not run, so not judged:** fsdp2." in page
    assert f"{name} (**broken**)" in page and "| no " in page and "too far" in page
