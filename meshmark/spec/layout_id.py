"""Layouts by their ids, such as `dp2.tp2.mb4`: what reports print, read back."""

from __future__ import annotations

import re
from typing import TypedDict

from meshmark.errors import LayoutError
from meshmark.spec.layout import Layout, Offload, Recompute, Schedule

GLOSSARY = {
    "one": "nothing is parallel",
    "dpN": "N data-parallel replicas, or shards under ZeRO",
    "tpN": "N-way tensor parallelism",
    "ppN": "N pipeline stages",
    "cpN": "N ranks share one sequence",
    "zeroN": "ZeRO stage N over the data-parallel ranks (3: FSDP)",
    "mbN": "N micro-batches a step: accumulation, or what fills a pipeline",
    "vN": "N virtual stages a pipeline rank",
    "folded": "a rank's two virtual stages lie as a V: the first rank holds both ends",
    "sp": "sequence parallelism between tensor-parallel regions",
    **{str(schedule): "pipeline schedule" for schedule in Schedule},
    **{f"recompute_{what}": "activations computed again" for what in Recompute if what is not Recompute.NONE},
    **{f"offload_{where}": "where optimizer states live" for where in Offload if where is not Offload.NONE},
}
"""Every part of an id, and what it says."""


def glossary() -> str:
    """The same in a sentence, for `--help`."""
    meanings: dict[str, list[str]] = {}
    for part, meaning in GLOSSARY.items():
        meanings.setdefault(meaning, []).append(part)
    told = "; ".join(f"{', '.join(parts)}: {meaning}" for meaning, parts in meanings.items())
    return f"A layout is named by its parts, joined by dots, such as dp2.tp2.mb4: {told}."


class _Fields(TypedDict, total=False):
    dp: int
    tp: int
    pp: int
    cp: int
    zero_stage: int
    num_micro_batches: int
    virtual_stages: int
    folded: bool
    sequence_parallel: bool
    schedule: Schedule
    recompute: Recompute
    offload: Offload


_COUNTED = {"zero": "zero_stage", "mb": "num_micro_batches", "v": "virtual_stages"}


def parse_layout(text: str) -> Layout:
    """The layout that `text` is the id of; its parts may come in any order.

    Raises `LayoutError` for a part that is none or stands twice, with its position, and for degrees that cannot be.
    """
    fields: _Fields = {}
    position = 1
    for part in text.split("."):
        found = _fields_of(part)
        if found is None:
            known = ", ".join(GLOSSARY)
            raise LayoutError(f"layout {text!r}: {part!r} at character {position} is no part of one; parts are {known}")
        if twice := fields.keys() & found.keys():
            raise LayoutError(f"layout {text!r}: {part!r} at character {position} says {', '.join(twice)} once more")
        fields |= found
        position += len(part) + 1
    return Layout(**fields)


def _fields_of(part: str) -> _Fields | None:
    """What one part says; None where it is none."""
    if part == "one":
        return {}
    if part == "folded":
        return {"folded": True}
    if part == "sp":
        return {"sequence_parallel": True}
    if part in set(Schedule):
        return {"schedule": Schedule(part)}
    if part in GLOSSARY and part.startswith("recompute_"):
        return {"recompute": Recompute(part.removeprefix("recompute_"))}
    if part in GLOSSARY and part.startswith("offload_"):
        return {"offload": Offload(part.removeprefix("offload_"))}
    if not (match := re.fullmatch(r"(dp|tp|pp|cp|zero|mb|v)([0-9]{1,9})", part)):
        return None
    counted: _Fields = {_COUNTED.get(match[1], match[1]): int(match[2])}  # type: ignore[misc]
    return counted
