"""The planner's `memory` for one rank of one case, in the form that the suites compare with measurements."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshmark.spec.case import Case
from meshmark.spec.layout import Layout, Offload, Recompute, Schedule
from meshmark.theory.gradient_path import DEEPSPEED_PATHS, GradientPath
from meshmark.theory.grid import layout_grid
from meshmark.theory.memory import received_bytes, stage_memory
from meshmark.theory.model_theory import bucket_elements, local_parameters, theory_of
from meshmark.theory.overheads import Overheads
from meshmark.theory.recipe import TrainingRecipe, eager_recipe
from meshmark.theory.stage_peak import update_excess
from meshmark.theory.state_bytes import state_bytes
from meshmark.theory.traffic import METERED_STEP


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelStates:
    """Bytes of one rank."""

    parameters: float
    """Weights and masters."""
    gradients: float
    optimizer_states: float
    buffers: float = 0.0
    """Persistent communication buffers, and those that hold gradients."""
    tables: float = 0.0
    """Rotary positions, which every process keeps, and statistics of batch norms. Not included in the peak below."""
    host_parameters: float = 0.0
    """Masters that the host keeps in its memory and updates (ZeRO-Offload, arXiv:2101.06840 sec. 4).

    On a CPU this is the same memory as everything else. On a GPU the allocator does not count it.
    """
    host_gradients: float = 0.0
    """Gradients with which the host updates those masters."""
    host_optimizer_states: float = 0.0
    host_buffers: float = 0.0
    """Those gradients, if they are permanent."""
    activations: float | None = None
    """Activations when the step's first backward pass begins. None if they are not planned."""
    peak: float | None = None
    """Peak of the sum: on this rank at DeepSpeed's stage 2, otherwise on the fullest rank of the stage.

    None if activations are not planned, and where the planner does not know the copies. That applies to DeepSpeed in
    mixed precision, at stage 3 (whose modules gather their weights one by one), and with several parameter groups; to
    reductions in another dtype than the held gradients; to optimizers but AdamW and plain SGD; to a server with more
    than two replicas; and to pipeline chunks in another order than interleaved 1F1B.
    """
    backward_peak: float | None = None
    """Peak of the backward passes only. Activations that adapters declare are added to it."""

    def with_host(self) -> ModelStates:
        """Return the states for a machine whose host memory is the device's memory."""
        return replace(
            self,
            parameters=self.parameters + self.host_parameters,
            gradients=self.gradients + self.host_gradients,
            optimizer_states=self.optimizer_states + self.host_optimizer_states,
            buffers=self.buffers + self.host_buffers,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtraMemory:
    """Bytes that a framework holds beyond (or, if negative, short of) the closed form, and why."""

    category: str
    """parameters, gradients, optimizer_states or activations; steady for permanent memory; peak for memory only at the
    peak; or unnamed for memory that may but need not be there, where no peak is planned.
    """
    num_bytes: float
    reason: str
    on_host: bool = False
    """True if it is in host memory, which is the device's memory only on a CPU."""


def declared_bytes(declared: Sequence[ExtraMemory], category: str) -> float:
    """Return the declared bytes of one category.

    "steady" includes everything permanent. "peak" includes all but gradients, which the recipe's path accounts for.
    """
    always = ("parameters", "optimizer_states", "steady")
    here = {"steady": always, "peak": (*always, "activations", "peak")}.get(category, (category,))
    return sum(r.num_bytes for r in declared if r.category in here)


def declared_peak(plan: ModelStates, declared: Sequence[ExtraMemory]) -> float | None:
    """Return the planned peak with what is declared.

    Declared activations count in backward passes, not in the update.
    """
    if plan.peak is None:
        return None
    whole = plan.peak + declared_bytes(declared, "peak")
    if plan.backward_peak is None or plan.backward_peak == plan.peak:
        return whole
    updating = whole - declared_bytes(declared, "activations")
    return max(updating, plan.backward_peak + declared_bytes(declared, "peak"))


def model_states(case: Case, rank: int, recipe: TrainingRecipe | None = None) -> ModelStates | None:
    """Return what `rank` must hold under `case`'s layout.

    For models other than decoder-only transformers, and for folded stages, only states are planned, which follow from
    the number of parameters. None if that number is unknown, or not sufficient.
    """
    model, layout = case.workload.model, case.layout
    grid = layout_grid(layout, case.workload.global_batch, layout.coordinates(rank).dp)
    using = recipe or eager_recipe(case)
    transformer = theory_of(model).transformer
    if layout.folded or transformer is None:
        if using.states.matrix_wise or (counts := theory_of(model).trained_and_frozen(layout, rank)) is None:
            return None
        count, num_frozen = counts
        if num_frozen and not _holds_frozen_weights_alone(case, using):
            return None
        states = state_bytes(np.array([float(count)]), grid, using)
        # A frozen parameter has weights, sharded like the others, and neither a gradient nor moments.
        frozen = state_bytes(np.array([float(num_frozen)]), grid, using)
        activations = None
        if _is_exact(case) and using.activations_known and using.eager:
            casts = using.eager.casts_weights
            activations = theory_of(model).activation_bytes(case, rank, METERED_STEP, casts_weights=casts)
            if activations is not None:
                activations += _kept_weights(case, using)
        return ModelStates(
            parameters=float(states["parameters"][0] + frozen["parameters"][0]),
            gradients=float(states["gradients"][0]),
            optimizer_states=float(states["optimizer"][0]),
            buffers=_received(case, rank, using) + _lasting_gradients(case, using, float(states["gradients"][0])),
            tables=theory_of(model).table_bytes(layout, rank, case.precision),
            **_host_states(layout, using, count),
            activations=activations,
        )
    index = layout.coordinates(rank).pp
    held = stage_memory(transformer, grid, using, Overheads(), index)
    exact = _is_exact(case) and using.activations_known
    path = using.backward.gradient_path
    known = _temporaries_are_known(case) and (not case.precision.is_mixed or path not in DEEPSPEED_PATHS)
    known &= path is not GradientPath.MODULES and layout.offload is Offload.NONE
    known &= path is not GradientPath.STREAMED or not case.workload.optimizer.groups_decay
    known &= layout.virtual_stages == 1 or using.backward.interleaves
    known &= using.peak_known
    peak = backward = None
    if exact and known and layout.recompute is Recompute.NONE:
        peak = float(held.total_bytes[0])
        backward = peak - float(update_excess(transformer, grid, using, index)[0]) if using.eager else None
    return ModelStates(
        parameters=float(held.parameters[0]),
        gradients=float(held.gradients[0]),
        optimizer_states=float(held.optimizer[0]),
        buffers=_received(case, rank, using) + _lasting_gradients(case, using, float(held.gradients[0])),
        tables=theory_of(model).table_bytes(layout, rank, case.precision),
        **_host_states(layout, using, local_parameters(model, layout, rank) or 0),
        activations=float(held.activations[0]) if exact else None,
        peak=peak,
        backward_peak=backward,
    )


def _kept_weights(case: Case, using: TrainingRecipe) -> float:
    """Return the bytes of gathered weights, of blocks and of the root, that stay from a forward pass to its
    backward.
    """
    model = case.workload.model
    root = model.embedding_parameters + model.head_parameters
    kept = using.backward.kept_share * (model.num_parameters - root) + using.backward.keeps_root * root
    return using.wire.gather_bytes * kept


def _holds_frozen_weights_alone(case: Case, using: TrainingRecipe) -> bool:
    """Return whether it is known that a frozen parameter has weights, and no master and no room for a gradient.

    Flat parameters have gradients as a whole (FSDP1), DeepSpeed keeps no masters of frozen ones, and at stages 1 and 2
    it is the framework's choice which rank keeps the moments of which tensor.
    """
    flat = using.backward.gradient_path in (GradientPath.FLAT_UNITS, *DEEPSPEED_PATHS)
    whole = case.layout.zero_stage in (0, 3) and case.layout.offload is Offload.NONE
    return whole and not case.precision.is_mixed and not flat


def _received(case: Case, rank: int, using: TrainingRecipe) -> float:
    """Return the bytes of the receive buffers of pipeline stages, which are allocated once."""
    layout, model = case.layout, case.workload.model
    if layout.pp == 1 or not using.receive_buffers:
        return 0.0
    theory = theory_of(model)
    if (stream := theory.stream) is None:
        own, num_stages = layout.coordinates(rank).pp, layout.pp * layout.virtual_stages
        ranks = [layout.pipeline_rank(stage) for stage in range(num_stages)]
        borders = [b for b in range(num_stages - 1) if (ranks[b] == own) != (ranks[b + 1] == own)]
        sent = sum(theory.boundary_numbers(num_stages, boundary) or 0 for boundary in borders)
        return sent * case.workload.global_batch / layout.dp * case.precision.wide.itemsize
    grid = layout_grid(layout, case.workload.global_batch)
    stages = layout.stages_of(layout.coordinates(rank).pp)
    ends = (stages[0] == 0) + (stages[-1] == layout.pp * layout.virtual_stages - 1)
    inside = 2 * sum(after == before + 1 for before, after in itertools.pairwise(stages))  # handed over, both ways
    return float(received_bytes(stream, grid, using, ends + inside)[0])


def _host_states(layout: Layout, using: TrainingRecipe, num_parameters: int) -> dict[str, float]:
    """Return the offloaded states that the host keeps: masters, fp32 gradients and moments of a rank's share.

    These are 16 bytes per parameter minus the weights (arXiv:2101.06840 sec. 3.2, with fp32 gradients). Empty for
    states on disk.
    """
    if layout.offload is not Offload.CPU:
        return {}
    share, states = num_parameters / (layout.dp * layout.cp if layout.zero_stage else 1), using.states
    for_life = using.backward.gradient_path in (GradientPath.FLAT_UNITS, *DEEPSPEED_PATHS)
    return {
        "host_parameters": states.master_bytes * share,
        "host_gradients": states.master_bytes * share,
        "host_optimizer_states": states.moment_bytes * share,
        "host_buffers": states.master_bytes * share * for_life,
    }


def _lasting_gradients(case: Case, using: TrainingRecipe, held: float) -> float:
    """Return the bytes that remain after gradients are cleared. `held` is the bytes before the update.

    These are FSDP1's flat gradients, DDP's buckets (gradients are views of them), or the flat tensor of DeepSpeed's
    stage 3 and its bucket.
    """
    match using.backward.gradient_path:
        case GradientPath.BUCKETS | GradientPath.FLAT_UNITS:
            return held
        case GradientPath.MODULES:
            return held + using.states.gradient_bytes * bucket_elements(case.workload.model)
    return 0.0


def _temporaries_are_known(case: Case) -> bool:
    """Return whether the temporaries of the reduction and of the update are known."""
    optimizer = case.workload.optimizer
    plain = not optimizer.is_matrix_wise and not optimizer.momentum
    planned = case.workload.algorithm.update_memory_is_planned(case.layout.dp)
    return plain and not case.precision.narrows_reduction and planned


def _is_exact(case: Case) -> bool:
    """Return whether planned activations were verified against what PyTorch saves.

    They were for PyTorch's own choice of kernels, without dropout, selective recomputation (or any under autocast),
    sequence and context parallelism; and in a pipeline under GPipe's schedule (arXiv:1811.06965), 1F1B and interleaved
    1F1B (arXiv:2104.04473).
    """
    layout, again = case.layout, case.layout.recompute
    plain = again is Recompute.NONE or (again is Recompute.FULL and not case.precision.is_mixed)
    plain = plain and layout.cp == 1 and not layout.sequence_parallel and case.workload.model.dropout == 0
    plain = plain and not case.tuning.passes_otherwise
    return plain and (layout.pp == 1 or layout.schedule is not Schedule.ZERO_BUBBLE)


def micro_batch_tokens(case: Case) -> int:
    """Return the tokens of a micro-batch on one rank."""
    layout, workload = case.layout, case.workload
    return workload.global_batch // (layout.dp * layout.num_micro_batches) * workload.model.seq_len


def __getattr__(name: str) -> type:
    """Return a class by its name in an older version, with a `DeprecationWarning`."""
    if name != "Remainder":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("Remainder is now called ExtraMemory", DeprecationWarning, stacklevel=2)
    return ExtraMemory
