"""Search for the best layout of a model on a number of GPUs, near misses, and the largest model that fits."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshmark.errors import InputError
from meshmark.models.planned_model import PlannedModel
from meshmark.models.transformer import ModelSpec
from meshmark.plan.model_names import model_of_size
from meshmark.plan.prediction import Prediction, predict_grid
from meshmark.plan.rates import Rates
from meshmark.plan.simulator import simulated_bubble_seconds
from meshmark.plan.step_time import PARTS, stage_seconds
from meshmark.spec.hardware import GIB, MOST_GPUS, Gpu
from meshmark.spec.layout import Offload, Recompute, Schedule
from meshmark.spec.workload import MOST_ROWS
from meshmark.theory.grid import (
    MODULES,
    OFFLOADS,
    SCHEDULES,
    Column,
    Grid,
    SearchSpace,
    enumerate_grid,
    joined,
    make_grid,
)
from meshmark.theory.recipe import TrainingRecipe

_DEGREES = ("dp", "tp", "pp", "cp", "ep", "etp", "replicas")
OFFLOAD_PLACES = {Offload.CPU: "in host memory", Offload.NVME: "on NVMe"}


class NothingFitsError(InputError):
    """No layout of the model fits. The message says what is missing, and how many GPUs would be enough."""


class _NoneDividesError(InputError):
    """No layout divides the model and its batch evenly."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """All examined layouts, and the ranking of those that fit."""

    prediction: Prediction
    ranked: Column
    """Positions of the layouts that fit, the fastest first."""
    just_too_large: Column
    """Positions of layouts that do not fit, the smallest shortage first.

    Contains those faster than the best layout, or all if there are none.
    """

    @property
    def num_examined(self) -> int:
        return len(self.prediction.grid)

    @functools.cached_property
    def shapes(self) -> Column:
        """Positions of the fastest layout of each shape, which is its degrees of parallelism, in the order of `ranked`.

        Layouts of one shape differ in their schedule, micro-batches, ZeRO stage or recomputation.
        """
        first: Column = np.sort(np.unique(self._degrees[self.ranked], axis=0, return_index=True)[1])
        return np.take(self.ranked, first)

    def of_shape(self, row: int) -> Column:
        """Return the positions of all layouts that fit and have the shape of `row`, in the order of `ranked`."""
        alike: Column = np.nonzero((self._degrees[self.ranked] == self._degrees[row]).all(axis=1))[0]
        return np.take(self.ranked, alike)

    @functools.cached_property
    def _degrees(self) -> NDArray[np.integer]:
        grid = self.prediction.grid
        return np.stack([np.broadcast_to(getattr(grid, name), len(grid)) for name in _DEGREES], axis=1)

    def headroom_bytes(self, row: int) -> float:
        """Return the memory left on the fullest rank, or in its share of the host's. Negative if it does not fit."""
        return float(self.prediction.headroom_bytes[row])


def search(model: ModelSpec, space: SearchSpace, gpu: Gpu, recipe: TrainingRecipe, rates: Rates) -> Search:
    """Examine every layout of the space.

    Raises `InputError` for an impossible request, and `NothingFitsError` when no layout fits.
    """

    def examine(count: int) -> Prediction:
        return _predict_all(model, dataclasses.replace(space, num_gpus=count), gpu, recipe, rates)

    try:
        prediction = examine(space.num_gpus)
    except _NoneDividesError as error:
        raise InputError(f"{error}; {_larger_batch(model, space, gpu, recipe, rates)}") from error
    fits = np.nonzero(prediction.fits)[0]
    speed = prediction.tokens_per_second_per_gpu
    if not len(fits):
        raise NothingFitsError(_why_nothing_fits(prediction, space, examine))
    ranked = fits[np.argsort(-speed[fits], kind="stable")]
    large = np.nonzero(~prediction.fits)[0]
    faster = large[speed[large] > speed[ranked[0]]]
    near = faster if len(faster) else large
    near = near[np.argsort(-prediction.headroom_bytes[near], kind="stable")]
    return Search(prediction=prediction, ranked=ranked, just_too_large=near)


