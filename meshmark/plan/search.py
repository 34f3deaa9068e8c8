"""The best layout for a model on a number of GPUs, what nearly fits, and the largest model that does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshmark.errors import InputError
from meshmark.layout import Recompute
from meshmark.model_spec import ModelSpec
from meshmark.plan.grid import Column, Grid, enumerate_grid
from meshmark.plan.memory import memory
from meshmark.plan.models import model_of_size
from meshmark.plan.prediction import Prediction, predict_grid
from meshmark.plan.rates import Rates
from meshmark.plan.recipe import TrainingRecipe
from meshmark.plan.step_time import PARTS
from meshmark.plan.system import GIB, Gpu

_RECOMPUTES = (Recompute.NONE, Recompute.FULL)
_MAX_GPUS = 2**20


class NothingFitsError(InputError):
    """No layout of the model fits; the message says what is missing and from how many GPUs on one would fit."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """Every layout examined, and the order of those that fit."""

    prediction: Prediction
    ranked: Column
    """Positions of the layouts that fit, the fastest first."""
    just_too_large: Column
    """Positions of layouts that do not fit, those missing least first, faster than the best."""

    @property
    def num_examined(self) -> int:
        return len(self.prediction.grid)

    def headroom_bytes(self, row: int) -> float:
        """Memory left on the fullest rank; negative where it does not fit."""
        return float(self.prediction.gpu.memory_bytes - self.prediction.needed_bytes[row])


def search(
    model: ModelSpec, num_gpus: int, global_batch: int, gpu: Gpu, recipe: TrainingRecipe, rates: Rates,
    *, recomputes: Sequence[Recompute] = _RECOMPUTES,
) -> Search:  # fmt: skip
    """Examine every layout.

    Raises `InputError` for an impossible request, `NothingFitsError` when no layout fits.
    """
    prediction = _predict_all(model, num_gpus, global_batch, gpu, recipe, rates, recomputes)
    fits = np.nonzero(prediction.fits)[0]
    speed = prediction.tokens_per_second_per_gpu
    if not len(fits):
        raise NothingFitsError(_why_nothing_fits(prediction, num_gpus, global_batch, recipe, rates, recomputes))
    ranked = fits[np.argsort(-speed[fits], kind="stable")]
    faster = np.nonzero(~prediction.fits & (speed > speed[ranked[0]]))[0]
    near = faster[np.argsort(prediction.needed_bytes[faster], kind="stable")]
    return Search(prediction=prediction, ranked=ranked, just_too_large=near)


def _predict_all(
    model: ModelSpec, num_gpus: int, global_batch: int, gpu: Gpu, recipe: TrainingRecipe, rates: Rates,
    recomputes: Sequence[Recompute],
) -> Prediction:  # fmt: skip
    for name, value in (("gpus", num_gpus), ("global batch", global_batch)):
        if value < 1:
            raise InputError(f"{name} is {value}, expected at least 1")
    if num_gpus > _MAX_GPUS:
        raise InputError(f"{num_gpus} gpus; at most {_MAX_GPUS} are planned for")
    grid = enumerate_grid(
        model, num_gpus, global_batch, max_tp=4 * gpu.gpus_per_node, recomputes=recomputes,
        zero_stages=(0, 3) if recipe.weight_bytes == 4 and recipe.arithmetic != "fp32" else (0, 1, 2, 3),
    )  # fmt: skip
    if not len(grid):
        raise InputError(
            f"no layout of {model.name!r} on {num_gpus} gpus divides {model.num_heads} heads, "
            f"{model.num_layers} layers and a global batch of {global_batch} sequences evenly; "
            "try a power of two of gpus, or another batch"
        )
    return predict_grid(model, grid, gpu, recipe, rates)


def _why_nothing_fits(
    prediction: Prediction, num_gpus: int, global_batch: int, recipe: TrainingRecipe, rates: Rates,
    recomputes: Sequence[Recompute],
) -> str:  # fmt: skip
    """What is missing, and the smallest number of GPUs, by doubling, on which a layout fits."""
    least = int(prediction.needed_bytes.argmin())
    missing = (prediction.needed_bytes[least] - prediction.gpu.memory_bytes) / GIB
    message = (
        f"{prediction.model.name!r} does not fit on {num_gpus} {prediction.gpu.name} with a global batch of "
        f"{global_batch}: of {len(prediction.grid)} layouts the smallest ({prediction.grid.layout(least).id}) needs "
        f"{prediction.needed_bytes[least] / GIB:.1f} GiB a gpu, {missing:.1f} GiB more than there is"
    )
    more = 2 * num_gpus
    while more <= min(_MAX_GPUS, 4096 * num_gpus):
        try:
            larger = _predict_all(prediction.model, more, global_batch, prediction.gpu, recipe, rates, recomputes)
        except InputError:
            return f"{message}; no larger number of gpus divides this batch: raise the batch"
        if larger.fits.any():
            fewest = _fewest(larger, more // 2, more, global_batch, recipe, rates, recomputes)
            return f"{message}; it fits on {fewest} gpus"
        more *= 2
    return f"{message}; it fits on no number of them: ask for full recomputation, offload, or a larger gpu"


def _fewest(
    larger: Prediction, too_few: int, enough: int, global_batch: int, recipe: TrainingRecipe, rates: Rates,
    recomputes: Sequence[Recompute],
) -> int:  # fmt: skip
    """The smallest number between two powers of two, in whole nodes, on which a layout fits."""
    step = max(1, min(larger.gpu.gpus_per_node, enough // 8))
    for count in range(too_few + step, enough, step):
        try:
            if _predict_all(larger.model, count, global_batch, larger.gpu, recipe, rates, recomputes).fits.any():
                return count
        except InputError:
            continue
    return enough


def reason(found: Search) -> str:
    """Why the best layout wins: where the runner-up of another shape, and the plainest layout that fits, lose time."""
    prediction, grid = found.prediction, found.prediction.grid
    best = int(found.ranked[0])
    shape = (grid.dp[best], grid.tp[best], grid.pp[best])
    others = [int(r) for r in found.ranked[1:] if (grid.dp[r], grid.tp[r], grid.pp[r]) != shape]
    largest = max(PARTS, key=lambda part: getattr(prediction.time, part)[best])
    text = f"most of its step is {largest.replace('_', ' ')}"
    if not others:
        return f"{text}; no other shape fits"
    other = others[0]
    loss = 1.0 - prediction.tokens_per_second_per_gpu[other] / prediction.tokens_per_second_per_gpu[best]
    more = max(PARTS, key=lambda part: getattr(prediction.time, part)[other] - getattr(prediction.time, part)[best])
    return (
        f"{text}; the next shape, {grid.layout(other).id}, is {100 * loss:.1f} % slower, "
        f"mostly by {more.replace('_', ' ')}"
    )


def max_model(
    num_gpus: int, global_batch: int, gpu: Gpu, recipe: TrainingRecipe, rates: Rates, *, family: str = "gpt"
) -> tuple[ModelSpec, Grid, Column]:
    """The largest model of a family that fits, with the layouts that hold it and their memory; found by bisection.

    Raises `NothingFitsError` when not even 10 million parameters fit.
    """

    def fitting(size: float) -> tuple[ModelSpec, Grid, Column]:
        model = model_of_size(size, family=family)
        grid = enumerate_grid(
            model, num_gpus, global_batch, max_tp=4 * gpu.gpus_per_node, recomputes=_RECOMPUTES, max_virtual_stages=1
        )
        held = memory(model, grid, recipe, rates).total_bytes if len(grid) else np.zeros(0)
        rows = np.nonzero(held <= gpu.memory_bytes)[0]
        return model, grid.take(rows), held[rows]

    if num_gpus < 1 or global_batch < 1:
        raise InputError(f"{num_gpus} gpus and a global batch of {global_batch}; expected at least 1 of each")
    sizes = 1e7 * 1.02 ** np.arange(900)
    low, high = 0, len(sizes) - 1
    best = fitting(float(sizes[0]))
    if not len(best[1]):
        raise NothingFitsError(f"not even a model of 1e7 parameters fits on {num_gpus} {gpu.name}")
    while high - low > 1:
        middle = (low + high) // 2
        candidate = fitting(float(sizes[middle]))
        low, high, best = (middle, high, candidate) if len(candidate[1]) else (low, middle, best)
    return best
