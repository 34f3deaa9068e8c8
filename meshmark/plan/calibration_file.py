"""Store a machine measured by `meshmark calibrate` in a JSON file: its hardware and its rates."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from meshmark.errors import InputError, refuse_device, refuse_records
from meshmark.plan.rates import Rates, rates_from
from meshmark.serial import decode
from meshmark.spec.hardware import Gpu


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """A machine and its rates, which are shares of that machine and have no meaning without it."""

    gpu: Gpu
    rates: Rates


def write_calibrated(path: Path, value: Calibrated) -> None:
    """Write both as JSON, with numbers rounded to six digits.

    Raises `InputError` when the file cannot be written or holds records.
    """
    refuse_records(path)
    text = json.dumps(_rounded(dataclasses.asdict(value)), indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error


def read_calibrated(path: Path) -> Calibrated:
    """Read a file that `meshmark calibrate` wrote. Raises `InputError` for any other file."""
    refuse_device(path)
    try:
        fields = json.loads(path.read_text())
        there: Gpu = decode(Gpu, fields["gpu"])
        return Calibrated(gpu=there, rates=rates_from(fields["rates"]))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} holds no machine ({error}); write it with `meshmark calibrate -o {path}`") from error


def calibrated_at(name: str | None) -> Calibrated | None:
    """Return the machine in the file `name`, or None if it names a GPU or rates instead."""
    if name is None or not name.endswith(".json"):
        return None
    refuse_device(name)
    try:
        holds = "gpu" in json.loads(Path(name).read_text())
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise InputError(f"cannot read {name}: {error}; write it with `meshmark calibrate -o {name}`") from error
    return read_calibrated(Path(name)) if holds else None


def _rounded(value: object) -> object:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value
