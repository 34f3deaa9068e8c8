"""How a workload is laid over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from meshmark.errors import LayoutError
from meshmark.spec.model_config import ModelConfig


class Schedule(StrEnum):
    """The order in which a pipeline works its micro-batches off."""

    GPIPE = "gpipe"
    """All forwards, then all backwards: every micro-batch's activations are held (arXiv:1811.06965)."""
    ONE_F_ONE_B = "1f1b"
    """One forward, one backward: stage i of p holds at most p - i micro-batches (arXiv:2104.04473 sec. 2.2.1)."""
    INTERLEAVED = "interleaved"
    """1F1B over several chunks of layers a rank: the bubble falls by their number (arXiv:2104.04473 sec. 2.2.2)."""
    ZERO_BUBBLE = "zero_bubble"
    """ZB-H1: weight gradients are computed late, where the bubble was (arXiv:2401.10241)."""


class Recompute(StrEnum):
    """Which activations the backward pass computes again instead of keeping (arXiv:2205.05198)."""

    NONE = "none"
    SELECTIVE = "selective"
    """The attention core only: scores, softmax and dropout. With flash attention, which keeps none of them, every
    second matrix product and what lies between, as torchtitan's selective (op) policy does."""
    FULL = "full"
    """Every block from its input."""


class Offload(StrEnum):
    """Where optimizer states and master weights live between steps."""

    NONE = "none"
    CPU = "cpu"
    NVME = "nvme"


