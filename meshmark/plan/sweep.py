"""Rows of a table of layouts (the columns of baselines/papers/ultrascale_sweep_1b_8b.csv) as models and grids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from meshmark.errors import InputError
from meshmark.model_spec import Family, ModelSpec, llama
from meshmark.plan.grid import Column, Grid, make_grid
from meshmark.plan.papers import Row

DIMENSIONS = ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "tied_embeddings", "seq_len")
DEGREES = ("dp", "tp", "pp", "zero_stage", "micro_batch", "grad_accum")
LAYOUT_COLUMNS = (*DIMENSIONS, *DEGREES, "gpus", "gpu")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of one model on one GPU."""

    model: ModelSpec
    gpu_name: str
    rows: Column
    """Positions in the table."""
    grid: Grid


def batches(table: Sequence[Row]) -> Iterator[Batch]:
    """The table's rows grouped by model and GPU.

    Raises `InputError`, with the row and the column, for a missing column or an impossible value.
    """
    missing = [c for c in LAYOUT_COLUMNS if c not in table[0]]
    if missing:
        raise InputError(f"missing column {', '.join(missing)}; a table of layouts has {', '.join(LAYOUT_COLUMNS)}")
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, row in enumerate(table):
        key = (row.get("model", ""), row["gpu"], *(_integer(row, c, i) for c in DIMENSIONS))
        groups.setdefault(key, []).append(i)
    for (name, gpu_name, *dimensions), rows in groups.items():
        degrees = {c: np.array([_integer(table[i], c, i) for i in rows]) for c in DEGREES}
        _check_gpus(table, rows, degrees)
        grid = make_grid(
            dp=degrees["dp"], tp=degrees["tp"], pp=degrees["pp"], zero_stage=degrees["zero_stage"],
            micro_batch=degrees["micro_batch"], num_micro_batches=degrees["grad_accum"], sequence_parallel=True,
        )  # fmt: skip
        model = _model(str(name), [int(str(d)) for d in dimensions])
        yield Batch(model=model, gpu_name=str(gpu_name), rows=np.array(rows), grid=grid)


def _model(name: str, dimensions: Sequence[int]) -> ModelSpec:
    layers, hidden, heads, kv_heads, ffn_hidden, vocab, tied, seq_len = dimensions
    spec = llama(
        name or "unnamed", layers, hidden, heads, ffn_hidden, num_kv_heads=kv_heads, vocab_size=vocab,
        seq_len=seq_len, tied_embeddings=bool(tied),
    )  # fmt: skip
    assert spec.family is Family.LLAMA
    return spec


def _integer(row: Row, column: str, position: int) -> int:
    """A whole, non-negative cell; degrees and sizes at least one."""
    text = (row.get(column) or "").strip()
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    least = 0 if column in ("zero_stage", "tied_embeddings") else 1
    if value != value or value != int(value) or value < least:
        raise InputError(f"row {position + 2}: {column} is {text!r}, expected a whole number of at least {least}")
    if column == "zero_stage" and value > 3:
        raise InputError(f"row {position + 2}: zero_stage is {text}, expected 0, 1, 2 or 3")
    return int(value)


def _check_gpus(table: Sequence[Row], rows: Sequence[int], degrees: dict[str, Column]) -> None:
    product = degrees["dp"] * degrees["tp"] * degrees["pp"]
    for position, i in enumerate(rows):
        gpus = _integer(table[i], "gpus", i)
        if gpus != product[position]:
            raise InputError(f"row {i + 2}: {gpus} gpus, but dp x tp x pp is {product[position]}; correct one of them")
