"""Layouts: how a workload is distributed over ranks.

`parse_layout` reads the ids that reports print, such as `dp2.tp2.mb4`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypedDict

from meshmark.errors import LayoutError
from meshmark.models.config import ModelConfig

# --- Layouts: how a workload is distributed over ranks.


class Schedule(StrEnum):
    """The order in which a pipeline processes its micro-batches."""

    GPIPE = "gpipe"
    """All forwards, then all backwards. Activations of every micro-batch are held (arXiv:1811.06965)."""
    ONE_F_ONE_B = "1f1b"
    """Alternate one forward and one backward. Stage i of p holds at most p - i micro-batches (arXiv:2104.04473 sec.
    2.2.1).
    """
    INTERLEAVED = "interleaved"
    """1F1B over several chunks of layers per rank, which divides the bubble by their number (arXiv:2104.04473 sec.
    2.2.2).
    """
    ZERO_BUBBLE = "zero_bubble"
    """ZB-H1: weight gradients are computed late, in place of the bubble (arXiv:2401.10241)."""


class Recompute(StrEnum):
    """Which activations the backward pass recomputes instead of keeping them (arXiv:2205.05198)."""

    NONE = "none"
    SELECTIVE = "selective"
    """Only the attention core: scores, softmax and dropout.

    Flash attention keeps none of these. With it, every second matrix product and the operations in between are
    recomputed, as torchtitan's selective (op) policy does.
    """
    FULL = "full"
    """Every block is recomputed from its input."""


class RecomputeModule(StrEnum):
    """A module of a layer whose forward pass is repeated in the backward pass: Megatron-Core's `recompute_modules`."""

    CORE_ATTN = "core_attn"
    """Scores, softmax and their product with the values."""
    MLP = "mlp"
    """A dense feed-forward network and, where it is fused with its first product, the norm before it."""
    MOE = "moe"
    """A mixture of experts: router, dispatch, routed and shared experts."""
    MOE_ACT = "moe_act"
    """The activation function of routed experts."""
    SHARED_EXPERTS = "shared_experts"
    LAYERNORM = "layernorm"
    """Norms that are not fused with a product: before a mixture of experts and before latent attention."""
    MLA_UP_PROJ = "mla_up_proj"
    """Queries, keys and values from their latents (arXiv:2405.04434 section 2.1), with their rotation."""


class Offload(StrEnum):
    """Where optimizer states and master weights are stored between steps."""

    NONE = "none"
    CPU = "cpu"
    NVME = "nvme"


