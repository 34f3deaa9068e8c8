"""Dataclasses to JSON and back: nothing lost, nothing unknown let in."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import pytest

from meshmark.environment import Environment
from meshmark.judge.deviation import Deviation, Drift, Quantity, QuantityKind
from meshmark.judge.tolerance_model import Comparisons
from meshmark.measure.readings import Collective
from meshmark.records.rank_report import RankFailure, RankReport
from meshmark.records.record import Outcome, PeerEnd, Record, Status, TrainingCurves
from meshmark.serial import decode, encode
from meshmark.spec.layout import Layout
from meshmark.spec.precision import Precision
from tests.factories import (
    make_case,
    make_environment,
    make_memory,
    make_record,
    make_timed,
    make_traffic,
    make_verdict,
)


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True, kw_only=True)
class Inner:
    pair: tuple[float, int]
    many: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Outer:
    colour: Colour
    maybe: float | None
    nested: dict[str, list[Inner]]
    by_rank: dict[int, str]
    mixed: dict[str, float | int | str]
    flag: bool = False
    optional: Inner | None = None
    names: list[str] = field(default_factory=list)


OUTER = Outer(
    colour=Colour.RED,
    maybe=None,
    nested={"a": [Inner(pair=(1.5, 2), many=(3, 4, 5))], "b": []},
    by_rank={0: "zero", 11: "eleven"},
    mixed={"f": 0.5, "i": 3, "s": "text"},
    flag=True,
    optional=Inner(pair=(0.0, 1)),
    names=["x", "ü"],
)


def through_json(value: object) -> Any:  # noqa: ANN401
    return decode(type(value), json.loads(json.dumps(encode(value), allow_nan=False)))


def filled(record: object) -> set[str]:
    """Fields that are not at their default."""
    changed = set()
    for f in dataclasses.fields(record):
        default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        if f.name == "schema" or getattr(record, f.name) != default:
            changed.add(f.name)
    return changed


REPORT = RankReport(
    rank=1,
    build_seconds=0.5,
    run_seconds=2.0,
    losses=[1.0],
    norms=[None, 2.0],
    deviations={Quantity.parse("loss"): [Deviation(distance=1e-7, scale=1.0, factor=1.0)]},
    drifts=make_record().equivalence.drifts,
    memory=make_memory(),
    traffic=make_traffic(),
    step_seconds=[0.1],
    lap_starts=[0.0],
    lap_steps=[1],
    timed_digests={2: "abc"},
    flops_per_second=1e9,
    state_dtypes={"parameters": "float32"},
    noise_runs=[{Quantity.parse("loss"): [1e-7]}],
    kernels={"attention": "math"},
)
FAILURE = RankFailure(
    rank=3, kind="hung", message="no end\nwithin 8 s", time=1.5, traceback="t", log_tail="l", stack='File "x"'
)
FAILED = Outcome(
    status=Status.HUNG,
    rank=1,
    message="no end",
    log_tail="tail",
    stacks={0: "here", 10: "there"},
    peers=[PeerEnd(rank=0, kind="raised", seconds=0.5), PeerEnd(rank=2, kind="ended")],
)


@pytest.mark.parametrize(
    "value",
    [
        OUTER,
        make_record(fake_ranks=[0, 7]),
        make_timed(),
        make_record(outcome=FAILED),
        REPORT,
        FAILURE,
        make_verdict("memory"),
    ],
    ids=["every annotation", "observed", "timed", "hung", "rank report", "rank failure", "verdict"],
)
def test_values_come_back_equal(value: object) -> None:
    assert through_json(value) == value


def test_the_record_above_fills_every_field() -> None:
    """Else the round trip would say nothing of a field that is new."""
    record = make_record(fake_ranks=[0, 7])
    parts = (record.launch, record.training, record.equivalence, record.memory, record.traffic)
    for value in (record, *parts, record.timing, record.conformance):
        assert filled(value) == {f.name for f in dataclasses.fields(value)}


def test_types_come_back_too() -> None:
    """Equality alone would take "fp32" for Precision.FP32, and 1 for 1.0."""
    record = through_json(make_record())
    assert record.case.precision is Precision.FP32
    assert type(record.case.layout) is Layout
    assert type(record.case.workload.optimizer.betas) is tuple
    assert type(record.outcome.status) is Status
    outer = through_json(OUTER)
    assert outer.colour is Colour.RED
    assert [type(v) for v in outer.mixed.values()] == [float, int, str]
    assert list(outer.by_rank) == [0, 11]
    assert through_json(dataclasses.replace(OUTER, nested={"a": [Inner(pair=(1, 2))]})).nested["a"][0].pair == (1.0, 2)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_null_in_json_and_nan_again(value: float) -> None:
    """JSON has no such numbers; readers other than Python's refuse them."""
    deviation = Deviation(distance=value, scale=1.0, factor=0.0)
    assert encode(deviation)["distance"] is None
    assert math.isnan(through_json(deviation).distance)
    verdict = make_verdict(evidence={"ratio": value})
    assert math.isnan(through_json(verdict).evidence["ratio"])


