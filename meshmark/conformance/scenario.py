"""Scenarios: variations of a case that conformance passes run. Each is one launch, and tests one or more clauses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from meshmark.adapter.contract import Adapter, Feature
from meshmark.adapter.matrix import combinations, takes, variants
from meshmark.adapter.matrix import layouts as matrix_layouts
from meshmark.errors import AdapterError, AlgorithmError, LayoutError, MeshmarkError
from meshmark.models.config import Dataset
from meshmark.models.transformer import Family, ModelSpec
from meshmark.records.record import Status
from meshmark.records.request import Task
from meshmark.reference.data import on_corpus
from meshmark.spec.algorithm import SYNCHRONOUS, algorithm_presets
from meshmark.spec.case import Case, InvalidLayout, cell
from meshmark.spec.layout import Layout, Offload, Recompute, Schedule
from meshmark.spec.optimizer import OptimizerKind, OptimizerSpec
from meshmark.spec.precision import Precision
from meshmark.spec.workload import WORKLOADS, Workload, workload

STEPS = 3
RESUMED_STEPS = 4
"""Steps of runs that are saved halfway. Two steps before and two after show more of what was lost."""
MICRO_BATCHES = 4
"""Micro-batches of scenarios that accumulate. It exceeds the number of ranks, so that the two are not confused."""
ENDURED_STEPS = 50
DROPOUT_STEPS = 24
DROPOUT = 0.2
CLIP_NORM = 0.5
"""Limit of gradient norms in the clause about clipping."""
FROZEN = ("embedding.", "blocks.0.attention.")


class _NotInWorkload(MeshmarkError):
    """A user's own workload does not have what a scenario varies."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One pass over a variant of the base case."""

    name: str
    vary: Callable[[Case], Case] = lambda base: base
    task: Task = Task.OBSERVE
    steps: int = STEPS
    needs: frozenset[Feature] = frozenset()
    """Features needed beyond those of the variant's training."""
    evaluate: bool = False
    """True to evaluate every batch before training on it, if the adapter can."""
    metered: bool = False
    """True to measure memory and traffic."""
    after: str | None = None
    """Scenario that must run before, for the files it leaves."""
    ends: Status = Status.OK
    """The expected outcome."""
    varies_text: bool = False
    """If True, it varies what only the built-in model of text has, and skips a user's own workload."""

    def varied(self, base: Case) -> tuple[Case, str | None]:
        """Return the case to run, and None or the reason why there is none.

        With a reason, the case is `base` itself: its layout does not fit the variant, its algorithm is not defined with
        the variant's optimizer, or its workload lacks what is varied.
        """
        if self.varies_text and base.workload.dataset is Dataset.OWN:
            return base, "needs the built-in text model, and the workload is your own"
        try:
            return self.vary(base), None
        except (AlgorithmError, LayoutError, _NotInWorkload) as error:
            return base, str(error)


def _training(change: Callable[[Workload], Workload]) -> Callable[[Case], Case]:
    """Return a function that changes a case's workload."""
    return lambda base: replace(base, workload=change(base.workload))


def _optimizing(change: Callable[[OptimizerSpec], OptimizerSpec]) -> Callable[[Case], Case]:
    return _training(lambda plain: replace(plain, optimizer=change(plain.optimizer)))


def _clipping(plain: OptimizerSpec) -> OptimizerSpec:
    """Clip to a norm that all gradients of the built-in models exceed, or to the workload's own, which is lower."""
    return replace(plain, clip_norm=min(CLIP_NORM, plain.clip_norm or CLIP_NORM))


def _modelling(**sizes: Any) -> Callable[[Case], Case]:  # noqa: ANN401
    """Return a function that changes dimensions of a case's model."""

    def changed(plain: Workload) -> Workload:
        if lacking := sizes.keys() - {field.name for field in fields(plain.text_model)}:
            raise _NotInWorkload(f"{plain.model.name} has no {', '.join(sorted(lacking))}")
        return replace(plain, model=replace(plain.text_model, **sizes))

    return _training(changed)


def _laying(change: Callable[[Layout], Layout]) -> Callable[[Case], Case]:
    return lambda base: replace(base, layout=change(base.layout))


def _accumulated(base: Case) -> Case:
    return _laying(lambda plain: replace(plain, num_micro_batches=MICRO_BATCHES))(base)


