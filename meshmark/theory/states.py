"""What the planner's `memory` says of one rank of one case: the form in which the suites hold it to measurement."""

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
    """That live from step to step for the sake of communication, and of gradients in their place."""
    tables: float = 0.0
    """Of rotary positions, which every process keeps, and statistics of batch norms: not in the peak below."""
    host_parameters: float = 0.0
    """Masters that the host keeps in its own memory and updates (ZeRO-Offload, arXiv:2101.06840 sec. 4): on a CPU the
    same memory as all else, on a GPU not its allocator's."""
    host_gradients: float = 0.0
    """That the host updates those masters with."""
    host_optimizer_states: float = 0.0
    host_buffers: float = 0.0
    """Those gradients, where they are there for life."""
    activations: float | None = None
    """When the step's first backward pass begins; None where they are not planned."""
    peak: float | None = None
    """The most of all at one instant, on this rank at DeepSpeed's stage 2, else on the fullest of the stage; None where
    activations are not planned, and where the planner does not know the copies: DeepSpeed's in mixed precision, at
    stage 3 (whose modules gather their weights one by one), and of several groups of parameters, those of a reduction
    in another format than gradients are held in, what optimizers but AdamW and plain SGD make, a server that
    more than two replicas tell, and chunks of a pipeline in another order than interleaved 1F1B."""
    backward_peak: float | None = None
    """The same of a step's backward passes alone, beside which activations are that adapters declare."""

    def with_host(self) -> ModelStates:
        """Where the host's memory is the device's."""
        return replace(
            self,
            parameters=self.parameters + self.host_parameters,
            gradients=self.gradients + self.host_gradients,
            optimizer_states=self.optimizer_states + self.host_optimizer_states,
            buffers=self.buffers + self.host_buffers,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtraMemory:
    """Bytes that a framework really holds beyond (or, negative, short of) the closed form, and why."""

    category: str
    """parameters, gradients, optimizer_states, activations, steady for what is there all the time besides, peak for
    what is there besides then, or unnamed for what may be there and need not, where no peak is planned."""
    num_bytes: float
    reason: str
    on_host: bool = False
    """Whether it is in the host's memory, which is the device's on a CPU alone."""


def declared_bytes(declared: Sequence[ExtraMemory], category: str) -> float:
    """Of one category; of all that is always there; at the peak of all but gradients, which the recipe's path brings
    there."""
    always = ("parameters", "optimizer_states", "steady")
    here = {"steady": always, "peak": (*always, "activations", "peak")}.get(category, (category,))
    return sum(r.num_bytes for r in declared if r.category in here)


def declared_peak(plan: ModelStates, declared: Sequence[ExtraMemory]) -> float | None:
    """Planned peak, with what is declared: of activations where there are any, not in the update."""
    if plan.peak is None:
        return None
    whole = plan.peak + declared_bytes(declared, "peak")
    if plan.backward_peak is None or plan.backward_peak == plan.peak:
        return whole
    updating = whole - declared_bytes(declared, "activations")
    return max(updating, plan.backward_peak + declared_bytes(declared, "peak"))


def model_states(case: Case, rank: int, recipe: TrainingRecipe | None = None) -> ModelStates | None:
    """What `rank` must hold under `case`'s layout. Of models that are no decoder-only transformers, and of stages that
    lie as a V, states alone are planned, which follow from the number of parameters; None where that is not known, or
    not enough."""
    model, layout = case.workload.model, case.layout
    grid = layout_grid(layout, case.workload.global_batch, layout.coordinates(rank).dp)
    using = recipe or eager_recipe(case)
    transformer = theory_of(model).transformer
    if layout.folded or transformer is None:
        if using.states.matrix_wise or (count := local_parameters(model, layout, rank)) is None:
            return None
        states = state_bytes(np.array([float(count)]), grid, using)
        activations = None
        if _is_exact(case) and using.activations_known and using.eager:
            casts = using.eager.casts_weights
            activations = theory_of(model).activation_bytes(case, rank, METERED_STEP, casts_weights=casts)
            if activations is not None:
                activations += _kept_weights(case, using)
        return ModelStates(
            parameters=float(states["parameters"][0]),
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
    known &= path is not GradientPath.STREAMED or not case.workload.optimizer.decay_matrices_only
    known &= layout.virtual_stages == 1 or using.backward.interleaves
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
    """Return the bytes of gathered weights that stay from a forward pass to its backward: of blocks, and of the
    rest."""
    layout, model = case.layout, case.workload.model
    if layout.dp * layout.cp <= using.replicas:
        return 0.0
    root = model.embedding_parameters + model.head_parameters
    kept = using.backward.kept_share * (model.num_parameters - root) + using.backward.keeps_root * root
    return using.wire.gather_bytes * kept


def _received(case: Case, rank: int, using: TrainingRecipe) -> float:
    """What pipeline stages receive, in buffers made once."""
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
    """What the host keeps of states that are offloaded to it: masters, fp32 gradients and moments of a rank's share,
    16 bytes a parameter less the weights (arXiv:2101.06840 sec. 3.2, with fp32 gradients); nothing of those on disk."""
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
    """Of gradients, or in their place, what is there when they have been forgotten: FSDP1's flat ones; DDP's buckets,
    of which they are views; the flat tensor of DeepSpeed's stage 3, and its bucket. `held`: bytes before the update."""
    match using.backward.gradient_path:
        case GradientPath.BUCKETS | GradientPath.FLAT_UNITS:
            return held
        case GradientPath.MODULES:
            return held + using.states.gradient_bytes * bucket_elements(case.workload.model)
    return 0.0


def _temporaries_are_known(case: Case) -> bool:
    """Of the reduction and of the update."""
    optimizer = case.workload.optimizer
    plain = not optimizer.is_matrix_wise and not optimizer.momentum
    planned = case.workload.algorithm.update_memory_is_planned(case.layout.dp)
    return plain and not case.precision.narrows_reduction and planned


def _is_exact(case: Case) -> bool:
    """Whether activations have been held to what PyTorch saves: with its own choice of kernels, without dropout,
    selective recomputation (or any under autocast), sequence and context parallelism, and in a pipeline under GPipe's
    schedule (arXiv:1811.06965), 1F1B and interleaved 1F1B (arXiv:2104.04473)."""
    layout, again = case.layout, case.layout.recompute
    plain = again is Recompute.NONE or (again is Recompute.FULL and not case.precision.is_mixed)
    plain = plain and layout.cp == 1 and not layout.sequence_parallel and case.workload.model.dropout == 0
    plain = plain and not case.tuning.passes_otherwise
    return plain and (layout.pp == 1 or layout.schedule is not Schedule.ZERO_BUBBLE)


def micro_batch_tokens(case: Case) -> int:
    """Of one rank."""
    layout, workload = case.layout, case.workload
    return workload.global_batch // (layout.dp * layout.num_micro_batches) * workload.model.seq_len


def __getattr__(name: str) -> type:
    """Return a class by its name of an older version, with a `DeprecationWarning`."""
    if name != "Remainder":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("Remainder is now called ExtraMemory", DeprecationWarning, stacklevel=2)
    return ExtraMemory
