"""Format the result of a search as text and as JSON."""

from __future__ import annotations

import dataclasses
import textwrap

from meshmark.plan.prediction import MEMORY_ERROR, Prediction
from meshmark.plan.provenance import provenance, validated_on
from meshmark.plan.search import OFFLOAD_PLACES, Search, decides, layout_id, reason
from meshmark.plan.step_time import PARTS
from meshmark.spec.hardware import GIB
from meshmark.spec.layout import Offload
from meshmark.text import pluralize

_LINE = 100
"""Characters of a line, as wide as terminals usually are."""
_LIKE = 2
"""Number of further layouts of the best shape that are named."""
MIXTURES_SLOWER = 23
"""Percent by which the median of the published runs of mixtures took longer than planned."""
_ID_WIDTH = 27
"""Characters for a layout's id beside its figures."""


def print_search(found: Search, top: int, elapsed: float) -> None:
    """Print the table of the best layouts, why the first one wins, and which layouts nearly fit."""
    prediction, model = found.prediction, found.prediction.model
    size = f"{model.num_parameters / 1e9:.3g}B parameters"
    print_paragraph(
        f"{model.name} ({size}) on {prediction.grid.num_gpus[0]} {prediction.gpu.name}: {found.num_examined} layouts "
        f"examined in {elapsed:.2f} s, {len(found.ranked)} fit; global batch {prediction.grid.global_batch[0]}, "
        f"sequences of {model.seq_len:,} tokens, products in {_products(prediction)}{_adapters(prediction)}"
    )
    print_paragraph(provenance(prediction.gpu, prediction.rates, prediction.stack))
    heads = f"{'seq':>4} {'tok/s/gpu':>9} {'MFU':>6} {'step s':>8} {'GiB':>6} {'free':>6}  decides"
    print(f"\n{'layout':{_ID_WIDTH}} {heads}")
    for row in found.shapes[:top]:
        print(_line(found, int(row)))
    best = int(found.ranked[0])
    print_paragraph(f"One line a shape: its fastest layout. {_of_best_shape(found)}")
    print("seq: sequences in a micro-batch; mbN of the layout: N micro-batches a step.")
    print_paragraph(
        "decides: what is assumed of most of a layout's step beyond its products, and its share of the step."
    )
    if prediction.tight[best]:
        print_paragraph(_about_tight(found))
    print()
    print_paragraph(f"The best wins because {reason(found)}.")
    print_paragraph(f"Its step: {_breakdown(found, best)}; HFU {100 * prediction.hfu[best]:.1f} %.")
    print_paragraph(_interval(found, best))
    if host := float(prediction.memory.host_bytes[best]):
        layout, left = prediction.grid.layout(best), float(prediction.host_headroom_bytes[best])
        ranks = min(layout.world_size, prediction.gpu.gpus_per_node)
        held_in = OFFLOAD_PLACES.get(layout.offload, OFFLOAD_PLACES[Offload.CPU])
        place = f"a node {held_in}, of {ranks * (host + left) / GIB:.0f} there"
        print_paragraph(f"Offloaded: {host / GIB:.1f} GiB a gpu, {ranks * host / GIB:.0f} GiB {place}.")
    if len(found.just_too_large):
        speed = prediction.tokens_per_second_per_gpu
        faster = speed[found.just_too_large[0]] > speed[best]
        print("Faster, but too large by:" if faster else "Too large (and no faster) by:")
        for row in found.just_too_large[:3]:
            print(_line(found, int(row)))


def print_paragraph(text: str) -> None:
    """Print a paragraph in lines of at most `_LINE` characters. Names of layouts and files are not broken."""
    print(textwrap.fill(text, _LINE, break_long_words=False, break_on_hyphens=False))


def _products(prediction: Prediction) -> str:
    """Return the format of the matrix products in which the GPU computes, and the one the recipe has if it differs."""
    if narrow := prediction.recipe.products:
        return f"{narrow.name} (MFU is of {prediction.gpu.name}'s {narrow.arithmetic} peak)"
    asked = prediction.recipe.arithmetic
    used = prediction.gpu.peak_dtype(asked)
    return asked if used == asked else f"{used} ({prediction.gpu.name} has no {asked})"


def _adapters(prediction: Prediction) -> str:
    """Return what LoRA trains, or an empty string without it."""
    rank, frozen = prediction.recipe.adapter_rank, prediction.recipe.frozen_bytes
    if not rank:
        return ""
    kept = "frozen weights" if frozen is None else f"frozen weights of {frozen:.2g} bytes"
    return f"; adapters of rank {rank} are trained beside {kept}"


def _interval(found: Search, row: int) -> str:
    """Return a sentence with the interval of a step time, or that it is unknown."""
    interval = found.prediction.step_seconds_interval
    if interval is None and found.prediction.model.expert_parameters:
        return (
            f"Error bar: none; half of the published runs of mixtures took {MIXTURES_SLOWER} % longer or more "
            "(reports/validation.md)."
        )
    if interval is None and found.prediction.recipe.adapter_rank:
        return "Error bar: none; no run that trains adapters alone has been compared."
    if interval is None:
        return f"Error bar: none; no run has been compared with rates {found.prediction.rates.name}."
    p = found.prediction
    between = "{:.3f} to {:.3f} s".format(*(float(column[row]) for column in interval))
    if not validated_on(p.gpu, p.rates, p.stack):
        return (
            f"Error bar: none of its own, as no run of {p.stack} on {p.gpu.name} has been compared. By runs of its "
            f"rates elsewhere, nine in ten are expected to take {between} (reports/validation.md)."
        )
    return f"Error bar: nine in ten such runs are expected to take {between} (reports/validation.md)."