Axis = Literal["dp", "tp", "pp", "cp"]
"""An axis of the mesh of ranks: data, tensor, pipeline or context."""
AXES: tuple[Axis, ...] = ("dp", "tp", "pp", "cp")
INNERMOST_FIRST: tuple[Axis, ...] = ("tp", "cp", "dp", "pp")
"""Order of axes in the numbering of ranks: neighbours along the first axis differ by one."""


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """Position of a rank in the mesh: its index along every axis."""

    dp: int = 0
    """The shard of the batch that the rank trains on."""
    tp: int = 0
    pp: int = 0
    """The rank's pipeline stage, or the first of its virtual stages."""
    cp: int = 0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of every parallelism. Their product is the world size.

    Ranks are numbered with tensor parallelism innermost, then context, data and, outermost, pipeline parallelism. Only
    `coordinates` and `rank_of` depend on this order.
    """

    dp: int = 1
    """Data-parallel degree: number of replicas, or of shards under ZeRO."""
    tp: int = 1
    """Tensor-parallel degree."""
    pp: int = 1
    """Pipeline stages."""
    zero_stage: int = 0
    """ZeRO stage over the data-parallel ranks (arXiv:1910.02054): 1 shards optimizer states, 2 also gradients,
    3 also parameters (FSDP)."""
    num_micro_batches: int = 1
    """Micro-batches per step: gradient accumulation, or what fills a pipeline."""
    schedule: Schedule = Schedule.GPIPE
    """Pipeline schedule. It has no effect when pp is 1."""
    cp: int = 1
    """Context-parallel degree: number of ranks that share one sequence."""
    virtual_stages: int = 1
    """Chunks of layers per pipeline rank. More than one is allowed only in the interleaved schedule."""
    folded: bool = False
    """Arrange the two chunks of each pipeline rank as a V (arXiv:2401.10241 sec. 6).

    A rank holds stages i and 2p - 1 - i, so the first rank holds both ends of the model.
    """
    sequence_parallel: bool = False
    """Split activations by sequence over the tp ranks between tensor-parallel regions (arXiv:2205.05198)."""
    recompute: Recompute = Recompute.NONE
    """Activations that are recomputed in the backward pass."""
    offload: Offload = Offload.NONE
    """Where optimizer states are stored between steps."""

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
        """Return the index along pp of the rank that holds `stage`."""
        turned = self.folded and stage >= self.pp
        return 2 * self.pp - 1 - stage if turned else stage % self.pp

    def stages_of(self, pipeline_rank: int) -> tuple[int, ...]:
        """Return the stages that a pipeline rank holds, in order."""
        stages = range(self.pp * self.virtual_stages)
        return tuple(stage for stage in stages if self.pipeline_rank(stage) == pipeline_rank)

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of `rank`. Raises `LayoutError` when there is no such rank."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"layout {self.id}: there is no rank {rank}, expected 0 to {self.world_size - 1}")
        indices: dict[str, int] = {}
        for axis in INNERMOST_FIRST:
            rank, indices[axis] = divmod(rank, self._degree(axis))
        return Coordinates(**indices)

    def rank_of(self, coordinates: Coordinates) -> int:
        """Return the rank at `coordinates`. Raises `LayoutError` when there is none."""
        rank = 0
        for axis in reversed(INNERMOST_FIRST):
            index, degree = getattr(coordinates, axis), self._degree(axis)
            if not 0 <= index < degree:
                raise LayoutError(f"layout {self.id}: there is no {axis} index {index}, expected 0 to {degree - 1}")
            rank = rank * degree + index
        return rank

    def group(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` only along `axis`, ordered by index and including `rank`.

        Raises `LayoutError` when there is no such rank.
        """
        return self.spanned((axis,), rank)

    def spanned(self, axes: tuple[Axis, ...], rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` only along `axes`, in order.

        Takes time linear in the size of the result, because a world may have tens of thousands of ranks. Raises
        `LayoutError` when there is no such rank.
        """
        stands, found, stride = self.coordinates(rank), [0], 1
        for axis in INNERMOST_FIRST:
            degree = self._degree(axis)
            indices = range(degree) if axis in axes else (getattr(stands, axis),)
            found = [index * stride + inner for index in indices for inner in found]
            stride *= degree
        return tuple(found)

    def all_spanned(self, axes: tuple[Axis, ...]) -> list[tuple[int, ...]]:
        """Return each group of ranks along `axes` once, ordered by first rank."""
        others = tuple(axis for axis in AXES if axis not in axes)
        return [self.spanned(axes, first) for first in self.spanned(others, 0)]

    def _degree(self, axis: Axis) -> int:
        degree: int = getattr(self, axis)
        return degree

    @property
    def id(self) -> str:
        """Degrees above one, joined by dots, such as `dp2.zero3.mb2`; `one` when nothing is parallel."""
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
        """Raise `LayoutError` when the layout does not fit `model` with `global_batch` sequences per step."""
        problems = model.misfits(tp=self.tp, num_stages=self.pp * self.virtual_stages, cp=self.cp)
        if global_batch % (self.dp * self.num_micro_batches):
            problems.append(
                f"a global batch of {global_batch} sequences is not divisible by "
                f"dp {self.dp} x {self.num_micro_batches} micro-batches"
            )
        if problems:
            raise LayoutError(f"layout {self.id} does not fit model {model.name!r}: {'; '.join(problems)}")


# --- Parse layouts from the ids that reports print, such as `dp2.tp2.mb4`.

GLOSSARY = {
    "one": "nothing is parallel",
    "dpN": "N data-parallel replicas, or shards under ZeRO",
    "tpN": "N-way tensor parallelism",
    "ppN": "N pipeline stages",
    "cpN": "N ranks share one sequence",
    "zeroN": "ZeRO stage N over the data-parallel ranks (3: FSDP)",
    "mbN": "N micro-batches a step: accumulation, or what fills a pipeline",
    "vN": "N virtual stages a pipeline rank",
    "folded": "a rank's two virtual stages lie as a V: the first rank holds both ends",
    "sp": "sequence parallelism between tensor-parallel regions",
    **{str(schedule): "pipeline schedule" for schedule in Schedule},
    **{f"recompute_{what}": "activations computed again" for what in Recompute if what is not Recompute.NONE},
    **{f"offload_{where}": "where optimizer states live" for where in Offload if where is not Offload.NONE},
}
"""Every part of a layout id and its meaning."""


def glossary() -> str:
    """Return the glossary as one sentence, for `--help`."""
    meanings: dict[str, list[str]] = {}
    for part, meaning in GLOSSARY.items():
        meanings.setdefault(meaning, []).append(part)
    told = "; ".join(f"{', '.join(parts)}: {meaning}" for meaning, parts in meanings.items())
    return f"A layout is named by its parts, joined by dots, such as dp2.tp2.mb4: {told}."


class _Fields(TypedDict, total=False):
    dp: int
    tp: int
    pp: int
    cp: int
    zero_stage: int
    num_micro_batches: int
    virtual_stages: int
    folded: bool
    sequence_parallel: bool
    schedule: Schedule
    recompute: Recompute
    offload: Offload


_COUNT = re.compile(r"(dp|tp|pp|cp|zero|mb|v)([0-9]{1,9})")
_OTHER_NAMES = {"ga": "mb", "gas": "mb", "vp": "v", "vpp": "v"}
"""Names that frameworks have for counts, and the name of their part here."""
_COUNTED = {"zero": "zero_stage", "mb": "num_micro_batches", "v": "virtual_stages"}


def parse_layout(text: str) -> Layout:
    """Return the layout whose id is `text`. Its parts may come in any order.

    Raises `LayoutError` for an unknown or repeated part, with its position, and for degrees that are impossible.
    """
    fields: _Fields = {}
    position = 1
    for part in text.split("."):
        where = f"layout {text!r}: {part!r} at character {position}"
        found = _fields_of(part)
        if found is None:
            raise LayoutError(f"{where} is no part of one{_hint(part)}; parts are {', '.join(GLOSSARY)}")
        if expected := _range_error(part):
            raise LayoutError(f"{where}: expected {expected}")
        if twice := fields.keys() & found.keys():
            raise LayoutError(f"{where} says {', '.join(twice)} once more")
        fields |= found
        position += len(part) + 1
    try:
        return Layout(**fields)
    except LayoutError as error:  # its parts contradict one another
        raise LayoutError(f"{text!r}: {error}") from error


def _hint(part: str) -> str:
    """Return what a part by a framework's name is called here, or an empty string."""
    match = re.fullmatch(r"([a-z]+)([0-9]{1,9})", part)
    if match and match[1] in ("mbs", "gbs"):
        return ", which has no sizes of batches: mbN are N micro-batches"
    return f" (did you mean '{_OTHER_NAMES[match[1]]}{match[2]}'?)" if match and match[1] in _OTHER_NAMES else ""


def _fields_of(part: str) -> _Fields | None:
    """Return the fields that one part sets, or None if it is not a valid part."""
    if part == "one":
        return {}
    if part == "folded":
        return {"folded": True}
    if part == "sp":
        return {"sequence_parallel": True}
    if part in set(Schedule):
        return {"schedule": Schedule(part)}
    if part in GLOSSARY and part.startswith("recompute_"):
        return {"recompute": Recompute(part.removeprefix("recompute_"))}
    if part in GLOSSARY and part.startswith("offload_"):
        return {"offload": Offload(part.removeprefix("offload_"))}
    if not (match := _COUNT.fullmatch(part)):
        return None
    counted: _Fields = {_COUNTED.get(match[1], match[1]): int(match[2])}  # type: ignore[misc]
    return counted


def _range_error(part: str) -> str:
    """Return what the number of a part should be if it is out of range, otherwise an empty string."""
    match = _COUNT.fullmatch(part)
    if match is None:
        return ""
    if match[1] == "zero":
        return "a stage from 0 to 3" if int(match[2]) > 3 else ""
    return "" if int(match[2]) else "at least 1"
