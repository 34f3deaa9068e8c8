"""Parse layouts from the ids that reports print, such as `dp2.tp2.mb4`."""

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
"""Every part of a layout id and its meaning."""


def glossary() -> str:
    """Return the glossary as one sentence, for `--help`."""
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


_COUNT = re.compile(r"(dp|tp|pp|cp|zero|mb|v)([0-9]{1,9})")
_OTHER_NAMES = {"ga": "mb", "gas": "mb", "vp": "v", "vpp": "v"}
"""Names that frameworks have for counts, and the name of their part here."""
_COUNTED = {"zero": "zero_stage", "mb": "num_micro_batches", "v": "virtual_stages"}


def parse_layout(text: str) -> Layout:
    """Return the layout whose id is `text`. Its parts may come in any order.

    Raises `LayoutError` for an unknown or repeated part, with its position, and for degrees that are impossible.
    """
    fields: _Fields = {}
    position = 1
    for part in text.split("."):
        where = f"layout {text!r}: {part!r} at character {position}"
        found = _fields_of(part)
        if found is None:
            raise LayoutError(f"{where} is no part of one{_hint(part)}; parts are {', '.join(GLOSSARY)}")
        if expected := _range_error(part):
            raise LayoutError(f"{where}: expected {expected}")
        if twice := fields.keys() & found.keys():
            raise LayoutError(f"{where} says {', '.join(twice)} once more")
        fields |= found
        position += len(part) + 1
    try:
        return Layout(**fields)
    except LayoutError as error:  # its parts contradict one another
        raise LayoutError(f"{text!r}: {error}") from error


def _hint(part: str) -> str:
    """Return what a part by a framework's name is called here, or an empty string."""
    match = re.fullmatch(r"([a-z]+)([0-9]{1,9})", part)
    if match and match[1] in ("mbs", "gbs"):
        return ", which has no sizes of batches: mbN are N micro-batches"
    return f" (did you mean '{_OTHER_NAMES[match[1]]}{match[2]}'?)" if match and match[1] in _OTHER_NAMES else ""


def _fields_of(part: str) -> _Fields | None:
    """Return the fields that one part sets, or None if it is not a valid part."""
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
    if not (match := _COUNT.fullmatch(part)):
        return None
    counted: _Fields = {_COUNTED.get(match[1], match[1]): int(match[2])}  # type: ignore[misc]
    return counted


def _range_error(part: str) -> str:
    """Return what the number of a part should be if it is out of range, otherwise an empty string."""
    match = _COUNT.fullmatch(part)
    if match is None:
        return ""
    if match[1] == "zero":
        return "a stage from 0 to 3" if int(match[2]) > 3 else ""
    return "" if int(match[2]) else "at least 1"