def test_none_stays_none_where_it_is_allowed() -> None:
    assert through_json(TrainingCurves(norms=[None, 1.0])).norms == [None, 1.0]
    assert through_json(OUTER).maybe is None
    assert through_json(dataclasses.replace(OUTER, optional=None)).optional is None


def test_an_unknown_field_is_refused_by_name() -> None:
    value = encode(make_case()) | {"colour": "red"}
    with pytest.raises((KeyError, ValueError), match="Case has no field colour"):
        decode(type(make_case()), value)


def test_an_unknown_field_deep_inside_is_refused() -> None:
    value = encode(make_record())
    value["case"]["workload"]["model"]["depth"] = 3
    with pytest.raises((KeyError, ValueError), match="ModelSpec has no field depth"):
        decode(Record, value)


def test_a_missing_field_is_refused_by_name() -> None:
    value = encode(make_record())
    del value["case"]["workload"]
    with pytest.raises(TypeError, match="workload"):
        decode(Record, value)


@pytest.mark.parametrize(
    "field_, value",
    [
        ("outcome", {"status": "splendid"}),
        ("task", "dance"),
        ("steps", "five"),
        ("training", {"losses": 3}),
        ("equivalence", {"drifts": [3]}),
        ("equivalence", {"noise": []}),
        ("steps", 2.5),
        ("timing", {"rank_step_seconds": "12"}),
        ("case", []),
        ("environment", "here"),
        ("memory", {"rank": 0}),
    ],
)
def test_a_value_of_another_form_is_refused(field_: str, value: object) -> None:
    """As the docstring of `decode` says; whoever reads records depends on these three."""
    with pytest.raises((TypeError, KeyError, ValueError)):
        decode(Record, encode(make_record()) | {field_: value})


def test_values_are_checked_again_when_they_are_read() -> None:
    value = encode(make_record())
    value["case"]["layout"]["dp"] = 3
    with pytest.raises(ValueError, match="dp 3 x 2 micro-batches"):
        decode(Record, value)


QUANTITIES = {
    "loss": QuantityKind.LOSS.of(),
    "gradients/blocks.0.ffn.up.weight": QuantityKind.GRADIENTS.of("blocks.0.ffn.up.weight"),
    "scale/a/b": QuantityKind.SCALE.of("a/b"),
    "buffers/replicas": QuantityKind.BUFFERS.of("replicas"),
    "norm/replica1": Quantity(kind=QuantityKind.NORM, replica=1),
    "parameters/replica12:a.b": Quantity(kind=QuantityKind.PARAMETERS, name="a.b", replica=12),
}


@pytest.mark.parametrize("text, quantity", QUANTITIES.items())
def test_a_quantity_is_a_key_that_is_written_as_text(text: str, quantity: Quantity) -> None:
    assert str(quantity) == f"{quantity}" == text and Quantity.parse(text) == quantity
    run = {quantity: [1.0]}
    assert encode(run) == {text: [1.0]} and decode(Comparisons, encode(run)) == run
    drift = Drift(quantity=quantity, step=0, ranks=[1])
    assert encode(drift)["quantity"] == text and through_json(drift) == drift


@pytest.mark.parametrize("text", ["", "gradient/a", "Loss", "/a", 3, None, {"kind": "loss"}])
def test_what_no_quantity_is_written_as_is_refused(text: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        decode(Quantity, text)


def test_quantities_are_ordered_as_they_are_written() -> None:
    texts = [
        "scale/b",
        "gradients/replica1:a",
        "gradients/replica10:a",
        "loss/replica0",
        "gradients/b",
        "loss",
        "gradients/a",
        "norm",
        "parameters/a",
        "initial/z",
    ]
    assert list(map(str, sorted(map(Quantity.parse, texts)))) == sorted(texts)


def test_equal_neighbours_of_a_list_are_one_and_others_are_not() -> None:
    """Ranks send much the same, and thousands of records are kept at once."""
    given = [{"kind": "all_reduce", "group_size": 2, "ranks": [0, 1], "count": 1, "num_bytes": n} for n in (8, 8, 9, 8)]
    first, second, other, last = decode(list[Collective], given)
    assert first is second and [c.num_bytes for c in (first, other, last)] == [8, 9, 8]
    assert decode(list[list[float]], [[1.0, None], [1.0, 2.0]])[1] == [1.0, 2.0]
    with pytest.raises(ValueError, match="Collective has no field speed"):
        decode(list[Collective], [given[0], given[0] | {"speed": 1}])


def test_equal_texts_by_text_are_one_mapping_in_all_records() -> None:
    """A hundred thousand of them, of one environment, fill no memory."""
    written = [make_environment(date="a"), make_environment(date="b"), make_environment(versions={"torch": "1"})]
    first, second, other = (decode(Environment, encode(environment)) for environment in written)
    assert [first, second, other] == written
    assert first.versions is second.versions is not other.versions