def simulate_first(found: Search, count: int) -> Search:
    """Rank the first `count` layouts, and the best of as many shapes, with their bubbles from the event simulator.

    The closed form that ranks all layouts is less exact for stages of unequal length (see `pipeline.bubble_seconds`).
    """
    prediction = found.prediction
    is_first = np.isin(found.ranked, np.concatenate([found.ranked[:count], found.shapes[:count]]))
    first = found.ranked[is_first]
    bubble = prediction.time.bubble.copy()
    for row in first[prediction.grid.pp[first] > 1]:
        bubble[row] = simulated_bubble_seconds(prediction.grid.layout(row), stage_times(found, int(row)))
    time = dataclasses.replace(prediction.time, bubble=bubble)
    prediction = dataclasses.replace(prediction, time=time)
    again = first[np.argsort(prediction.step_seconds[first], kind="stable")]
    return dataclasses.replace(found, prediction=prediction, ranked=np.concatenate([again, found.ranked[~is_first]]))


def stage_times(found: Search, row: int) -> list[float]:
    """Return the seconds of one micro-batch on every pipeline stage of one layout."""
    p = found.prediction
    one, pp = p.grid.take(np.array([row])), int(p.grid.pp[row])
    return [float(seconds) for seconds in stage_seconds(p.model, one, pp, p.gpu, p.recipe, p.rates)[:, 0]]


def _predict_all(model: ModelSpec, space: SearchSpace, gpu: Gpu, recipe: TrainingRecipe, rates: Rates) -> Prediction:
    num_gpus, global_batch = space.num_gpus, space.global_batch
    for name, value in (("gpus", num_gpus), ("global batch", global_batch)):
        if value < 1:
            raise InputError(f"{name} is {value}, expected at least 1")
    if num_gpus > MOST_GPUS:
        raise InputError(f"{num_gpus} gpus; at most {MOST_GPUS} are planned for")
    if global_batch > MOST_ROWS:
        raise InputError(f"a global batch of {global_batch} sequences; at most {MOST_ROWS} are planned for")
    for cp in space.contexts or ():
        if cp < 1 or (cp > 1 and model.seq_len % (2 * cp)):
            raise InputError(f"cp is {cp}: a sequence of {model.seq_len} tokens must divide into 2 x cp equal parts")
    if (space.offload is not Offload.NONE or space.fixed.get("offload_layers")) and gpu.host is None:
        raise InputError(f"nothing can be offloaded: the host of a node of {gpu.name} is not known")
    if space.offload is Offload.NVME and gpu.host and not gpu.host.nvme_bytes:
        raise InputError(f"nothing can be offloaded to NVMe: which drives a node of {gpu.name} has is not known")
    grid = enumerate_grid(
        model,
        space,
        max_tp=4 * gpu.gpus_per_node,
        zero_stages=space.zero_stages or _stages_of(recipe),
        ends_count=recipe.cut.ends_count,
    )
    grid = _with_chunks(_with_stages(grid, space), model, space, ends_count=recipe.cut.ends_count)
    if not len(grid):
        raise _NoneDividesError(
            f"no layout of {model.name!r} on {num_gpus} gpus divides {model.num_heads} heads, "
            f"{model.num_layers} layers and a global batch of {global_batch} sequences evenly"
        )
    if isinstance(model, PlannedModel) and model.num_experts:
        grid = _with_experts(grid, model, space.experts)
    elif space.experts and set(space.experts) != {1}:
        raise InputError(f"--ep {','.join(map(str, space.experts))}: {model.name!r} has no experts")
    if len(grid) and space.fixed:
        grid = _with_fixed(grid, model, space.fixed)
        if recipe.eager and (told := grid.unplanned_by_eager):
            raise InputError(f"{told} is not planned by recipe {recipe.name!r}")
    if len(grid) and space.only:
        grid = _chosen(grid, space.only)
    return predict_grid(model, grid, gpu, recipe, rates)


def _with_stages(grid: Grid, space: SearchSpace) -> Grid:
    """Return the layouts, and pipelines of ZeRO 2 or 3 if the user asks for them: torchtitan shards each stage."""
    parts = [grid]
    for stage in space.only.get("zero_stage", ()):
        there = grid.zero_stage[grid.pp > 1]
        if stage >= 2 and stage in (space.zero_stages or ()) and stage not in there and len(there):
            rows = np.nonzero((grid.pp > 1) & (grid.dp * grid.cp > 1) & (grid.zero_stage == there.min()))[0]
            parts.append(dataclasses.replace(grid.take(rows), zero_stage=np.full(len(rows), stage)))
    return joined(parts)