def _recomputed(base: Case) -> Case:
    return _laying(lambda plain: replace(plain, recompute=Recompute.FULL))(base)


def _uneven(base: Case) -> Case:
    return _accumulated(_training(lambda plain: replace(plain, masked=True))(base))


def _low(base: Case) -> Case:
    """Return the case with a rate at which no update of a norm's weight reaches half a unit in bf16's last place."""
    return replace(_optimizing(lambda plain: replace(plain, learning_rate=1e-4))(base), precision=Precision.BF16)


def _low_reduced(base: Case) -> Case:
    """Return the case with reduction in bf16, and one micro-batch as in the base.

    FSDP adds those of several micro-batches in fp32, and the sum is not a bf16 number.
    """
    return replace(base, precision=Precision.BF16_REDUCE_BF16)


def _half(base: Case) -> Case:
    return replace(base, precision=Precision.FP16)


def _unmoved(base: Case) -> Case:
    """Return the case with dropout and no updates, in fp32: rounding would hide a small difference of losses."""
    still = OptimizerSpec(kind=OptimizerKind.SGD, learning_rate=0.0, weight_decay=0.0, clip_norm=None)
    dropping = _modelling(dropout=DROPOUT)(replace(base, precision=Precision.FP32))
    return _optimizing(lambda _: still)(dropping)


def _unmoved_again(base: Case) -> Case:
    return _recomputed(_unmoved(base))


def _scheduled(base: Case) -> Case:
    """Return the case with a schedule and two micro-batches, because a schedule may wrongly be stepped after each."""
    warmed = _optimizing(lambda plain: replace(plain, warmup_steps=RESUMED_STEPS))(base)
    return _laying(lambda plain: replace(plain, num_micro_batches=2))(warmed)


def _decaying_by_group(base: Case) -> Case:
    """By the groups that a user's own workload names, or without norms and biases in the built-in model."""
    if base.workload.dataset is not Dataset.OWN:
        return _optimizing(lambda plain: replace(plain, decay_matrices_only=True))(base)
    if not base.workload.optimizer.no_decay:
        raise _NotInWorkload("the workload's optimizer has one group; no_decay names another")
    return base


