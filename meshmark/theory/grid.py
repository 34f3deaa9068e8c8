"""Many layouts of one model as columns, so that every formula evaluates all of them at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from meshmark.errors import InputError
from meshmark.models.transformer import ModelSpec
from meshmark.spec.layout import AXES, Axis, Layout, Offload, Recompute, RecomputeModule, Schedule

Column = npt.NDArray[Any]

SCHEDULES = tuple(Schedule)
RECOMPUTES = tuple(Recompute)
OFFLOADS = tuple(Offload)
MODULES = tuple(RecomputeModule)
SEARCHED_SCHEDULES = (Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED)
"""Schedules that most frameworks have. GPipe holds more memory for the same bubble, and few have zero bubble."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Columns of equal length, one layout per row. Enums are stored as positions in `SCHEDULES` and so on."""

    dp: Column
    tp: Column
    pp: Column
    cp: Column
    zero_stage: Column
    micro_batch: Column
    """Sequences in one micro-batch of one replica."""
    num_micro_batches: Column
    virtual_stages: Column
    sequence_parallel: Column
    schedule: Column
    recompute: Column
    offload: Column
    dp_rank: Column
    """The data-parallel rank whose memory is computed, if ranks hold different amounts. -1 is the fullest."""
    replicas: Column
    """Groups of neighbouring data-parallel ranks that each hold all shards (HSDP, or ZeRO within a group)."""
    ep: Column
    """Expert-parallel degree: ranks of data, context and tensor parallelism that a layer's experts are divided over."""
    etp: Column
    """Tensor-parallel degree of each expert."""
    recompute_layers: Column
    """Layers of each chunk that full recomputation repeats, the others keep everything (Megatron's method `block`).

    0 means all.
    """
    recompute_unit: Column
    """Layers from one input that full recomputation keeps to the next (Megatron's method `uniform`)."""
    recompute_modules: Column
    """Modules that selective recomputation repeats, as a sum of `module_code`. 0 means what the recipe repeats."""
    offload_layers: Column
    """Layers of a rank whose activations are in host memory between their forward and their backward pass."""

    def __len__(self) -> int:
        return len(self.dp)

    @property
    def num_gpus(self) -> Column:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def data_ranks(self) -> Column:
        """Ranks that train on different tokens and reduce their gradients: data- and context-parallel ones."""
        return self.dp * self.cp

    @property
    def shards(self) -> Column:
        """Ranks that ZeRO's shards are divided over."""
        found: Column = self.dp * self.cp // self.replicas
        return found

    @property
    def expert_shards(self) -> Column:
        """Ranks that hold the same experts, which ZeRO's shards of them are divided over."""
        found: Column = np.maximum(self.dp * self.cp * self.tp // (self.ep * self.etp) // self.replicas, 1)
        return found

    @property
    def global_batch(self) -> Column:
        """Sequences in one optimizer step."""
        return self.dp * self.micro_batch * self.num_micro_batches

    @property
    def unplanned_by_eager(self) -> str:
        """Name of a column that says something and that formulas of eager kernels do not read. Empty if there is
        none.
        """
        usual = {"recompute_layers": 0, "recompute_unit": 1, "recompute_modules": 0, "offload_layers": 0}
        return next((name for name, value in usual.items() if (getattr(self, name) != value).any()), "")

    def recomputes(self, kind: Recompute) -> Column:
        """Return where recomputation is of this kind."""
        found: Column = self.recompute == RECOMPUTES.index(kind)
        return found

    def repeats(self, module: RecomputeModule) -> Column:
        """Return where selective recomputation repeats `module`."""
        found: Column = (self.recompute_modules & module_code([module])) > 0
        return found

    def take(self, rows: Column) -> Grid:
        """Return the rows at these positions, or where a boolean column is true."""
        return Grid(**{f.name: getattr(self, f.name)[rows] for f in dataclasses.fields(self)})

    def by_pipeline(self) -> Iterator[tuple[int, Column]]:
        """Yield each pipeline degree with the positions of its rows, whose stages form a second dimension of equal
        length.
        """
        for pp in np.unique(self.pp):
            yield int(pp), np.nonzero(self.pp == pp)[0]

    def layout(self, row: int) -> Layout:
        """Return one row as a `Layout`."""
        return Layout(
            dp=int(self.dp[row]),
            tp=int(self.tp[row]),
            pp=int(self.pp[row]),
            cp=int(self.cp[row]),
            zero_stage=int(self.zero_stage[row]),
            num_micro_batches=int(self.num_micro_batches[row]),
            schedule=SCHEDULES[self.schedule[row]],
            virtual_stages=int(self.virtual_stages[row]),
            sequence_parallel=bool(self.sequence_parallel[row]),
            recompute=RECOMPUTES[self.recompute[row]],
            offload=OFFLOADS[self.offload[row]],
        )


class GridColumns(TypedDict, total=False):
    """Arguments of `make_grid`: one value for all rows, or one per row."""

    dp: npt.ArrayLike
    tp: npt.ArrayLike
    pp: npt.ArrayLike
    cp: npt.ArrayLike
    zero_stage: npt.ArrayLike
    micro_batch: npt.ArrayLike
    num_micro_batches: npt.ArrayLike
    virtual_stages: npt.ArrayLike
    sequence_parallel: npt.ArrayLike
    schedule: npt.ArrayLike
    recompute: npt.ArrayLike
    offload: npt.ArrayLike
    dp_rank: npt.ArrayLike
    replicas: npt.ArrayLike
    ep: npt.ArrayLike
    etp: npt.ArrayLike
    recompute_layers: npt.ArrayLike
    recompute_unit: npt.ArrayLike
    recompute_modules: npt.ArrayLike
    offload_layers: npt.ArrayLike


def module_code(modules: Iterable[RecomputeModule]) -> int:
    """Return a set of modules as a number, one bit each, for `Grid.recompute_modules`."""
    return sum(1 << MODULES.index(module) for module in set(modules))


def make_grid(**columns: Unpack[GridColumns]) -> Grid:
    """Return a grid from the given columns.

    Scalars are repeated. Missing columns default to one device, 1F1B and nothing else. Raises `InputError` for a
    degree below one.
    """
    defaults: GridColumns = {
        "dp": 1,
        "tp": 1,
        "pp": 1,
        "cp": 1,
        "zero_stage": 0,
        "micro_batch": 1,
        "num_micro_batches": 1,
        "virtual_stages": 1,
        "sequence_parallel": False,
        "schedule": SCHEDULES.index(Schedule.ONE_F_ONE_B),
        "recompute": 0,
        "offload": 0,
        "dp_rank": -1,
        "replicas": 1,
        "ep": 1,
        "etp": 1,
        "recompute_layers": 0,
        "recompute_unit": 1,
        "recompute_modules": 0,
        "offload_layers": 0,
    }
    if unknown := set(columns) - set(defaults):
        raise InputError(f"a grid has no column {', '.join(sorted(unknown))}; it has {', '.join(defaults)}")
    given: dict[str, Any] = {**defaults, **columns}
    arrays = np.broadcast_arrays(*(np.atleast_1d(np.asarray(v)) for v in given.values()))
    grid = Grid(
        **{
            k: np.array(a, dtype=bool if k == "sequence_parallel" else np.int64)
            for k, a in zip(defaults, arrays, strict=True)
        }
    )
    for name in (
        "dp",
        "tp",
        "pp",
        "cp",
        "micro_batch",
        "num_micro_batches",
        "virtual_stages",
        "replicas",
        "ep",
        "etp",
        "recompute_unit",
    ):
        if len(grid) and (low := int(getattr(grid, name).min())) < 1:
            raise InputError(f"{name} is {low} in a layout, expected at least 1")
    return grid


def layout_grid(layout: Layout, global_batch: int, dp_rank: int = -1) -> Grid:
    """Return the grid of one row: `layout`, with `global_batch` sequences per step."""
    return make_grid(
        dp=layout.dp,
        tp=layout.tp,
        pp=layout.pp,
        cp=layout.cp,
        zero_stage=layout.zero_stage,
        num_micro_batches=layout.num_micro_batches,
        virtual_stages=layout.virtual_stages,
        sequence_parallel=layout.sequence_parallel,
        micro_batch=global_batch // (layout.dp * layout.num_micro_batches),
        schedule=SCHEDULES.index(layout.schedule),
        recompute=RECOMPUTES.index(layout.recompute),
        offload=OFFLOADS.index(layout.offload),
        dp_rank=dp_rank,
    )


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """The layouts to search."""

    num_gpus: int
    global_batch: int
    """Sequences in one optimizer step."""
    recomputes: Sequence[Recompute] = RECOMPUTES
    offload: Offload = Offload.NONE
    schedules: Sequence[Schedule] = SEARCHED_SCHEDULES
    contexts: Sequence[int] | None = None
    """Context-parallel degrees. None means those worth a search at the model's sequence length."""
    axes: Sequence[Axis] = AXES
    """Axes whose degrees may exceed one."""
    zero_stages: Sequence[int] | None = None
    """ZeRO stages. None means those that the recipe supports."""
    experts: Sequence[int] | None = None
    """Expert-parallel degrees. None means every power of two that divides a model's experts."""
    only: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Allowed values by column of a grid (`tp`, `micro_batch`, ...). Other columns are free."""
    fixed: Mapping[str, int] = field(default_factory=dict)
    """Values of columns that are not searched: `replicas`, `etp`, `offload_layers` and those of recomputation."""


def enumerate_grid(
    model: ModelSpec,
    space: SearchSpace,
    *,
    max_tp: int,
    zero_stages: Sequence[int] = (0, 1, 2, 3),
    ends_count: bool = False,
) -> Grid:
    """Return every layout of `model` in `space` that divides evenly.

    `ends_count` also allows pipelines whose embedding and head count as a layer each. ZeRO 2 and 3 are combined only
    with one pipeline stage, as in frameworks: otherwise gradients and weights would cross the network once per
    micro-batch. Tensor parallelism without sequence parallelism is not searched, because it needs as much traffic and
    more memory.
    """
    global_batch, recomputes = space.global_batch, [RECOMPUTES.index(r) for r in space.recomputes]
    # Pipelines reduce gradients once a step, for which stage 1 is enough, but for a trainer that has stage 2 alone.
    only_gradients = tuple(zero_stages) == (2,)
    contexts = (space.contexts or searched_contexts(model.seq_len)) if "cp" in space.axes else (1,)
    parts: list[Grid] = []
    for dp, tp, pp, cp in _degrees(model, space.num_gpus, max_tp if "tp" in space.axes else 1, contexts):
        if global_batch % dp or (pp > 1 and "pp" not in space.axes):
            continue
        counts = [m for m in divisors(global_batch // dp) if m >= pp - 1]
        # Chunks of one layer at least; where both counts divide, by layers alone.
        counted = [model.num_layers, *([model.num_layers + 2] if ends_count else [])]
        divides = [v for v in range(2, max(counted) // pp + 1) if any(count % (v * pp) == 0 for count in counted)]
        orders = _orders(space.schedules, divides) if pp > 1 else [(Schedule.ONE_F_ONE_B, 1)]
        stages = [z for z in zero_stages if (z == 0 or dp * cp > 1) and (z < 2 or pp == 1 or only_gradients)]
        mesh = np.meshgrid(counts, range(len(orders)), stages, recomputes, indexing="ij")
        m, o, z, r = (a.ravel().astype(np.int64) for a in mesh)
        code, v = (np.array([pair[i] for pair in _coded(orders)], dtype=np.int64)[o] for i in (0, 1))
        keep = (v == 1) | (m % pp == 0)
        parts.append(
            make_grid(
                dp=dp,
                tp=tp,
                pp=pp,
                cp=cp,
                zero_stage=z[keep],
                num_micro_batches=m[keep],
                virtual_stages=v[keep],
                recompute=r[keep],
                micro_batch=global_batch // dp // m[keep],
                schedule=code[keep],
                sequence_parallel=tp > 1,
                offload=OFFLOADS.index(space.offload),
            )
        )
    return joined(parts)


def joined(parts: Sequence[Grid]) -> Grid:
    """Concatenate the rows of grids."""
    if not parts:
        return make_grid(dp=np.zeros(0, dtype=np.int64))
    names = [f.name for f in dataclasses.fields(Grid)]
    return Grid(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def _orders(schedules: Iterable[Schedule], chunks: Iterable[int]) -> list[tuple[Schedule, int]]:
    """Return each schedule with its virtual stages."""
    named = list(schedules)
    flat = [(schedule, 1) for schedule in named if schedule is not Schedule.INTERLEAVED]
    return flat + [(Schedule.INTERLEAVED, v) for v in chunks if Schedule.INTERLEAVED in named]


def _coded(orders: Iterable[tuple[Schedule, int]]) -> list[tuple[int, int]]:
    return [(SCHEDULES.index(schedule), chunks) for schedule, chunks in orders]


def searched_contexts(seq_len: int) -> tuple[int, ...]:
    """Return the context-parallel degrees worth a search.

    These are powers of two that leave at least 4,096 tokens per rank. Of a model whose smallest micro-batch, one
    sequence, needs too much memory, halves may fit that repeat nothing: NeMo trains Llama 3 70B and 405B so.
    """
    longest = seq_len // 4096
    return tuple(2**k for k in range(20) if k == 0 or (2**k <= longest and seq_len % 2 ** (k + 1) == 0))


def _degrees(
    model: ModelSpec, num_gpus: int, max_tp: int, contexts: Iterable[int]
) -> Iterator[tuple[int, int, int, int]]:
    """Yield all (dp, tp, pp, cp) with that product that the model's dimensions allow.

    A context-parallel rank has an early and a late part of the sequence, so that causal attention is balanced.
    """
    for cp in contexts:
        for tp in divisors(num_gpus // cp) if num_gpus % cp == 0 else []:
            shards = model.num_heads % tp == 0 and model.num_kv_heads % tp == 0 and model.ffn_hidden % tp == 0
            if tp > max_tp or not shards or model.seq_len % (tp * cp * (2 if cp > 1 else 1)):
                continue
            for pp in divisors(num_gpus // cp // tp):
                if pp <= model.num_layers:
                    yield num_gpus // cp // tp // pp, tp, pp, cp


def divisors(number: int) -> list[int]:
    """Return all divisors in ascending order. Raises `InputError` for numbers below one."""
    if number < 1:
        raise InputError(f"{number} has no divisors; expected at least 1")
    low = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return low + [number // d for d in reversed(low) if d * d != number]
