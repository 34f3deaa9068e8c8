"""Convert rows of a layout table (columns as in baselines/papers/ultrascale_sweep_1b_8b.csv) to models and grids."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from meshmark.errors import InputError
from meshmark.models.planned_model import PlannedModel
from meshmark.models.transformer import Family, ModelSpec
from meshmark.plan.frameworks import Asked, Framework, framework, recipe_of
from meshmark.plan.gpu_file import named_gpu
from meshmark.plan.layout_columns import (
    DEGREES,
    DIMENSIONS,
    Beyond,
    cell,
    expect_known,
    integer,
    layout_of,
    model_of,
    narrow_of,
    recomputation_of,
)
from meshmark.plan.model_names import known_models, size_note
from meshmark.plan.rows import Row
from meshmark.spec.hardware import MOST_GPUS, Gpu
from meshmark.spec.layout import AXES, Layout
from meshmark.theory.grid import OFFLOADS, RECOMPUTES, SCHEDULES, Column, Grid, make_grid
from meshmark.theory.recipe import TrainingRecipe, recipe

_Read = TypeVar("_Read")


@dataclass(frozen=True, kw_only=True)
class LayoutRows:
    """Rows of one model on one GPU with one recipe."""

    model: ModelSpec
    gpu_name: str
    """Name of the GPU. Empty if the table does not name one."""
    recipe: TrainingRecipe | None
    """The recipe, or None if the table does not name one."""
    narrow: str
    """Precision of products narrower than 16 bits, or an empty string."""
    lora_rank: int
    """Rank of LoRA's adapters. 0 trains everything."""
    quantized: str
    """Format of the frozen weights beside adapters, or empty."""
    rows: Column
    """Positions in the table."""
    grid: Grid


def batches(
    table: Sequence[Row], machine: Gpu | None = None, of_all: Framework | None = None, narrow: str = ""
) -> Iterator[LayoutRows]:
    """Group the table's rows by model, GPU and recipe.

    `machine` and `of_all` override the GPU and the framework of rows. `narrow` is the precision of rows without one.
    Raises `InputError` for an unknown column, and for anything missing or impossible, with its row and column. An
    example is a layout that the framework does not support.
    """
    expect_known(list(table[0]))
    model, layout = _once(model_of, ("model", *DIMENSIONS)), _once(layout_of, ("layout", *DEGREES))
    groups: dict[tuple[ModelSpec, str, TrainingRecipe | None, str, int, str], list[tuple[int, Layout]]] = {}
    for i, row in enumerate(table):
        spec = model(row, i)
        rank = integer(row, "lora_rank", i, usual=0, least=0)
        using, quantized = _recipe_of(row, i, machine, spec.family), cell(row, "quantize")
        products = narrow_of(row, i) if cell(row, "precision") else narrow
        key = (spec, cell(row, "gpu"), using, products, rank, quantized)
        laid = layout(row, i)
        of = of_all or _framework_of(row)
        if of and (told := of.beyond(laid, _asked(row, i, rank, products))):
            raise InputError(f"row {i + 2}: {told}; name another framework, or only a recipe")
        groups.setdefault(key, []).append((i, laid))
    for (spec, gpu_name, using, products, rank, quantized), members in groups.items():
        rows = [i for i, _ in members]
        grid = _grid(
            [layout for _, layout in members],
            [_beyond(table[i], i, layout, spec) for i, layout in members],
        )
        _check_gpus(table, rows, grid)
        _check_shards(spec, rows, grid)
        yield LayoutRows(
            model=spec,
            gpu_name=gpu_name,
            recipe=using,
            narrow=products,
            lora_rank=rank,
            quantized=quantized,
            rows=np.array(rows),
            grid=grid,
        )


def _asked(row: Row, position: int, lora_rank: int, narrow: str) -> Asked:
    """Return what a row asks of its framework besides a layout."""
    return Asked(
        experts=integer(row, "ep", position, usual=1),
        recompute_layers=bool(cell(row, "recompute_num_layers")),
        recompute_modules=bool(cell(row, "recompute_modules")),
        offload_layers=integer(row, "offload_layers", position, usual=0, least=0) > 0,
        lora=lora_rank > 0,
        quantized=bool(cell(row, "quantize")),
        precision=narrow,
    )


def _beyond(row: Row, position: int, layout: Layout, spec: ModelSpec) -> Beyond:
    ep, etp = _experts(row, position, layout, spec)
    return Beyond(
        micro_batch=integer(row, "micro_batch", position, usual=1),
        replicas=_replicas(row, position, layout),
        ep=ep,
        etp=etp,
        **recomputation_of(row, position, layout, spec),
    )


def _once(read: Callable[[Row, int], _Read], columns: Sequence[str]) -> Callable[[Row, int], _Read]:
    """Return `read` with a cache, because many rows repeat the same cells."""
    known: dict[tuple[str, ...], _Read] = {}

    @functools.wraps(read)
    def one(row: Row, position: int) -> _Read:
        key = tuple(cell(row, column) for column in columns)
        if key not in known:
            known[key] = read(row, position)
        return known[key]

    return one


def _recipe_of(row: Row, position: int, machine: Gpu | None, family: Family) -> TrainingRecipe | None:
    named, of = cell(row, "recipe"), cell(row, "framework")
    try:
        if not of:
            return recipe(named) if named else None
        there = machine or (named_gpu(cell(row, "gpu")) if cell(row, "gpu") else None)
        using = recipe_of(of, there, family)
        if named and using.name != named:
            raise InputError(f"recipe {named!r} is not framework {of!r}'s, {using.name!r}; leave one empty")
        return using
    except InputError as error:
        raise InputError(f"row {position + 2}: {error}") from error


