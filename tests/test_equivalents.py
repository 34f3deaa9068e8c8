"""Correct engines by other hands are accused by nobody, and what no correct arithmetic makes still is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from meshmark.adapter.contract import Casting
from meshmark.adapter.registry import load_adapter
from meshmark.judge.deviation import Deviation, Deviations, Quantity, QuantityKind
from meshmark.judge.tolerance_model import Comparisons, ToleranceModel, fit
from meshmark.launch.launch import ForkserverLauncher
from meshmark.records.record import Record, Status
from meshmark.run.runner import Runner, RunOptions
from meshmark.spec.case import Case
from meshmark.spec.precision import Precision
from tests.correct.registry import ENGINES, PRECISIONS, cases


@pytest.fixture(scope="module")
def runner(launcher: ForkserverLauncher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    running = Runner(launcher, ENGINES, RunOptions(observed_steps=3), tmp_path_factory.mktemp("results"))
    yield running
    running.close()


def observed(runner: Runner, engine: str, precision: Precision) -> Record:
    return runner.observe(case_of(engine, precision))


def case_of(engine: str, precision: Precision) -> Case:
    return next(case for case in cases() if (case.adapter, case.precision) == (engine, precision))


OTHER_BITS = (
    "stridedrows",
    "twicethemicrobatches",
    "halfthemicrobatches",
    "fusedproducts",
    "attentionbyhand",
    "everythingelse",
    "halvedproducts",
)


def test_at_least_forty_kinds_run_in_three_precisions() -> None:
    """`make power` and `make correct-engines` train them; here a sample is."""
    assert len(ENGINES) >= 40 and len(cases()) == 3 * len(ENGINES)
    for case in cases():
        assert load_adapter(ENGINES[case.adapter]).supports(case, "cpu", "gloo") is None


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
@pytest.mark.parametrize("engine", [*OTHER_BITS, "reversedrows", "ring", "flatshards"])
def test_a_correct_engine_by_other_hands_passes(runner: Runner, engine: str, precision: Precision) -> None:
    record = observed(runner, engine, precision)
    assert record.outcome.status is Status.OK and all(v.passed for v in record.verdicts), record.verdicts
    verdict = record.verdict("equivalence")
    assert verdict is not None and "diagnosis" not in verdict.evidence
    if precision is not Precision.FP32 and engine in OTHER_BITS:
        assert "bits differ" in verdict.summary


# By hand: noise runs of two wide tensors, one narrow one that only other micro-batches change, and the loss.

STEPS, SCALE, SHARP = 6, 1.0, 1e-8
WIDE, NARROW = ["norm", "embedding"], [f"product{i}" for i in range(12)]
AUTOCAST = {QuantityKind.REORDERED: 0.0, QuantityKind.REGROUPED: 1e-3, QuantityKind.FORWARD: 3e-3}
"""How far each way takes narrow gradients; the last of them takes wide ones and the loss as far."""


def noise_runs() -> list[Comparisons]:
    runs = []
    for draw in range(12):
        own: dict[Quantity, list[float]] = {QuantityKind.TWIN_LOSS.of(): [SHARP] * STEPS}
        for name in (*WIDE, *NARROW):
            own[QuantityKind.TWIN.of(name)] = own[QuantityKind.TWIN_SCALE.of(name)] = [SHARP] * STEPS
        for way, size in AUTOCAST.items():
            forward = way is QuantityKind.FORWARD
            scatter = 1 + 0.02 * draw
            own[way.of()] = [size * scatter if forward else SHARP] * STEPS
            for name in (*WIDE, *NARROW):
                own[way.of(name)] = [max(size * scatter, SHARP) if forward or name in NARROW else SHARP] * STEPS
        runs.append(own)
    return runs


def tolerance_model() -> ToleranceModel:
    return fit(noise_runs()).declared(Casting.AUTOCAST)


def run(loss: float = 0.0, factor: float = 1.0, steps: int = STEPS, **distances: float) -> Deviations:
    """Return deviations of gradients so far from the twin's in the first `steps` steps, and none later. `factor` scales
    all."""
    found = {QuantityKind.TWIN_LOSS.of(): [Deviation(distance=loss, scale=SCALE, factor=1.0)] * STEPS}
    for name in (*WIDE, *NARROW):
        own = [distances.get(name, 0.0) if step < steps else 0.0 for step in range(STEPS)]
        found[QuantityKind.TWIN.of(name)] = [
            Deviation(distance=distance, scale=SCALE, factor=factor if distance else 1.0) for distance in own
        ]
        found[QuantityKind.REFERENCE.of(name)] = [Deviation(distance=0.01, scale=SCALE, factor=1.0)] * STEPS
    return found


def everywhere(names: list[str], distance: float) -> dict[str, float]:
    return dict.fromkeys(names, distance)


@pytest.mark.parametrize(
    "found, way",
    [
        (run(), ""),
        (run(product0=1e-3, steps=1), "reordered"),
        (run(product0=1e-3, product1=1e-3, steps=1), "reordered"),
        (run(**everywhere(NARROW, 1e-3)), "regrouped"),
        (run(loss=3e-3, **everywhere(NARROW + WIDE, 3e-3)), "forward"),
    ],
    ids=["the twin's bits", "a flip", "two flips", "other micro-batches", "another forward pass"],
)
def test_one_way_that_explains_everything_passes(found: Deviations, way: str) -> None:
    stick = tolerance_model()
    assert stick.fitted_to(found).way == way
    assert max(excess for excess, *_ in stick.judge(found)) <= 1


@pytest.mark.parametrize(
    "found",
    [
        run(norm=1e-6),
        run(product0=0.1, steps=1),
        run(product0=1e-3),
        run(norm=1e-3, **everywhere(NARROW, 1e-3)),
        run(**everywhere(NARROW + WIDE, 3e-3)),
        run(loss=3e-3),
        run(loss=3e-3, product0=3e-3),
        run(loss=0.1, **everywhere(NARROW + WIDE, 3e-3)),
        run(product0=1e-5, factor=1 + 1e-5, steps=1),
        run(factor=1 + 1e-3, **everywhere(NARROW, 1e-3)),
        run(product0=float("inf")),
    ],
    ids=[
        "a norm that no micro-batch changes",
        "more than a flip",
        "too many flips, too few for another way",
        "digits are lost of wide gradients too",
        "another backward pass with the twin's loss",
        "another loss alone",
        "a gradient beside another loss",
        "a loss that is wrong",
        "a multiple",
        "a multiple everywhere",
        "no number",
    ],
)
def test_what_no_way_explains_alone_fails(found: Deviations) -> None:
    stick = tolerance_model()
    assert stick.fitted_to(found) is stick
    assert max(excess for excess, *_ in stick.judge(found)) > 1


def test_a_tensor_of_one_element_is_always_a_multiple() -> None:
    found = dict(run(product0=1e-4, factor=1 + 1e-4, steps=1))
    found[QuantityKind.REFERENCE.of("product0")] = [Deviation(distance=0.01, scale=SCALE, factor=1.01)] * STEPS
    assert tolerance_model().fitted_to(found).way == "reordered"


def test_an_adapter_that_declares_nothing_has_no_way() -> None:
    assert fit(noise_runs()).declared(None).ways == {}
    assert set(fit(noise_runs()).declared(Casting.WEIGHTS).ways) == set()


@pytest.mark.slow
def test_records_hold_the_ways(runner: Runner) -> None:
    """So that a record on disk can be judged again."""
    record = observed(runner, "attentionbyhand", Precision.BF16)
    assert record.equivalence.tolerance_model.fitted_to(record.equivalence.deviations).way == "forward"
    assert set(record.equivalence.ways) == {"reordered", "regrouped", "sums", "split", "products", "forward"}