Axis = Literal["dp", "tp", "pp", "cp"]
"""An axis of the mesh of ranks: data, tensor, pipeline, context."""
AXES: tuple[Axis, ...] = ("dp", "tp", "pp", "cp")
INNERMOST_FIRST: tuple[Axis, ...] = ("tp", "cp", "dp", "pp")
"""How ranks are numbered: neighbours along the first differ by one."""


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """Where a rank stands: its index along every axis."""

    dp: int = 0
    """Which shard of the batch it trains on."""
    tp: int = 0
    pp: int = 0
    """Its place in the pipeline: its stage, or the first of its virtual ones."""
    cp: int = 0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of every parallelism; their product is the world size.

    Ranks are numbered with tensor parallelism innermost, then context, then data, then pipeline parallelism outermost:
    `coordinates` alone knows it.
    """

    dp: int = 1
    """Data-parallel degree: replicas, or shards under ZeRO."""
    tp: int = 1
    """Tensor-parallel degree."""
    pp: int = 1
    """Pipeline stages."""
    zero_stage: int = 0
    """ZeRO stage over the data-parallel ranks (arXiv:1910.02054): 1 shards optimizer states, 2 also gradients,
    3 also parameters (FSDP)."""
    num_micro_batches: int = 1
    """Micro-batches of one step: gradient accumulation, or what a pipeline is filled with."""
    schedule: Schedule = Schedule.GPIPE
    """Pipeline schedule; means nothing when pp is 1."""
    cp: int = 1
    """Context-parallel degree: ranks that share one sequence."""
    virtual_stages: int = 1
    """Chunks of layers a pipeline rank holds; more than one only in the interleaved schedule."""
    folded: bool = False
    """A pipeline rank's two chunks lie as a V: stage i beside stage 2p - 1 - i, so that the first rank holds both ends
    (arXiv:2401.10241 sec. 6)."""
    sequence_parallel: bool = False
    """Between tensor-parallel regions, activations are split by sequence over the tp ranks (arXiv:2205.05198)."""
    recompute: Recompute = Recompute.NONE
    """Activations computed again in the backward pass."""
    offload: Offload = Offload.NONE
    """Where optimizer states live between steps."""

    def __post_init__(self) -> None:
        for degree in (*AXES, "num_micro_batches", "virtual_stages"):
            if (got := getattr(self, degree)) < 1:
                raise LayoutError(f"layout: {degree} is {got}, expected at least 1")
        if self.zero_stage not in (0, 1, 2, 3):
            raise LayoutError(f"layout: zero_stage is {self.zero_stage}, expected 0, 1, 2 or 3")
        if self.virtual_stages > 1 and self.schedule is not Schedule.INTERLEAVED:
            raise LayoutError(
                f"layout: {self.virtual_stages} virtual stages need the interleaved schedule, got {self.schedule}"
            )

        if self.folded and (self.pp == 1 or self.virtual_stages != 2):
            raise LayoutError(
                f"layout: folded chunks are two on each of several pipeline ranks, got pp {self.pp} and "
                f"{self.virtual_stages} virtual stages"
            )

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    def pipeline_rank(self, stage: int) -> int:
        """The index along pp of what holds one of the pipeline's stages."""
        turned = self.folded and stage >= self.pp
        return 2 * self.pp - 1 - stage if turned else stage % self.pp

    def stages_of(self, pipeline_rank: int) -> tuple[int, ...]:
        """Those that it holds, in order."""
        stages = range(self.pp * self.virtual_stages)
        return tuple(stage for stage in stages if self.pipeline_rank(stage) == pipeline_rank)

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank` stands. Raises `LayoutError` when there is no such rank."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"layout {self.id}: there is no rank {rank}, expected 0 to {self.world_size - 1}")
        indices: dict[str, int] = {}
        for axis in INNERMOST_FIRST:
            rank, indices[axis] = divmod(rank, self._degree(axis))
        return Coordinates(**indices)

    def rank_of(self, coordinates: Coordinates) -> int:
        """The rank that stands there. Raises `LayoutError` when none does."""
        rank = 0
        for axis in reversed(INNERMOST_FIRST):
            index, degree = getattr(coordinates, axis), self._degree(axis)
            if not 0 <= index < degree:
                raise LayoutError(f"layout {self.id}: there is no {axis} index {index}, expected 0 to {degree - 1}")
            rank = rank * degree + index
        return rank

    def group(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axis` alone, in the order of their indices; `rank` is one of them.

        Raises `LayoutError` when there is no such rank."""
        return self.spanned((axis,), rank)

    def spanned(self, axes: tuple[Axis, ...], rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axes` alone, in order; in as many steps as there are such ranks, for
        a world may have tens of thousands. Raises `LayoutError` when there is no such rank."""
        stands, found, stride = self.coordinates(rank), [0], 1
        for axis in INNERMOST_FIRST:
            degree = self._degree(axis)
            indices = range(degree) if axis in axes else (getattr(stands, axis),)
            found = [index * stride + inner for index in indices for inner in found]
            stride *= degree
        return tuple(found)

    def all_spanned(self, axes: tuple[Axis, ...]) -> list[tuple[int, ...]]:
        """Every such group of ranks once, in the order of their first."""
        others = tuple(axis for axis in AXES if axis not in axes)
        return [self.spanned(axes, first) for first in self.spanned(others, 0)]

    def _degree(self, axis: Axis) -> int:
        degree: int = getattr(self, axis)
        return degree

    @property
    def id(self) -> str:
        """Degrees above one, joined by dots: `dp2.zero3.mb2`; `one` when nothing is parallel."""
        parts = [f"{name}{degree}" for name in AXES if (degree := self._degree(name)) > 1]
        parts = parts or ["one"]
        if self.pp > 1 and self.schedule is not Schedule.GPIPE:
            parts.append(self.schedule)
        if self.virtual_stages > 1:
            parts.append(f"v{self.virtual_stages}")
        if self.folded:
            parts.append("folded")
        if self.sequence_parallel:
            parts.append("sp")
        if self.zero_stage:
            parts.append(f"zero{self.zero_stage}")
        if self.num_micro_batches > 1:
            parts.append(f"mb{self.num_micro_batches}")
        if self.recompute is not Recompute.NONE:
            parts.append(f"recompute_{self.recompute}")
        if self.offload is not Offload.NONE:
            parts.append(f"offload_{self.offload}")
        return ".".join(parts)

    def check(self, model: ModelConfig, global_batch: int) -> None:
        """Raise `LayoutError` when this layout cannot be laid over `model` with `global_batch` sequences a step."""
        problems = model.misfits(tp=self.tp, num_stages=self.pp * self.virtual_stages, cp=self.cp)
        if global_batch % (self.dp * self.num_micro_batches):
            problems.append(
                f"a global batch of {global_batch} sequences is not divisible by "
                f"dp {self.dp} x {self.num_micro_batches} micro-batches"
            )
        if problems:
            raise LayoutError(f"layout {self.id} does not fit model {model.name!r}: {'; '.join(problems)}")