def _with_chunks(grid: Grid, model: ModelSpec, space: SearchSpace, *, ends_count: bool) -> Grid:
    """Return the layouts, and those with the chunks per stage that the user asks for although layers do not divide.

    Frameworks then cut chunks of unequal numbers of layers as the user says (Megatron-Core's
    `pipeline_model_parallel_layout`).
    """
    if Schedule.INTERLEAVED not in space.schedules:
        return grid
    counted = [model.num_layers, *([model.num_layers + 2] if ends_count else [])]
    plain = grid.schedule == SCHEDULES.index(Schedule.ONE_F_ONE_B)
    parts = [grid]
    for chunks in space.only.get("virtual_stages", ()):
        stages = grid.pp * chunks
        even = np.any([count % stages == 0 for count in counted], axis=0)
        fills = (grid.pp > 1) & (grid.num_micro_batches % grid.pp == 0)
        rows = np.nonzero(plain & fills & ~even & (chunks > 1) & (stages <= max(counted)))[0]
        code = np.full(len(rows), SCHEDULES.index(Schedule.INTERLEAVED))
        parts.append(dataclasses.replace(grid.take(rows), virtual_stages=np.full(len(rows), chunks), schedule=code))
    return joined(parts)


def _larger_batch(model: ModelSpec, space: SearchSpace, gpu: Gpu, recipe: TrainingRecipe, rates: Rates) -> str:
    """Return a hint: the smallest doubling of the batch for which a layout fits, if there is one."""
    for doublings in range(1, 13):
        more = dataclasses.replace(space, global_batch=space.global_batch << doublings)
        if more.global_batch > 64 * space.num_gpus:
            break
        try:
            if _predict_all(model, more, gpu, recipe, rates).fits.any():
                return f"so many gpus need more sequences, such as --global-batch {more.global_batch}"
        except InputError:
            continue
    return "try a power of two of gpus, or another batch"


def _with_experts(grid: Grid, model: PlannedModel, degrees: Sequence[int] | None) -> Grid:
    """Return every layout with every expert-parallel degree that divides its ranks and the model's experts."""
    tried = degrees or [ep for ep in (2**k for k in range(12)) if ep <= model.num_experts]
    parts = []
    for ep in tried:
        if model.num_experts % ep == 0:
            part = grid.take(np.nonzero(grid.dp * grid.cp * grid.tp % ep == 0)[0])
            parts.append(dataclasses.replace(part, ep=np.full(len(part), ep)))
    if not any(len(part) for part in parts):
        raise InputError(
            f"--ep {','.join(map(str, tried))}: none divides {model.num_experts} experts of {model.name!r} and the "
            "ranks of a pipeline stage"
        )
    return joined(parts)


def _with_fixed(grid: Grid, model: ModelSpec, fixed: Mapping[str, int]) -> Grid:
    """Return the layouts that can have these values, with them.

    Raises `InputError` if none can, with the value.
    """
    for name, value in fixed.items():
        kept, why = _can_have(grid, model, name, value)
        if not kept.any():
            said = "recompute_num_layers" if name in ("recompute_layers", "recompute_unit") else name
            raise InputError(f"--{said.replace('_', '-')} {value}: in no remaining layout it {why}")
        grid = grid.take(kept)
        grid = dataclasses.replace(grid, **{name: np.full(len(grid), value)})
    return grid


def _can_have(grid: Grid, model: ModelSpec, name: str, value: int) -> tuple[Column, str]:
    """Return which layouts can have a value in a column, and what holds of it there."""
    layers, ranks = model.num_layers, grid.dp * grid.cp
    if name == "replicas":
        return (ranks % value == 0) & (grid.zero_stage > 0), "divides the data-parallel ranks of a ZeRO stage"
    if name == "etp":
        divides: Column = ranks * grid.tp % (grid.ep * value) == 0
        return divides, "divides, with ep, the ranks of a pipeline stage"
    if name == "offload_layers":
        return value <= np.ceil(layers / grid.pp), "is no more than a rank's layers"
    if name == "recompute_modules":
        return grid.recomputes(Recompute.SELECTIVE), "goes with selective recomputation"
    chunk = np.ceil(layers / (grid.pp * grid.virtual_stages))
    return grid.recomputes(Recompute.FULL) & (value <= chunk), "is no more than a chunk's layers"


