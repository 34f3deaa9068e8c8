"""`meshmark predict`: memory and time of every layout in a CSV file, from its layout columns alone."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshmark.errors import InputError
from meshmark.plan.layout_table import batches
from meshmark.plan.prediction import Prediction, predict_grid
from meshmark.plan.rates import Rates, rates
from meshmark.plan.rows import Row, read_rows
from meshmark.plan.step_time import PARTS
from meshmark.spec.hardware import GIB, Gpu, gpu
from meshmark.theory.grid import Column
from meshmark.theory.memory import CATEGORIES
from meshmark.theory.recipe import TrainingRecipe, recipe

DEFAULT_RECIPE = "nanotron"


_NEAREST = {name: "h100" for name in ("h100", "h100-96", "h200", "b200", "b300", "gb200-nvl72", "mi300x")} | {
    "cpu": "cpu"
}
"""Whose rates a GPU takes; the A100's for all others."""


def rates_for(there: Gpu, *, as_measured: bool = False, nearest: str | None = None) -> Rates:
    """The rates that the planner uses on a GPU: fitted where there were measurements, else the nearest GPU's (or those
    of the one that `nearest` names), their bandwidths in proportion to the two datasheets'.

    `as_measured` takes the sweep's cluster with the build it ran, whose pipelines wait for messages on many nodes; a
    search assumes one that does not.
    """
    if as_measured and there == gpu("h100"):
        return rates("h100-sweep")
    nearest = nearest or _NEAREST.get(there.name, "a100")
    given, known = rates(nearest), gpu(nearest)
    inside = there.link_bandwidth / known.link_bandwidth
    across = there.network_bandwidth * there.gpus_per_node / known.network_bandwidth / known.gpus_per_node
    links = given.network
    scaled = dataclasses.replace(
        links,
        tp_bandwidth=links.tp_bandwidth * inside,
        tp_network_bandwidth=links.tp_network_bandwidth * across,
        node_bandwidth=links.node_bandwidth * across,
        p2p_bandwidth=links.p2p_bandwidth * across,
    )
    return dataclasses.replace(given, network=scaled)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is said for all rows at once, in place of what they name."""

    recipe: TrainingRecipe | None = None
    rates: Rates | None = None
    machine: Gpu | None = None


_ROWS_SAY = Setting()


def predict_rows(table: Sequence[Row], setting: Setting = _ROWS_SAY) -> dict[str, Column]:
    """The predicted columns of a table of layouts, in its order.

    Raises `InputError` where neither a row nor the setting names a GPU, or where that GPU's node is not known to have
    what a layout offloads to.
    """
    columns: dict[str, Column] = {}
    for batch in batches(table):
        if not batch.gpu_name and setting.machine is None:
            raise InputError(f"row {batch.rows[0] + 2}: missing column gpu; or give --gpu")
        machine = setting.machine or gpu(batch.gpu_name)
        if machine.host is None and len(offloaded := batch.rows[batch.grid.offload > 0]):
            raise InputError(f"row {offloaded[0] + 2}: what a node of {machine.name} could offload to is not known")
        given = setting.rates or rates_for(machine, as_measured=True)
        using = setting.recipe or batch.recipe or recipe(DEFAULT_RECIPE)
        found = predict_grid(batch.model, batch.grid, machine, using, given)
        for name, column in predicted_columns(found).items():
            columns.setdefault(name, np.zeros(len(table)))[batch.rows] = column
    return columns


def predicted_columns(found: Prediction) -> dict[str, Column]:
    """What `predict` appends: the answers, then their breakdown."""
    answers = {
        "predicted_memory_gib": found.memory_bytes / GIB,
        "predicted_fits": found.fits.astype(float),
        "predicted_tight": found.tight.astype(float),
        "predicted_tokens_per_s_per_gpu": found.tokens_per_second_per_gpu,
        "predicted_step_seconds": found.step_seconds,
        "predicted_mfu_percent": 100.0 * found.mfu,
        "predicted_hfu_percent": 100.0 * found.hfu,
        "predicted_fullest_stage": found.memory.fullest_stage,
    }
    memory = {f"predicted_{name}_gib": getattr(found.memory, name) / GIB for name in CATEGORIES}
    time = {f"predicted_{name}_seconds": getattr(found.time, name) for name in PARTS}
    return {**answers, **memory, **time}


def predict_file(source: Path, target: Path, setting: Setting = _ROWS_SAY) -> int:
    """Read `source`, write it to `target` with the predicted columns appended; returns the number of rows.

    Raises `InputError` when a file cannot be used or a row cannot be a layout.
    """
    table = read_rows(source)
    columns = predict_rows(table, setting)
    fields = [f for f in table[0] if f not in columns] + list(columns)
    try:
        with target.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fields, extrasaction="ignore")
            writer.writeheader()
            for i, row in enumerate(table):
                writer.writerow({**row, **{name: _cell(name, column[i]) for name, column in columns.items()}})
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror or error}") from error
    return len(table)


def _cell(name: str, value: float) -> str:
    whole = name in ("predicted_fits", "predicted_tight", "predicted_fullest_stage")
    return str(int(value)) if whole else f"{value:.6g}"