def _breakdown(found: Search, row: int) -> str:
    """Return where a step's time goes, the largest part first. Parts below half a per cent are left out."""
    prediction = found.prediction
    shares = {part: getattr(prediction.time, part)[row] / prediction.step_seconds[row] for part in PARTS}
    parts = sorted((part for part in PARTS if shares[part] >= 0.005), key=lambda part: -shares[part])
    return ", ".join(f"{part.replace('_', ' ')} {100 * shares[part]:.0f} %" for part in parts)


def _line(found: Search, row: int) -> str:
    """Return a layout's line of the table. An id that is too long has a line of its own before it."""
    p, named = found.prediction, layout_id(found.prediction.grid, row)
    assumption, share = decides(found, row)
    figures = (
        f"{p.grid.micro_batch[row]:4} {p.tokens_per_second_per_gpu[row]:9.1f} {100 * p.mfu[row]:5.1f}% "
        f"{_digits(p.step_seconds[row])} {p.memory_bytes[row] / GIB:6.1f} {found.headroom_bytes(row) / GIB:+6.1f}"
        f"  {assumption} {100 * share:.0f} %{', tight' if p.tight[row] else ''}"
    )
    return f"{named:{_ID_WIDTH}} {figures}" if len(named) <= _ID_WIDTH else f"{named}\n{'':{_ID_WIDTH}} {figures}"


def _of_best_shape(found: Search) -> str:
    """Return a sentence on the other layouts of the best layout's shape."""
    best, *others = (int(row) for row in found.of_shape(int(found.ranked[0])))
    if not others:
        return "No other layout of the best shape fits."
    speed, grid = found.prediction.tokens_per_second_per_gpu, found.prediction.grid
    listed = [f"{layout_id(grid, row)} ({100 * (1 - speed[row] / speed[best]):.1f} % slower)" for row in others[:_LIKE]]
    return f"{pluralize(len(others), 'more layout')} of the best shape fit, such as {' and '.join(listed)}."


def _digits(seconds: float) -> str:
    return f"{seconds:8.3f}" if seconds < 1000 else f"{seconds:8.0f}"


def _about_tight(found: Search) -> str:
    """Explain what tight means, and name the best layout that is not."""
    prediction, best = found.prediction, int(found.ranked[0])
    text = f"tight: less is free than the planner's own error, {100 * MEMORY_ERROR:.0f} % of what is needed"
    roomy = found.ranked[~prediction.tight[found.ranked]]
    if not len(roomy):
        return f"{text}; so is every other"
    speed, other = prediction.tokens_per_second_per_gpu, int(roomy[0])
    slower = 100 * (1.0 - speed[other] / speed[best])
    return f"{text}; the best with room to spare, {layout_id(prediction.grid, other)}, is {slower:.1f} % slower"


def search_json(found: Search, top: int, elapsed: float) -> dict[str, object]:
    """Return the same result as JSON-ready data."""
    rows = [_layout_json(found, int(row)) for row in found.ranked[:top]]
    near = [_layout_json(found, int(row)) for row in found.just_too_large[:3]]
    return {
        "model": found.prediction.model.name,
        "gpu": found.prediction.gpu.name,
        "gpus": int(found.prediction.grid.num_gpus[0]),
        "global_batch": int(found.prediction.grid.global_batch[0]),
        "seq_len": found.prediction.model.seq_len,
        "products": _products(found.prediction),
        "num_examined": found.num_examined,
        "num_fit": len(found.ranked),
        "seconds": round(elapsed, 3),
        "layouts": rows,
        "reason": reason(found),
        "just_too_large": near,
        "rates": provenance(found.prediction.gpu, found.prediction.rates, found.prediction.stack),
    }


def _layout_json(found: Search, row: int) -> dict[str, object]:
    p = found.prediction
    return {
        "layout": dataclasses.asdict(p.grid.layout(row)),
        "id": layout_id(found.prediction.grid, row),
        "ep": int(p.grid.ep[row]),
        "micro_batch": int(p.grid.micro_batch[row]),
        "tight": bool(p.tight[row]),
        "decides": dict(zip(("assumption", "share"), decides(found, row), strict=True)),
        "step_seconds_interval": [float(c[row]) for c in p.step_seconds_interval] if p.step_seconds_interval else None,
        "memory_bytes": float(p.memory_bytes[row]),
        "headroom_bytes": found.headroom_bytes(row),
        "host_bytes": float(p.memory.host_bytes[row]),
        "step_seconds": float(p.step_seconds[row]),
        "tokens_per_second_per_gpu": float(p.tokens_per_second_per_gpu[row]),
        "mfu": float(p.mfu[row]),
        "hfu": float(p.hfu[row]),
        "seconds": {part: float(getattr(p.time, part)[row]) for part in PARTS},
    }
