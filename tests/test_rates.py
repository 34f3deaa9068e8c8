"""Rates in their files: part by part, or flat as older Meshmarks wrote them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshmark.errors import InputError
from meshmark.plan.rates import NetworkRates, Rates, rates, read_rates, write_rates
from meshmark.serial import encode
from meshmark.theory.memory import Overheads
from studies.twins import twin
from studies.twins_calibrated import machine_of

SOME = rates("h100-sweep").moved({"network.hop_seconds": 0.25, "memory.queued_collectives": 3.0})


def written(path: Path, fields: object) -> Path:
    path.write_text(json.dumps(fields))
    return path


def flat(given: Rates) -> dict[str, object]:
    """As `calibrate` wrote them before they had parts."""
    numbers = {name.partition(".")[2]: value for name, value in given.numbers().items()}
    assert len(numbers) == len(given.numbers())
    return {"name": given.name, "origin": given.origin, **numbers}


def test_flat_files_are_read_as_ever(tmp_path: Path) -> None:
    assert read_rates(written(tmp_path / "r.json", flat(SOME))) == SOME
    few = read_rates(written(tmp_path / "few.json", {"name": "few", "hop_seconds": 0.5, "queued_collectives": 2.0}))
    assert few.network == NetworkRates(hop_seconds=0.5) and few.kernels == Rates(name="").kernels
    assert few.memory == Overheads(fragmentation=Rates(name="").memory.fragmentation, queued_collectives=2.0)


def test_a_committed_calibration_is_read_number_by_number() -> None:
    row = twin("calibrated")[0]
    told = json.loads(row["machine_file"])["rates"]
    assert "hop_seconds" in told, "it is to be a flat one"
    came_later = {"tensor_overlap": 0.0, "attention_half_length": 0.0, "contention": 0.0, "faster": 1.0, "slower": 1.0}
    came_later |= dict.fromkeys(("ring_start_seconds", "ring_inside_seconds", "ring_across_seconds"), 0.0)
    assert flat(machine_of(row).rates) == told | came_later


def test_files_hold_the_parts_and_what_they_lack_is_usual(tmp_path: Path) -> None:
    write_rates(tmp_path / "r.json", SOME)
    assert read_rates(tmp_path / "r.json") == SOME
    assert json.loads((tmp_path / "r.json").read_text())["network"]["hop_seconds"] == 0.25
    few = read_rates(written(tmp_path / "few.json", {"name": "few", "memory": {"queued_collectives": 2.0}}))
    assert few.memory.fragmentation == Rates(name="").memory.fragmentation > 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hops_seconds": 1.0}, "have no field hops_seconds; they have name, origin, kernels, network"),
        ({"network": {"hops_seconds": 1.0}}, "NetworkRates has no field hops_seconds"),
        ({"network": 3.0}, "NetworkRates from 3.0: expected a dict"),
        ({"network": {"hop_seconds": "soon"}}, "'soon'"),
        ({"kernels": {"gemm_efficiency": 57.0}}, "a share between 0 and 1"),
        ({"tp_bandwidth": -1.0}, "tp_bandwidth is -1, expected 0 or more"),
    ],
)
def test_what_rates_cannot_be_is_refused(fields: dict[str, object], words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        read_rates(written(tmp_path / "r.json", {"name": "x", **fields}))


def test_a_file_of_another_form_is_refused(tmp_path: Path) -> None:
    for fields in ([1.0], "rates", {"hop_seconds": 1.0}):
        with pytest.raises(InputError, match="holds no rates"):
            read_rates(written(tmp_path / "r.json", fields))


def test_numbers_move_by_their_dotted_names() -> None:
    assert SOME.numbers()["network.hop_seconds"] == SOME.network.hop_seconds == 0.25
    assert SOME.moved(SOME.numbers()) == SOME
    assert encode(SOME.moved({"host.step_seconds": 7.0}))["host"]["step_seconds"] == 7.0
    for wrong in ("network.hops", "links.hop_seconds", "hop_seconds"):
        with pytest.raises((TypeError, AttributeError)):
            SOME.moved({wrong: 1.0})