def _replicas(row: Row, position: int, layout: Layout) -> int:
    """Return the groups of data-parallel ranks that each hold all shards."""
    count = integer(row, "replicas", position, usual=1)
    if (layout.dp * layout.cp) % count:
        raise InputError(f"row {position + 2}: {count} replicas do not divide dp {layout.dp} x cp {layout.cp}")
    if count > 1 and not layout.zero_stage:
        raise InputError(f"row {position + 2}: {count} replicas, but zero_stage is 0, which shards nothing")
    return count


def _experts(row: Row, position: int, layout: Layout, spec: ModelSpec) -> tuple[int, int]:
    """Return the expert-parallel degree and the tensor-parallel degree of each expert."""
    ep, etp = (integer(row, column, position, usual=1) for column in ("ep", "etp"))
    told = invalid_experts(spec, ep, etp, layout.dp * layout.cp * layout.tp)
    if told:
        raise InputError(f"row {position + 2}: {told}")
    return ep, etp


def invalid_experts(spec: ModelSpec, ep: int, etp: int, ranks: int) -> str:
    """Return why a model's experts cannot be divided this way over `ranks` ranks of a stage. Empty if they can."""
    count = spec.num_experts if isinstance(spec, PlannedModel) else 0
    if ep * etp == 1:
        return ""
    if not count:
        return f"ep {ep} and etp {etp}, but {spec.name!r} has no experts"
    if count % ep:
        return f"ep {ep} does not divide {count} experts of {spec.name!r}"
    return "" if ranks % (ep * etp) == 0 else f"ep {ep} x etp {etp} do not divide dp x cp x tp, {ranks}"


def _grid(
    layouts: Sequence[Layout],
    others: Sequence[Beyond],
) -> Grid:
    codes: Mapping[str, Sequence[object]] = {"schedule": SCHEDULES, "recompute": RECOMPUTES, "offload": OFFLOADS}
    columns = {
        field: np.array(
            [codes[field].index(v) if field in codes else v for v in (getattr(one, field) for one in layouts)]
        )
        for field in DEGREES.values()
    }
    names = [field.name for field in dataclasses.fields(Beyond)]
    beside = {name: np.array([getattr(one, name) for one in others]) for name in names}
    return make_grid(**columns, **beside)


def _check_gpus(table: Sequence[Row], rows: Sequence[int], grid: Grid) -> None:
    for position, i in enumerate(rows):
        product = int(np.prod([getattr(grid, axis)[position] for axis in AXES], dtype=float))
        gpus = integer(table[i], "gpus", i, usual=product)
        if gpus != product:
            raise InputError(f"row {i + 2}: {gpus} gpus, but dp x tp x pp x cp is {product}; correct one of them")
        if product > MOST_GPUS:
            raise InputError(f"row {i + 2}: dp x tp x pp x cp is {product}; at most {MOST_GPUS} gpus are planned for")


def _check_shards(model: ModelSpec, rows: Sequence[int], grid: Grid) -> None:
    """Raise `InputError` unless the shards divide evenly.

    Tensor parallelism must divide heads and feed-forward width. Context parallelism must divide the sequence into two
    parts per rank. More stages than layers are allowed, but never fit.
    """
    for name in ("num_heads", "num_kv_heads", "ffn_hidden"):
        size = getattr(model, name)
        wrong = np.nonzero(size % grid.tp)[0]
        if len(wrong):
            tp = grid.tp[wrong[0]]
            raise InputError(f"row {rows[wrong[0]] + 2}: tp {tp} does not divide {name} {size} of {model.name!r}")
    wrong = np.nonzero((grid.cp > 1) & (model.seq_len % (2 * grid.cp) > 0))[0]
    if len(wrong):
        cp = grid.cp[wrong[0]]
        raise InputError(f"row {rows[wrong[0]] + 2}: a sequence of {model.seq_len} does not divide into 2 x cp {cp}")


def remarks(table: Sequence[Row]) -> list[str]:
    """Return remarks on rows that are unusual but can be predicted."""
    stages, sizes, ungated = [], [], []
    known = known_models()
    for batch in batches(table):
        product = batch.grid.global_batch
        for position, i in enumerate(batch.rows):
            given = cell(table[i], "global_batch")
            if batch.grid.pp[position] * batch.grid.virtual_stages[position] > batch.model.num_layers + 2:
                stages.append(int(i) + 2)
            if given and given != str(product[position]):
                sizes.append(int(i) + 2)
            if cell(table[i], "layers") and not cell(table[i], "family") and cell(table[i], "model") not in known:
                ungated.append(int(i) + 2)
    named = dict.fromkeys(cell(row, "model") for row in table if not cell(row, "layers") and not cell(row, "hidden"))
    out = [told for name in named if name and (told := size_note(name))]
    if stages:
        out.append(f"{_named(sorted(stages))}: more pipeline stages than layers; predicted_fits is 0")
    if sizes:
        out.append(
            f"{_named(sorted(sizes))}: global_batch is not dp x micro_batch x grad_accum; "
            "that product is predicted, not what the column says"
        )
    if ungated:
        out.append(
            f"{_named(sorted(ungated))}: no family, so taken for llama (gated); a column family says gpt or llama"
        )
    return out


def _framework_of(row: Row) -> Framework | None:
    return framework(cell(row, "framework")) if cell(row, "framework") else None


def _named(rows: Sequence[int]) -> str:
    """Return the first of some rows and how many more there are."""
    return f"row {rows[0]}" if len(rows) == 1 else f"row {rows[0]} and {len(rows) - 1} more"