def _chosen(grid: Grid, only: Mapping[str, Sequence[int]]) -> Grid:
    """Return the layouts with the requested values.

    Raises `InputError` with the available values if there are none.
    """
    for name, values in only.items():
        kept = np.nonzero(np.isin(getattr(grid, name), values))[0]
        if not len(kept):
            there = ", ".join(map(str, np.unique(getattr(grid, name))[:20]))
            option, asked = f"--{name.replace('_', '-')}", ",".join(map(str, values))
            raise InputError(f"{option} {asked}: no remaining layout has it; they have {there}")
        grid = grid.take(kept)
    return grid


def _stages_of(recipe: TrainingRecipe) -> tuple[int, ...]:
    """Return the ZeRO stages of a recipe. FSDP in mixed precision shards either everything or nothing."""
    return (0, 3) if recipe.states.weight_bytes == 4 and recipe.arithmetic != "fp32" else (0, 1, 2, 3)


def _why_nothing_fits(prediction: Prediction, space: SearchSpace, examine: Callable[[int], Prediction]) -> str:
    """Return a message about what is missing, and the smallest number of GPUs on which a layout fits."""
    num_gpus = space.num_gpus
    least = int(prediction.headroom_bytes.argmax())
    missing, needed, where = -prediction.headroom_bytes[least], prediction.needed_bytes[least], "gpu"
    if prediction.host_headroom_bytes[least] == prediction.headroom_bytes[least]:
        ranks = min(num_gpus, prediction.gpu.gpus_per_node)
        missing, needed = ranks * missing, ranks * prediction.memory.host_bytes[least]
        where = f"node {OFFLOAD_PLACES[OFFLOADS[prediction.grid.offload[least]]]}"
    message = (
        f"{prediction.model.name!r} does not fit on {num_gpus} {prediction.gpu.name} with a global batch of "
        f"{space.global_batch}: of {len(prediction.grid)} layouts the smallest ({prediction.grid.layout(least).id}) "
        f"needs {needed / GIB:.1f} GiB a {where}, {missing / GIB:.1f} GiB more than there is"
    )
    fewest = _fewest(num_gpus, prediction.gpu.gpus_per_node, examine)
    if fewest:
        return f"{message}; it fits on {fewest} gpus"
    offloaded = (prediction.grid.offload > 0).all() or prediction.gpu.host is None
    return (
        f"{message}; it fits on no larger number of them that divides this batch: raise the batch, shorten the "
        f"sequences, {'' if offloaded else 'try --offload cpu, '}or take a larger gpu"
    )


