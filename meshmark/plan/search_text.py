"""Format the result of a search as text and as JSON."""

from __future__ import annotations

import dataclasses

from meshmark.plan.prediction import MEMORY_ERROR, Prediction
from meshmark.plan.provenance import provenance
from meshmark.plan.search import OFFLOAD_PLACES, Search, decides, layout_id, reason
from meshmark.plan.step_time import PARTS
from meshmark.spec.hardware import GIB


def print_search(found: Search, top: int, elapsed: float) -> None:
    """Print the table of the best layouts, why the first one wins, and which layouts nearly fit."""
    prediction, model = found.prediction, found.prediction.model
    size = f"{model.num_parameters / 1e9:.3g}B parameters"
    print(f"{model.name} ({size}) on {prediction.grid.num_gpus[0]} {prediction.gpu.name}: {found.num_examined} layouts")
    print(
        f"examined in {elapsed:.2f} s, {len(found.ranked)} fit; global batch {prediction.grid.global_batch[0]}, "
        f"sequences of {model.seq_len:,} tokens, products in {_products(prediction)}"
    )
    print(provenance(prediction.gpu, prediction.rates))
    heads = f"{'tok/s/gpu':>10} {'MFU':>6} {'step s':>9} {'GiB':>7} {'free':>7}  decides"
    width = max(len(layout_id(prediction.grid, int(row))) for row in found.ranked[:top])
    print(f"\n{'layout':{width}} {'micro-batches':>15} {heads}")
    for row in found.ranked[:top]:
        print(_line(found, int(row), width))
    best = int(found.ranked[0])
    if prediction.tight[best]:
        print(_about_tight(found))
    print(f"\nThe best wins because {reason(found)}.")
    print(f"Its step: {_breakdown(found, best)}; HFU {100 * prediction.hfu[best]:.1f} %.")
    print("decides: what is assumed of most of a layout's step beyond its products, and how much of the step that is.")
    print(_interval(found, best))
    if host := float(prediction.memory.host_bytes[best]):
        layout, left = prediction.grid.layout(best), float(prediction.host_headroom_bytes[best])
        ranks = min(layout.world_size, prediction.gpu.gpus_per_node)
        place = f"a node {OFFLOAD_PLACES[layout.offload]}, of {ranks * (host + left) / GIB:.0f} there"
        print(f"Offloaded: {host / GIB:.1f} GiB a gpu, {ranks * host / GIB:.0f} GiB {place}.")
    if len(found.just_too_large):
        speed = prediction.tokens_per_second_per_gpu
        faster = speed[found.just_too_large[0]] > speed[best]
        print("Faster, but too large by:" if faster else "Too large (and no faster) by:")
        near = [int(row) for row in found.just_too_large[:3]]
        width = max(len(layout_id(prediction.grid, row)) for row in near)
        for row in near:
            print(f"  {_line(found, row, width)}")


def _products(prediction: Prediction) -> str:
    """Return the format of the matrix products in which the GPU computes, and the one the recipe has if it differs."""
    if narrow := prediction.recipe.products:
        return f"{narrow.name} (MFU is of {prediction.gpu.name}'s {narrow.arithmetic} peak)"
    asked = prediction.recipe.arithmetic
    used = prediction.gpu.peak_dtype(asked)
    return asked if used == asked else f"{used} ({prediction.gpu.name} has no {asked})"


def _interval(found: Search, row: int) -> str:
    """Return a sentence with the interval of a step time, or that it is unknown."""
    interval = found.prediction.step_seconds_interval
    if interval is None and found.prediction.model.expert_parameters:
        return "No interval: half of the published runs of mixtures took 22 % longer or more (reports/validation.md)."
    if interval is None:
        return f"How far runs are from such a prediction is not known of rates {found.prediction.rates.name}."
    low, high = (float(column[row]) for column in interval)
    return f"Nine in ten such runs are expected to take {low:.3f} to {high:.3f} s a step (reports/validation.md)."


def _breakdown(found: Search, row: int) -> str:
    """Return where a step's time goes, the largest part first. Parts below half a per cent are left out."""
    prediction = found.prediction
    shares = {part: getattr(prediction.time, part)[row] / prediction.step_seconds[row] for part in PARTS}
    parts = sorted((part for part in PARTS if shares[part] >= 0.005), key=lambda part: -shares[part])
    return ", ".join(f"{part.replace('_', ' ')} {100 * shares[part]:.0f} %" for part in parts)


def _line(found: Search, row: int, width: int) -> str:
    """Return a layout's line of the table, with its id in `width` characters."""
    p = found.prediction
    count, size = p.grid.num_micro_batches[row], p.grid.micro_batch[row]
    assumption, share = decides(found, row)
    return (
        f"{layout_id(found.prediction.grid, row):{width}} {f'{count} of {size} seq':>15} "
        f"{p.tokens_per_second_per_gpu[row]:10.1f} {100 * p.mfu[row]:5.1f}% "
        f"{p.step_seconds[row]:9.3f} {p.memory_bytes[row] / GIB:7.1f} {found.headroom_bytes(row) / GIB:+7.1f}"
        f"  {assumption} {100 * share:.0f} %{', tight' if p.tight[row] else ''}"
    )


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
        "rates": provenance(found.prediction.gpu, found.prediction.rates),
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
