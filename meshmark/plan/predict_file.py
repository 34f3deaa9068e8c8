"""`meshmark predict`: memory and time of every layout in a CSV file, from its layout columns alone."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshmark.errors import InputError, refuse_records
from meshmark.models.transformer import Family
from meshmark.plan.frameworks import Framework, default_framework, narrowed_on
from meshmark.plan.gpu_file import named_gpu
from meshmark.plan.layout_table import LayoutRows, batches
from meshmark.plan.overlap import Overlap
from meshmark.plan.prediction import Prediction, predict_grid
from meshmark.plan.provenance import provenance
from meshmark.plan.rates import Rates
from meshmark.plan.rows import Row, read_rows
from meshmark.plan.stacks import rates_for, stack_of
from meshmark.plan.step_time import PARTS
from meshmark.spec.hardware import GIB, Gpu
from meshmark.spec.layout import Offload
from meshmark.theory.grid import OFFLOADS, Column
from meshmark.theory.memory import CATEGORIES
from meshmark.theory.recipe import NARROW, TrainingRecipe, adapted


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings for all rows at once, which override those of the rows."""

    recipe: TrainingRecipe | None = None
    framework: Framework | None = None
    """The framework. Its recipe depends on the generation of each row's GPU."""
    rates: Rates | None = None
    machine: Gpu | None = None
    nearest: str | None = None
    """The GPU whose rates `machine` uses."""
    precision: str | None = None
    """Precision of linear layers in rows that say none."""
    overlap: Overlap = Overlap()


_ROWS_SAY = Setting()


def predict_rows(table: Sequence[Row], setting: Setting = _ROWS_SAY) -> dict[str, Column]:
    """Return the predicted columns of a table of layouts, in the table's order.

    Raises `InputError` if neither a row nor the setting names a GPU, or if a layout offloads to host resources that
    are unknown for the GPU's node.
    """
    columns: dict[str, Column] = {}
    for batch, machine, using, given in _settings(table, setting):
        found = predict_grid(batch.model, batch.grid, machine, using, given)
        for name, column in predicted_columns(found).items():
            columns.setdefault(name, np.zeros(len(table)))[batch.rows] = column
    return columns


def _settings(table: Sequence[Row], setting: Setting) -> Iterator[tuple[LayoutRows, Gpu, TrainingRecipe, Rates]]:
    """Yield each batch of rows with its machine, recipe and rates."""
    narrow = setting.precision if setting.precision and setting.precision in NARROW else ""
    for batch in batches(table, setting.machine, setting.framework, narrow):
        if not batch.gpu_name and setting.machine is None:
            raise InputError(f"row {batch.rows[0] + 2}: missing column gpu; or give --gpu")
        machine = setting.machine or named_gpu(batch.gpu_name)
        leaves = (batch.grid.offload > 0) | (batch.grid.offload_layers > 0)
        if machine.host is None and len(offloaded := batch.rows[leaves]):
            raise InputError(f"row {offloaded[0] + 2}: what a node of {machine.name} could offload to is not known")
        drives = batch.rows[batch.grid.offload == OFFLOADS.index(Offload.NVME)]
        if machine.host and not machine.host.nvme_bytes and len(drives):
            raise InputError(f"row {drives[0] + 2}: which drives a node of {machine.name} has is not known")
        named = setting.framework.recipe_on(machine, batch.model.family) if setting.framework else None
        using = setting.recipe or named or batch.recipe or default_framework(machine).recipe_on(machine, Family.GPT)
        if using.eager and (told := batch.grid.unplanned_by_eager):
            raise InputError(f"row {batch.rows[0] + 2}: {told} is not planned by recipe {using.name!r}")
        stack = stack_of(using.name)
        using = setting.overlap.recipe(using)
        if batch.narrow:
            try:
                using = narrowed_on(machine, using, batch.narrow)
            except InputError as error:
                raise InputError(f"row {batch.rows[0] + 2}: {error}") from error
        try:
            using = adapted(using, batch.lora_rank, batch.model, batch.quantized)
        except InputError as error:
            raise InputError(f"row {batch.rows[0] + 2}: {error}") from error
        yield (
            batch,
            machine,
            using,
            setting.overlap.rates(
                setting.rates or rates_for(machine, stack, as_measured=True, nearest=setting.nearest)
            ),
        )


def rate_origins(table: Sequence[Row], setting: Setting = _ROWS_SAY) -> list[str]:
    """Return the origins of the rates behind a table's predictions, one line each."""
    return list(
        dict.fromkeys(
            provenance(machine, given, stack_of(using.name)) for _, machine, using, given in _settings(table, setting)
        )
    )


def predicted_columns(found: Prediction) -> dict[str, Column]:
    """Return the columns that `predict` appends: the results, then their breakdown."""
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
    interval = found.step_seconds_interval or (np.full(len(found.grid), np.nan),) * 2
    low, high = interval
    answers |= {"predicted_step_seconds_low": low, "predicted_step_seconds_high": high}
    memory = {f"predicted_{name}_gib": getattr(found.memory, name) / GIB for name in CATEGORIES}
    time = {f"predicted_{name}_seconds": getattr(found.time, name) for name in PARTS}
    return {**answers, **memory, **time}


def predict_file(source: Path, target: Path, setting: Setting = _ROWS_SAY) -> int:
    """Read `source` and write it to `target` with the predicted columns appended. Returns the number of rows.

    Raises `InputError` when a file cannot be used, `target` holds records, or a row is not a valid layout.
    """
    refuse_records(target)
    table = read_rows(source)
    columns = predict_rows(table, setting)
    used = {"predicted_gpu": [""] * len(table), "predicted_recipe": [""] * len(table)}
    for batch, machine, using, _ in _settings(table, setting):  # which may be others than the rows name
        for i in batch.rows:
            used["predicted_gpu"][i], used["predicted_recipe"][i] = machine.name, using.name
    fields = [f for f in table[0] if f not in columns and f not in used] + [*used, *columns]
    try:
        with target.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fields, extrasaction="ignore")
            writer.writeheader()
            for i, row in enumerate(table):
                told = {name: texts[i] for name, texts in used.items()}
                writer.writerow({**row, **told, **{name: _cell(name, column[i]) for name, column in columns.items()}})
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror or error}") from error
    return len(table)


def _cell(name: str, value: float) -> str:
    whole = name in ("predicted_fits", "predicted_tight", "predicted_fullest_stage")
    return str(int(value)) if whole else "" if np.isnan(value) else f"{value:.6g}"