def _fewest(too_few: int, gpus_per_node: int, examine: Callable[[int], Prediction]) -> int | None:
    """Return the smallest number of GPUs on which a layout fits, or None.

    Doubles the number first, then searches between the last two in whole nodes (or in eighths of the number if those
    are smaller).
    """

    def fits(count: int) -> bool:
        try:
            return bool(examine(count).fits.any())
        except InputError:
            return False

    limit = min(MOST_GPUS, 4096 * too_few)
    powers = [2**k for k in range(limit.bit_length()) if too_few < 2**k <= limit]
    doubled = [too_few * 2**k for k in range(1, 13) if too_few * 2**k <= limit]
    for enough in sorted({*powers, *doubled}):
        if fits(enough):
            step = max(1, min(gpus_per_node, enough // 8))
            between = range((too_few // step + 1) * step, enough, step)
            return next((count for count in between if fits(count)), enough)
        too_few = enough
    return None


ASSUMPTIONS = {
    "elementwise": "memory rate",
    "tensor_communication": "tp overlap",
    "context_communication": "cp ring",
    "expert_communication": "ep all-to-all",
    "activation_offload": "host link",
    "launch_floor": "launch floor",
    "point_to_point": "pp sends",
    "bubble": "pp bubble",
    "message_wait": "polling",
    "data_communication": "dp overlap",
    "optimizer": "update",
    "host": "host",
}
"""Assumptions about each part of a step beyond the matrix products and attention, which all layouts share."""


def decides(found: Search, row: int) -> tuple[str, float]:
    """Return the assumption that most of a layout's step depends on beyond its products, and its share of the step."""
    prediction = found.prediction
    part = max(ASSUMPTIONS, key=lambda name: getattr(prediction.time, name)[row])
    return ASSUMPTIONS[part], float(getattr(prediction.time, part)[row] / prediction.step_seconds[row])


def layout_id(grid: Grid, row: int) -> str:
    """Return the id of a grid's layout, including the columns that are not in a layout's id."""
    counts = {"replicas": ".replicas", "ep": ".ep", "etp": ".etp", "recompute_unit": ".uniform"}
    found: str = grid.layout(row).id
    found += "".join(
        f"{text}{getattr(grid, name)[row]}" for name, text in counts.items() if getattr(grid, name)[row] > 1
    )
    zeros = {"recompute_layers": ".block", "offload_layers": ".offload_layers"}
    found += "".join(f"{text}{getattr(grid, name)[row]}" for name, text in zeros.items() if getattr(grid, name)[row])
    modules = [module for module in MODULES if grid.repeats(module)[row]]
    return found + (f".{'+'.join(modules)}" if modules else "")


def reason(found: Search) -> str:
    """Explain why the best layout wins: where the next layout of another shape loses time."""
    prediction, grid = found.prediction, found.prediction.grid
    best = int(found.ranked[0])
    others = [int(row) for row in found.shapes[1:]]
    largest = max(PARTS, key=lambda part: getattr(prediction.time, part)[best])
    text = f"most of its step is {largest.replace('_', ' ')}"
    if not others:
        return f"{text}; no other shape fits"
    other = others[0]
    loss = 1.0 - prediction.tokens_per_second_per_gpu[other] / prediction.tokens_per_second_per_gpu[best]
    more = max(PARTS, key=lambda part: getattr(prediction.time, part)[other] - getattr(prediction.time, part)[best])
    return (
        f"{text}; the next shape, {layout_id(grid, other)}, is {100 * loss:.1f} % slower, "
        f"mostly by {more.replace('_', ' ')}"
    )


def max_model(
    space: SearchSpace,
    gpu: Gpu,
    recipe: TrainingRecipe,
    rates: Rates,
    *,
    family: str = "gpt",
    seq_len: int | None = None,
) -> tuple[ModelSpec, Grid, Column]:
    """Return the largest model of a family that fits, with the layouts that hold it and their memory in bytes.

    Sizes rise by 2 %. They are bisected, and then sizes up to a quarter larger are tried, because divisibility does
    not vary evenly with size. Raises `NothingFitsError` when no size fits.
    """
    num_gpus, global_batch = space.num_gpus, space.global_batch
    if num_gpus < 1 or global_batch < 1:
        raise InputError(f"{num_gpus} gpus and a global batch of {global_batch}; expected at least 1 of each")
    sizes = 1e7 * 1.02 ** np.arange(900)

    def fitting(index: int) -> tuple[ModelSpec, Grid, Column]:
        model = model_of_size(float(sizes[index]), family=family)
        model = dataclasses.replace(model, seq_len=seq_len) if seq_len is not None else model
        try:
            found = _predict_all(model, space, gpu, recipe, rates)
        except InputError:
            return model, make_grid(dp=np.zeros(0, dtype=np.int64)), np.zeros(0)
        rows = np.nonzero(found.fits)[0]
        return model, found.grid.take(rows), found.needed_bytes[rows]

    low = next((i for i in range(0, len(sizes), 12) if len(fitting(i)[1])), None)
    if low is None:
        raise NothingFitsError(
            f"no model from 1e7 to {sizes[-1]:.0e} parameters has a layout on {num_gpus} {gpu.name} that divides a "
            f"global batch of {global_batch} and fits; try another batch, or a power of two of gpus"
        )
    high = len(sizes)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if len(fitting(middle)[1]) else (low, middle)
    above = range(min(high + 12, len(sizes) - 1), low, -1)
    return next((found for found in map(fitting, above) if len(found[1])), None) or fitting(low)
