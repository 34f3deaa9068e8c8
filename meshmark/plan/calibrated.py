"""A machine as `meshmark calibrate` found it, in one JSON file: what it is made of, and what of it was reached."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from meshmark.errors import InputError
from meshmark.plan.rates import Rates, rates, read_rates
from meshmark.plan.system import Gpu, Host, gpu


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """Rates mean nothing without the machine that they are shares of, so the two stay together."""

    gpu: Gpu
    rates: Rates


def write_calibrated(path: Path, value: Calibrated) -> None:
    """Write both as JSON, numbers rounded to four digits. Raises `InputError` when the file cannot be written."""
    text = json.dumps(_rounded(dataclasses.asdict(value)), indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error


def read_calibrated(path: Path) -> Calibrated:
    """A file that `meshmark calibrate` wrote. Raises `InputError` when it is not one."""
    try:
        fields = json.loads(path.read_text())
        machine, host = fields["gpu"], fields["gpu"].get("host")
        there = Gpu(**{**machine, "host": Host(**host) if host else None})
        return Calibrated(gpu=there, rates=Rates(**fields["rates"]))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} holds no machine ({error}); write it with `meshmark calibrate -o {path}`") from error


def gpu_called(name: str) -> Gpu:
    """The GPU of a calibrated machine's file where `name` ends in .json, else the one of that name."""
    return read_calibrated(Path(name)).gpu if name.endswith(".json") else gpu(name)


def rates_called(name: str) -> Rates:
    """The rates in a file, a calibrated machine's or rates alone, where `name` ends in .json, or those of that name."""
    if not name.endswith(".json"):
        return rates(name)
    path = Path(name)
    return read_calibrated(path).rates if _holds_machine(path) else read_rates(path)


def _holds_machine(path: Path) -> bool:
    try:
        return "gpu" in json.loads(path.read_text())
    except (OSError, ValueError, TypeError):
        return False


def _rounded(value: object) -> object:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value