def _unfreezing(plain: Workload) -> Workload:
    """Return the workload with some parameters frozen in the first half of the steps, at a constant rate."""
    optimizer = replace(plain.optimizer, warmup_steps=0)
    return replace(plain, frozen=FROZEN, unfreeze_step=RESUMED_STEPS // 2, optimizer=optimizer)


def _shallow(base: Case) -> Case:
    """Return the case with one layer per stage. Leaks do not depend on depth, and many steps with ZeRO-3 are slow."""
    if base.workload.dataset is Dataset.OWN:
        return base
    return _modelling(num_layers=base.layout.pp * base.layout.virtual_stages)(base)


def _resharded(base: Case) -> Case:
    """Return the case with half the pipeline, or twice the ranks along its axis, and equally large micro-batches."""
    return _laying(_redivided)(_scheduled(base))


def _redivided(layout: Layout) -> Layout:
    if layout.pp > 1:
        return replace(layout, pp=layout.pp // 2, virtual_stages=1, folded=False)
    if layout.tp > 1:
        return replace(layout, tp=2 * layout.tp)
    return replace(layout, dp=2 * layout.dp, num_micro_batches=max(1, layout.num_micro_batches // 2))


SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario(name="plain", metered=True),
        Scenario(name="accumulation", vary=_accumulated),
        Scenario(name="uneven", vary=_uneven, varies_text=True),
        Scenario(name="clipping", vary=_optimizing(_clipping), evaluate=True),
        Scenario(name="groups", vary=_decaying_by_group),
        Scenario(name="frozen", vary=_training(lambda plain: replace(plain, frozen=FROZEN)), varies_text=True),
        Scenario(name="unfrozen", vary=_training(_unfreezing), steps=RESUMED_STEPS, varies_text=True),
        Scenario(name="schedule", vary=_scheduled, steps=RESUMED_STEPS),
        Scenario(name="tied", vary=_modelling(tied_embeddings=True), varies_text=True),
        Scenario(name="unused", vary=_training(lambda plain: replace(plain, skipped_block=1)), varies_text=True),
        Scenario(name="recompute", vary=_recomputed, metered=True),
        Scenario(name="bf16", vary=_low, metered=True),
        Scenario(name="bf16 reduction", vary=_low_reduced, metered=True),
        Scenario(
            name="dropout",
            vary=_unmoved,
            task=Task.DROPOUT,
            steps=DROPOUT_STEPS,
            needs=frozenset({Feature.EVALUATE}),
            varies_text=True,
        ),
        Scenario(
            name="recomputed dropout",
            vary=_unmoved_again,
            task=Task.DROPOUT,
            steps=2,
            needs=frozenset({Feature.EVALUATE}),
            varies_text=True,
        ),
        Scenario(name="fp16", vary=_half, task=Task.OVERFLOW),
        Scenario(name="endure", vary=_shallow, task=Task.ENDURE, steps=ENDURED_STEPS),
        Scenario(name="save", vary=_scheduled, task=Task.SAVE, steps=RESUMED_STEPS, needs=frozenset({Feature.SAVE})),
        Scenario(
            name="resume",
            vary=_scheduled,
            task=Task.RESUME,
            steps=RESUMED_STEPS,
            needs=frozenset({Feature.SAVE}),
            after="save",
        ),
        Scenario(
            name="reshard",
            vary=_resharded,
            task=Task.RESUME,
            steps=RESUMED_STEPS,
            after="save",
            needs=frozenset({Feature.SAVE, Feature.RESHARD}),
        ),
        Scenario(
            name="lost rank",
            vary=_scheduled,
            task=Task.LOSE,
            steps=RESUMED_STEPS,
            needs=frozenset({Feature.SAVE}),
            ends=Status.KILLED,
        ),
        Scenario(
            name="recovery",
            vary=_scheduled,
            task=Task.RESUME,
            steps=RESUMED_STEPS,
            needs=frozenset({Feature.SAVE}),
            after="lost rank",
        ),
        Scenario(name="error", task=Task.FAIL, ends=Status.RAISED),
    )
}


def plain_workload(families: Set[Family] = frozenset(Family)) -> Workload:
    """Return the workload that every scenario varies: equal numbers of tokens in every row, and no clipping.

    It trains the first of a GPT, a LLaMA and a mixture of experts that is among `families`, or a GPT.
    """
    names = {Family.GPT: "gpt-mini", Family.LLAMA: "llama-mini", Family.MIXTURE: "gpt-moe-mini"}
    mini = workload(next((name for family, name in names.items() if family in families), "gpt-mini"))
    return replace(mini, masked=False, optimizer=replace(mini.optimizer, clip_norm=None))


def _plain(own: Workload) -> Workload:
    """A user's own workload, with nothing clipped and a constant rate, as scenarios vary it."""
    return replace(own, optimizer=replace(own.optimizer, clip_norm=None, warmup_steps=0))


def _by_algorithm(plain: Workload, adapter: type[Adapter]) -> Workload:
    """Return `plain` with the first algorithm that the adapter has, unless the adapter trains synchronously.

    The optimizer is that of `plain`, or the first of the presets that such an algorithm works with. The workload is
    renamed by what changes. Raises `AdapterError` if no preset fits.
    """
    can = adapter.capabilities
    if SYNCHRONOUS.kind in can.algorithms:
        return plain
    presets = sorted(algorithm_presets().values(), key=lambda preset: preset.kind)
    mini = workload("gpt-mini")
    for other in (preset for preset in WORKLOADS.values() if preset.model == mini.model):  # `mini` comes first
        suffix = other.name.removeprefix(mini.name)
        named = replace(plain, name=f"{plain.name}{suffix}", optimizer=other.optimizer) if suffix else plain
        for algorithm in presets:
            if can.trains_by(algorithm) and not algorithm.refusal(named.optimizer):
                own = replace(named, algorithm=algorithm)
                return replace(own, name=own.id)
    raise AdapterError(
        f"{adapter.__name__} trains by {', '.join(sorted(can.algorithms))}: no preset of these works with an optimizer "
        "of the built-in workloads"
    )


def _grown(plain: Workload, layout: Layout, global_batch: int | None) -> Workload:
    """Return `plain`, enlarged for the layout and renamed if it changes.

    It gets a layer for every stage and heads for twice the tensor-parallel ranks (which resharding uses). Unless
    `global_batch` is given, it gets sequences for every micro-batch of every data-parallel rank.
    """
    model = plain.text_model
    layers, heads = max(model.num_layers, layout.pp * layout.virtual_stages), math.lcm(model.num_heads, 2 * layout.tp)
    batch = global_batch or math.lcm(plain.global_batch, layout.dp * MICRO_BATCHES, layout.num_micro_batches)
    sizes = {"l": (model.num_layers, layers), "h": (model.num_heads, heads), "b": (plain.global_batch, batch)}
    dimensions: dict[str, Any] = {
        "num_layers": layers,
        "num_heads": heads,
        "hidden": heads * model.head_dim,
        "ffn_hidden": heads * model.ffn_hidden // model.num_heads,
    }
    if isinstance(model, ModelSpec):
        dimensions["num_kv_heads"] = heads
    larger = replace(model, **dimensions)
    name = ".".join([plain.name, *(f"{letter}{now}" for letter, (was, now) in sizes.items() if now != was)])
    return replace(plain, name=name, model=larger, global_batch=batch)


def plain_cells(
    name: str,
    adapter: type[Adapter],
    world_size: int,
    *,
    global_batch: int | None = None,
    corpus: str | None = None,
    own: Workload | None = None,
) -> list[Case | InvalidLayout]:
    """Return the cells of a conformance pass of one adapter at a world size.

    They cover every ZeRO stage and every axis, and are otherwise as plain as the adapter supports. If it refuses
    these, they combine as much as it requires. The workload grows with the world unless `global_batch` is given. It
    trains on text, so a `corpus` of images is ignored. A user's `own` workload takes its place and does not grow.
    They are in fp32. Given in another precision, all scenarios run in that one but those about a precision or dropout.
    """
    text = None if corpus and Path(corpus).is_dir() else corpus
    can, layouts = adapter.capabilities, list[Layout]()
    plain = Layout(zero_stage=min(can.zero_stages), offload=next(where for where in Offload if where in can.offloads))
    if "tp" in can.degrees:
        layouts = [replace(plain, tp=world_size)]
    elif "pp" in can.degrees:
        schedule = next(schedule for schedule in Schedule if schedule in can.schedules)
        chunks = min(can.virtual_stages)
        piped = replace(plain, pp=world_size, num_micro_batches=world_size * chunks, schedule=schedule)
        layouts = [replace(piped, virtual_stages=chunks, folded=can.folded and world_size > 1)]
    elif "dp" in can.degrees or not can.degrees:
        dp = world_size if can.degrees else 1
        layouts = [replace(plain, dp=dp, zero_stage=stage) for stage in sorted(can.zero_stages)]
    trained = _by_algorithm(_plain(own) if own else plain_workload(can.families), adapter)

    def made(layouts: Iterable[Layout]) -> list[Case | InvalidLayout]:
        return [
            cell(
                adapter=name,
                workload=trained if own else on_corpus(_grown(trained, layout, global_batch), text),
                layout=layout,
            )
            for layout in layouts
        ]

    plainest = made(layouts)
    if any(isinstance(each, Case) and takes(adapter, each) for each in plainest):
        return plainest
    # Some adapters require a combination, and a distributed optimizer needs replicas. Try the layouts of the matrix,
    # then replicas, then every possible layout.
    replicas = (layout for layout in variants(can, Layout(dp=world_size)) if "dp" in can.degrees)
    for tried in (matrix_layouts(adapter, world_size), replicas, _combined(adapter, world_size)):
        taken: dict[int, Case | InvalidLayout] = {}
        for each in made(_unaccumulated(layout) for layout in tried):
            if isinstance(each, Case) and takes(adapter, each):
                taken.setdefault(each.layout.zero_stage, each)
        if taken:
            return [*taken.values()]
    return plainest


def _combined(adapter: type[Adapter], world_size: int) -> Iterator[Layout]:
    """Yield every layout of this many ranks that is within an adapter's capabilities, without recomputation."""
    for layout in combinations(world_size):
        if layout.recompute is Recompute.NONE and not adapter.capabilities.beyond(layout):
            yield layout


def _unaccumulated(layout: Layout) -> Layout:
    """Return the layout with one micro-batch, except for pipelines, which need several."""
    return layout if layout.pp > 1 else replace(layout, num_micro_batches=1)
