"""Rows of a table of layouts (the columns of baselines/papers/ultrascale_sweep_1b_8b.csv) as models and grids."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from meshmark.errors import InputError
from meshmark.plan.rows import Row
from meshmark.spec.hardware import MOST_GPUS
from meshmark.spec.layout import AXES
from meshmark.spec.model_spec import Family, ModelSpec, llama
from meshmark.theory.grid import Column, Grid, make_grid

DIMENSIONS = ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "tied_embeddings", "seq_len")
DEGREES = ("dp", "tp", "pp", "zero_stage", "micro_batch", "grad_accum")
LAYOUT_COLUMNS = (*DIMENSIONS, *DEGREES, "gpus", "gpu")
_LARGEST = 10**9


@dataclass(frozen=True, kw_only=True)
class LayoutRows:
    """Rows of one model on one GPU."""

    model: ModelSpec
    gpu_name: str
    rows: Column
    """Positions in the table."""
    grid: Grid


def batches(table: Sequence[Row]) -> Iterator[LayoutRows]:
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
        degrees["cp"] = np.array([_integer({"cp": "1", **table[i]}, "cp", i) for i in rows])
        _check_gpus(table, rows, degrees)
        grid = make_grid(
            dp=degrees["dp"],
            tp=degrees["tp"],
            pp=degrees["pp"],
            zero_stage=degrees["zero_stage"],
            cp=degrees["cp"],
            micro_batch=degrees["micro_batch"],
            num_micro_batches=degrees["grad_accum"],
            sequence_parallel=True,
        )
        model = _model(str(name), [int(str(d)) for d in dimensions])
        _check_shards(model, rows, degrees)
        yield LayoutRows(model=model, gpu_name=str(gpu_name), rows=np.array(rows), grid=grid)


def _model(name: str, dimensions: Sequence[int]) -> ModelSpec:
    layers, hidden, heads, kv_heads, ffn_hidden, vocab, tied, seq_len = dimensions
    spec = llama(
        name or "unnamed",
        layers,
        hidden,
        heads,
        ffn_hidden,
        num_kv_heads=kv_heads,
        vocab_size=vocab,
        seq_len=seq_len,
        tied_embeddings=bool(tied),
    )
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
    if not (least <= value < float("inf")) or value != int(value):
        raise InputError(f"row {position + 2}: {column} is {text[:40]!r}, expected a whole number of at least {least}")
    if column == "zero_stage" and value > 3:
        raise InputError(f"row {position + 2}: zero_stage is {text}, expected 0, 1, 2 or 3")
    if column == "tied_embeddings" and value > 1:
        raise InputError(f"row {position + 2}: tied_embeddings is {text}, expected 0 or 1")
    if value > (most := MOST_GPUS if column in (*AXES, "gpus") else _LARGEST):
        raise InputError(f"row {position + 2}: {column} is {text[:40]}, more than {most}: is its unit right?")
    return int(value)


def _check_gpus(table: Sequence[Row], rows: Sequence[int], degrees: dict[str, Column]) -> None:
    for position, i in enumerate(rows):
        product = math.prod(int(degrees[axis][position]) for axis in AXES)  # not in 64 bits
        gpus = _integer(table[i], "gpus", i)
        if gpus != product:
            names = "dp x tp x pp x cp" if "cp" in table[i] else "dp x tp x pp"
            raise InputError(f"row {i + 2}: {gpus} gpus, but {names} is {product}; correct one of them")


def _check_shards(model: ModelSpec, rows: Sequence[int], degrees: dict[str, Column]) -> None:
    """Tensor parallelism must divide heads and feed-forward width; more stages than layers only never fit."""
    for name in ("num_heads", "num_kv_heads", "ffn_hidden"):
        size = getattr(model, name)
        wrong = np.nonzero(size % degrees["tp"])[0]
        if len(wrong):
            tp = degrees["tp"][wrong[0]]
            raise InputError(f"row {rows[wrong[0]] + 2}: tp {tp} does not divide {name} {size} of {model.name!r}")


def remarks(table: Sequence[Row]) -> list[str]:
    """What is odd about a table's rows but does not keep them from being predicted."""
    stages, batch = [], []
    for i, row in enumerate(table):
        if int(float(row["pp"])) > int(float(row["layers"])):
            stages.append(i + 2)
        given = (row.get("global_batch") or "").strip()
        product = int(float(row["dp"])) * int(float(row["micro_batch"])) * int(float(row["grad_accum"]))
        if given and given != str(product):
            batch.append(i + 2)
    out = []
    if stages:
        out.append(f"{_named(stages)}: more pipeline stages than layers; predicted_fits is 0")
    if batch:
        out.append(f"{_named(batch)}: global_batch is not dp x micro_batch x grad_accum; that product is predicted")
    return out


def _named(rows: Sequence[int]) -> str:
    """The first of some rows and how many there are."""
    return f"row {rows[0]}" if len(rows) == 1 else f"row {rows[0]} and {len(rows) - 1} more"
