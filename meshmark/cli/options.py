"""Parse values of command-line options that pytest and `meshmark` share. All functions raise `InputError`."""

from __future__ import annotations

import dataclasses
import importlib.metadata

from meshmark.adapter.matrix import AUTO, LayoutChoice
from meshmark.adapter.registry import core_adapters, known_adapters, outside_name, select
from meshmark.errors import InputError, UnknownNameError
from meshmark.spec.layout_id import parse_layout
from meshmark.spec.model_config import Dataset
from meshmark.spec.model_spec import ModelSpec
from meshmark.spec.model_text import described_model, is_description
from meshmark.spec.workload import DEFAULT_WORKLOAD, Workload, workload

WORKLOADS_GROUP = "meshmark.workloads"
"""Entry point group for distributions that provide workloads: `name = "package.module:Class"`."""

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_DIGITS = 5
"""Digits of the largest number of ranks. No cluster has more."""


def chosen_device(name: str) -> str:
    """Return a device that Meshmark knows. Raises `UnknownNameError` for others."""
    if name not in ("cpu", "cuda"):
        raise UnknownNameError("device", name, ["cpu", "cuda"])
    return name


def split_values(option: str, text: str) -> list[str]:
    """Return the distinct values of `a,b`. At least one is required."""
    values = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not values:
        raise InputError(f"{option} {text!r}: expected at least one value")
    return values


def chosen_adapters(patterns: str | None, outside: list[str]) -> dict[str, str]:
    """Return the adapters to use, as a mapping from name to target.

    `patterns` is the value of `--adapters` (names or patterns; by default the core), `outside` that of `--adapter`
    (targets). If only `outside` is given, only these are used.
    """
    for target in outside:
        if ":" not in target:
            raise InputError(
                f"--adapter {target!r}: expected FILE.py:CLASS or package.module:Class; --adapters takes names"
            )
    named = split_values("--adapters", patterns) if patterns is not None else []
    if files := [name for name in named if ":" in name]:
        raise InputError(f"--adapters {', '.join(files)}: expected names or patterns; --adapter takes FILE.py:CLASS")
    own = {outside_name(target): target for target in outside}
    clash = sorted(own.keys() & known_adapters().keys()) if own else []
    if clash or len(own) < len(outside):
        raise InputError(f"--adapter: {', '.join(clash or own)} would stand for two adapters; rename the class")
    if patterns is None:
        return own or core_adapters()
    return select(named, known_adapters(), core_adapters()) | own


def chosen_layouts(world: str | None, layouts: str | None) -> tuple[list[int], LayoutChoice]:
    """Return world sizes and layouts.

    They are the sizes of `--world` (2 by default), with no layouts or `auto`; or the layouts of `--layouts` with their
    sizes.
    """
    if layouts is None or layouts.strip() == AUTO:
        worlds = [positive("--world", text) for text in split_values("--world", "2" if world is None else world)]
        return worlds, None if layouts is None else AUTO
    if world is not None:
        raise InputError(f"--world {world} and --layouts {layouts!r}: give one of them; layouts say how many ranks")
    parsed = [parse_layout(text) for text in split_values("--layouts", layouts)]
    return sorted({layout.world_size for layout in parsed}), parsed


def chosen_workloads(names: str, model: str | None, global_batch: int | None) -> list[Workload]:
    """Return the workloads of `--workload`: presets and users' own.

    A preset with another model or batch is renamed, because its numbers differ. A user's own workload is
    FILE.py:CLASS, package.module:Class, or a name of the entry points `meshmark.workloads`. The id of an algorithm may
    follow a class after a hyphen.
    """
    return [_in_batches(_of_model(_named(name), model), global_batch) for name in split_values("--workload", names)]


def _named(name: str) -> Workload:
    points = importlib.metadata.entry_points(group=WORKLOADS_GROUP, name=name)
    target = next((point.value for point in points), name)
    if ":" not in target:
        return workload(name)
    from meshmark.reference.own_model import algorithm_of, describe  # torch, which presets do not need

    where, _, cls = target.rpartition(":")
    cls, dash, algorithm = cls.partition("-")
    if not (dash and cls.isidentifier()) or target.endswith(".json"):  # in "hf:some-file.json" a name
        return describe(target)
    return dataclasses.replace(describe(f"{where}:{cls}"), algorithm=algorithm_of(name, algorithm))


def _of_model(preset: Workload, text: str | None) -> Workload:
    if text is None:
        return preset
    if not is_description(text):
        raise InputError(f"--model {text!r}: expected KEY=VALUE,... or FILE.json; --workload takes names")
    if not isinstance(preset.model, ModelSpec):
        raise InputError(f"--model {text!r}: workload {preset.name!r} trains {preset.model.name!r}, no model of text")
    model = described_model(text if preset.model.causal or "causal=" in text else f"{text},causal=0")
    name = model.name if preset.name == DEFAULT_WORKLOAD else f"{preset.name}.{model.name}"
    dataset = Dataset.TEXT if model.causal else Dataset.MASKED_TEXT
    return dataclasses.replace(preset, name=name, model=model, dataset=dataset)


def _in_batches(preset: Workload, global_batch: int | None) -> Workload:
    if global_batch is None or global_batch == preset.global_batch:
        return preset
    if preset.dataset is Dataset.OWN:
        raise InputError(
            f"--global-batch {global_batch}: workload {preset.name!r} makes batches of its own size"
            f", {preset.global_batch} rows; change its batch()"
        )
    return dataclasses.replace(preset, name=f"{preset.name}.b{global_batch}", global_batch=global_batch)


def positive(option: str, text: str) -> int:
    """Parse a whole number of at least 1, such as a world size. It is limited, because each rank is a process."""
    if not text.isdecimal() or len(text) > _DIGITS or int(text) < 1:
        raise InputError(f"{option} {text[:40]!r}: expected a whole number of at least 1, of at most {_DIGITS} digits")
    return int(text)


def part(option: str, text: str) -> tuple[int, int]:
    """Parse `2/4` into number and count."""
    number, slash, count = text.partition("/")
    found = positive(option, number), positive(option, count if slash else "")
    if found[0] > found[1]:
        raise InputError(f"{option} {text!r}: expected a part such as 2/4, from 1 to the number of parts")
    return found


def duration(option: str, text: str) -> float:
    """Parse `90`, `90s`, `30m` or `2h` into seconds."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "s")
    if not number.isdecimal() or len(number) > _DIGITS or not int(number):
        raise InputError(f"{option} {text[:40]!r}: expected a time such as 90s, 30m or 2h")
    return int(number) * _UNITS[unit]
