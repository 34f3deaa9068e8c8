"""The interface that every framework's adapter implements.

An `Adapter` declares what its framework supports (`Capabilities`), and how it computes where a precision leaves a
choice (`Arithmetic`). It builds an `Engine` in each rank, which trains. Neither of them times or judges itself: meters
measure from outside.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

from packaging.version import Version

from meshmark.environment import interpreter_of
from meshmark.errors import AdapterError
from meshmark.models.transformer import TEXT_FAMILIES, Family
from meshmark.spec.algorithm import SYNCHRONOUS, Algorithm
from meshmark.spec.case import Case, Knob
from meshmark.spec.known_gap import KnownGap
from meshmark.spec.layout import AXES, Axis, Layout, Offload, Recompute, Schedule
from meshmark.spec.optimizer import OptimizerKind
from meshmark.spec.precision import Precision
from meshmark.theory.memory import ExtraMemory
from meshmark.theory.model_theory import local_parameters
from meshmark.theory.recipe import TrainingRecipe, eager_recipe
from meshmark.theory.traffic import OneTimeTraffic, TrafficException

if TYPE_CHECKING:
    from meshmark.adapter.engine import Engine, RankContext


# --- How a framework computes what a precision leaves open.


class Casting(StrEnum):
    """Who makes the narrow copies of weights that matrix products read in mixed precision."""

    AUTOCAST = "autocast"
    """`torch.autocast`, one operation at a time; norms and the residual stream stay wide."""
    WEIGHTS = "weights"
    """All weights are cast, and with them the whole residual stream, as sharding frameworks do."""


class Summing(StrEnum):
    """Where the gradients of a tensor with several readers are summed first. Each sum is rounded to its dtype."""

    TENSORS = "tensors"
    """One after another, in autograd's order."""
    BLOCKS = "blocks"
    """Once for every block that reads the tensor. An autograd node at the block's inputs shows when it is done."""
    MODULES = "modules"
    """Once for every module, for the same reason."""


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """Arithmetic that an adapter declares for a case in mixed precision, besides the precision itself.

    It leaves open the order of rows, the attention kernel, and whether products are fused or split. Under autocast it
    also leaves the micro-batches open.
    """

    casting: Casting
    averages: bool = True
    """True if losses are multiplied by the number of data-parallel ranks and gradients averaged.

    False if gradients are summed.
    """
    divides: bool = False
    """True if losses are multiplied by the number of micro-batches, because the framework divides by it again."""
    reduces_each: bool = False
    """True if gradients are reduced after every micro-batch, not once per step as a sum.

    Both give the same result unless the reduction rounds.
    """
    sums: Summing = Summing.TENSORS
    """Order of sums at ZeRO stage 3, where frameworks observe modules. It has no effect at other stages."""
    adds_biases_apart_at: frozenset[int] = frozenset()
    """ZeRO stages at which linear layers add biases to products that are rounded already, as `x @ W.T + bias` does.

    A bias that is smaller than half of the product's last place is then lost. DeepSpeed's layers do so at stage 3,
    except to inputs of two dimensions, and so does the twin.
    """
    splits_products: bool = False
    """True if linear layers and the loss are split over tensor-parallel ranks, as in Megatron-LM.

    Sums over ranks after row-parallel products, and of the gradient of the head's input, are in the narrow dtype.
    Biases are added in the wide dtype, also on a single rank.
    """
    gpt_model_order: bool = False
    """True if layers and loss follow megatron-core's own GPTModel.

    Queries, keys and values are one product. Attention is unfused, with its softmax in float32. Sequences come first.
    Biases of row-parallel products are added separately.
    """


# --- Capabilities of an adapter, and the packages it needs.

FUSED = frozenset({OptimizerKind.ADAMW, OptimizerKind.SGD})
"""Kinds of optimizers that PyTorch has a fused kernel for."""


class Feature(StrEnum):
    """Features that a case or a pass may need of an adapter beyond degrees, stages and precisions."""

    TIED_EMBEDDINGS = "tied embeddings"
    DROPOUT = "dropout"
    FROZEN = "frozen parameters"
    UNFREEZE = "parameters unfrozen while training"
    DECAY_GROUPS = "weight-decay groups"
    SCHEDULE = "a learning-rate schedule"
    BUFFERS = "buffers by replica"
    MATRIX_WISE = "optimizers whose updates take whole matrices"
    UNUSED = "parameters unused in a step"
    SCALARS = "parameters without a dimension"
    RECOMPUTE = "activation recomputation"
    EVALUATE = "evaluation"
    SAVE = "checkpoints"
    RESHARD = "checkpoints across world sizes"
    FAKE_WORLD = "one rank of a fake world"


def features(case: Case) -> frozenset[Feature]:
    """Return the features that training `case` needs."""
    workload = case.workload
    asked = {
        Feature.TIED_EMBEDDINGS: workload.model.tied_embeddings,
        Feature.DROPOUT: workload.model.dropout > 0,
        Feature.FROZEN: bool(workload.frozen),
        Feature.UNFREEZE: workload.unfreeze_step is not None,
        Feature.DECAY_GROUPS: workload.optimizer.groups_decay,
        Feature.SCHEDULE: workload.optimizer.warmup_steps > 0,
        Feature.BUFFERS: workload.couples_rows,
        Feature.MATRIX_WISE: workload.optimizer.is_matrix_wise,
        Feature.UNUSED: workload.leaves_unused,
        Feature.SCALARS: workload.model.has_scalars,
        Feature.RECOMPUTE: case.layout.recompute is not Recompute.NONE,
    }
    return frozenset(feature for feature, wanted in asked.items() if wanted)


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Cases that an adapter supports. Anything else is skipped with its reason, and never run as something else."""

    degrees: frozenset[Axis] = frozenset()
    """Axes whose degree may exceed one. Any number of ranks is allowed."""
    combinations: frozenset[frozenset[Axis]] | None = None
    """Largest sets of these axes that may be combined. None allows every combination."""
    zero_stages: frozenset[int] = frozenset({0})
    schedules: frozenset[Schedule] = frozenset({Schedule.GPIPE})
    """Schedules of a pipeline, if `pp` is among the degrees."""
    virtual_stages: frozenset[int] = frozenset({1})
    """Chunks of layers that a pipeline rank may hold."""
    folded: bool = False
    """Whether virtual stages are placed as a V, and in no other way; see `Layout.folded`."""
    sequence_parallel: bool = False
    recomputes: frozenset[Recompute] = frozenset({Recompute.NONE, Recompute.FULL})
    """Parts that may be recomputed in the backward pass; see also `Feature.RECOMPUTE`."""
    offloads: frozenset[Offload] = frozenset({Offload.NONE})
    precisions: frozenset[Precision] = frozenset({Precision.FP32})
    tunings: frozenset[Knob] = frozenset()
    """Tunings built by `configure`, `build_optimizer` and `loss_share`. Every run checks that they are in use."""
    families: frozenset[Family] = TEXT_FAMILIES
    """Model families that it can train. The default has only transformers over tokens."""
    algorithms: frozenset[str] = frozenset({SYNCHRONOUS.kind})
    """Kinds of algorithms that it supports, as in `Algorithm.kind`."""
    compressors: frozenset[str] = frozenset()
    """Kinds of compressors that it has, for algorithms that compress."""
    unfreezes: bool = False
    """Whether parameters may be unfrozen between two steps, by `Engine.unfreeze`."""
    dtensors: bool = False
    """Whether its parameters are PyTorch's DTensors."""
    lacks: Mapping[Feature | Precision | Family | Knob, str] = field(default_factory=dict)
    """Missing features, precisions, families and tunings, each with the reason why it is missing."""
    devices: frozenset[str] = frozenset({"cpu", "cuda"})

    def __post_init__(self) -> None:
        """Raise `AdapterError` for a value that no case can have: it would silently skip every case."""
        known: dict[str, tuple[Collection[object], str]] = {
            "degrees": (AXES, ", ".join(AXES)),
            "precisions": ([p for p in self.precisions if isinstance(p, Precision)], "such as Precision.FP32"),
            "schedules": (tuple(Schedule), ", ".join(Schedule)),
            "families": (tuple(Family), ", ".join(Family)),
            "devices": (("cpu", "cuda"), "cpu, cuda"),
        }
        for name, (values, expected) in known.items():
            if wrong := sorted(repr(value) for value in getattr(self, name) if value not in values):
                raise AdapterError(f"Capabilities: {name} holds {', '.join(wrong)}; expected {expected}")

    def beyond(self, layout: Layout) -> list[str]:
        """Return the unsupported features of `layout` that do not depend on the workload or the machine."""
        used = [axis for axis in AXES if getattr(layout, axis) > 1]
        found = [f"{axis}={getattr(layout, axis)}" for axis in used if axis not in self.degrees]
        together = self.degrees.intersection(used)
        if self.combinations is not None and len(together) > 1:
            if not any(together <= allowed for allowed in self.combinations):
                found.append(" with ".join(axis for axis in AXES if axis in together))
        asked = {
            f"ZeRO stage {layout.zero_stage}": layout.zero_stage in self.zero_stages,
            f"schedule {layout.schedule}": layout.pp == 1 or layout.schedule in self.schedules,
            f"{layout.virtual_stages} virtual stages": layout.virtual_stages in self.virtual_stages,
            f"{'folded' if layout.folded else 'unfolded'} stages": layout.virtual_stages == 1
            or layout.folded == self.folded,
            "sequence parallelism": self.sequence_parallel or not layout.sequence_parallel,
            f"{layout.recompute} recomputation": layout.recompute in self.recomputes,
            f"offload to {layout.offload}": layout.offload in self.offloads,
        }
        return found + [what for what, supported in asked.items() if not supported]

    def refusal(self, case: Case, device: str, backend: str) -> str | None:
        """Return why `case` cannot run on `device` over `backend` under these capabilities, or None if it can."""
        model, unsupported = case.workload.model, self.beyond(case.layout)
        if case.precision not in self.precisions:
            reason = self.lacks.get(case.precision)
            unsupported.append(f"precision {case.precision}" + (f" ({reason})" if reason else ""))
        algorithm = case.workload.algorithm
        if (kind := algorithm.kind) not in self.algorithms:
            unsupported.append(f"algorithm {kind} (it trains by {', '.join(sorted(self.algorithms))} alone)")
        elif algorithm.compressor_kind and algorithm.compressor_kind not in self.compressors:
            has = ", ".join(sorted(self.compressors))
            unsupported.append(f"compressor {algorithm.compressor_kind} (it has {has} alone)")
        elif algorithm.replicas_differ and case.precision.narrows_reduction:
            unsupported.append(
                f"algorithm {kind} with reductions in {case.precision.reduction} (its noise is not known)"
            )
        if model.family not in self.families:
            reason = self.lacks.get(model.family)
            unsupported.append(f"model family {model.family}" + (f" ({reason})" if reason else ""))
        if case.workload.routes and case.precision.is_mixed:
            unsupported.append(f"experts in {case.precision} (whose rounding would decide which are chosen)")
        unsupported += [*model.refusals(case), *self.lacking(features(case)), *self._untuned(case, device)]
        if device not in self.devices:
            unsupported.append(f"device {device}")
        if case.layout.pp > 1 and (device, backend) == ("cuda", "gloo"):
            # ProcessGroupGloo::send and recv hand the tensor's address to a socket; collectives go by way of the host.
            unsupported.append("pipelines of CUDA tensors over gloo (its send and recv take host memory alone)")
        if self.dtensors and case.world_size > 1 and (device, backend) == ("cuda", "gloo"):
            # `torch.distributed._functional_collectives.all_gather_tensor` ends the process (PyTorch 2.11 on an H200).
            unsupported.append("DTensors on CUDA over gloo (PyTorch's gather of them crashes)")
        return f"{case.adapter} does not support {', '.join(unsupported)}" if unsupported else None

    def _untuned(self, case: Case, device: str) -> Iterator[str]:
        """Yield the parts of the case's tuning that are unavailable, each with its reason."""
        for knob in case.tuning.knobs:
            if knob not in self.tunings:
                yield f"tuning its {knob} ({self.lacks.get(knob, 'not tried')})"
        if case.tuning.fused_optimizer and case.workload.optimizer.kind not in FUSED:
            yield f"a fused {case.workload.optimizer.kind} (PyTorch has {' and '.join(sorted(FUSED))} fused)"
        yield from case.tuning.missing(device)

    def trains_by(self, algorithm: Algorithm) -> bool:
        compressor = algorithm.compressor_kind
        return algorithm.kind in self.algorithms and (compressor is None or compressor in self.compressors)

    def lacking(self, needs: frozenset[Feature]) -> list[str]:
        """Return the missing features among `needs`, each with its reason."""
        lacks = self.lacks if self.unfreezes else {Feature.UNFREEZE: "not tried", **self.lacks}
        return [f"{feature} ({lacks[feature]})" for feature in Feature if feature in lacks.keys() & needs]


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """A package that an adapter needs."""

    module: str
    """Name to import."""
    distribution: str
    """Name to install, also the extra in pyproject.toml that brings it."""
    command: str = ""
    """Command that installs it, if pip alone does not. There is no extra then."""
    at_least: str = ""
    """Oldest version that has what the adapter calls. Empty if any version will do."""

    @property
    def missing(self) -> str | None:
        """Return what to do if the package is not installed or too old; None if it is usable. Imports nothing."""
        try:
            found = find_spec(self.module) is not None
        except ModuleNotFoundError:  # a dotted name whose parent is missing
            found = False
        wanted = f"'{self.distribution}>={self.at_least}'" if self.at_least else self.distribution
        command = self.command or f"pip install {wanted}"
        if not found:
            return f"{self.distribution} is not installed: {command}"
        if self.at_least and Version(version(self.distribution)) < Version(self.at_least):
            return f"{self.distribution} {version(self.distribution)} is older than {self.at_least}: {command}"
        return None


PYTORCH_2_13 = Requirement(module="torch", distribution="torch", at_least="2.13")
"""Requirement of adapters that need more than PyTorch 2.11, the oldest version that Meshmark supports."""


# --- The interface that every framework's adapter implements.


class Track(StrEnum):
    """Who makes the choices that a framework leaves to its user."""

    THEORY = "as theory says"
    """Every choice is explicit, so that memory and traffic are those of the layout."""
    AUTHORS = "as its authors recommend"
    """Documented defaults and tuning, such as prefetching and reuse. The adapter's name ends in `-recommended`."""


_RENAMED = {"remainders": "extra_memory", "departures": "traffic_exceptions"}
"""Methods of an adapter by their names in the version before this."""


class Adapter(ABC):
    """Adapter for one framework with one set of choices.

    Its module must be importable without the framework: the framework is imported in `build`.
    """

    track: ClassVar[Track] = Track.THEORY
    requires: ClassVar[tuple[Requirement, ...]] = ()
    virtual_environment: ClassVar[str] = ""
    """Name of the virtual environment that ranks start in. Empty for the environment that Meshmark runs in.

    It is for frameworks whose pinned dependencies conflict with Meshmark's. `make env NAME=...` creates it under the
    constraints of environments/NAME.txt.
    """
    preload: ClassVar[tuple[str, ...]] = ()
    """Further modules that `build` imports. They are slow, so they are imported once for all ranks."""
    arithmetic: ClassVar[Arithmetic | None] = None
    """How it computes what a mixed precision leaves open. A twin in one process does the same.

    None means that there is no twin, and gradients are compared with float64 alone.
    """
    capabilities: ClassVar[Capabilities]
    known_gaps: ClassVar[tuple[KnownGap, ...]] = ()

    @abstractmethod
    def build(self, case: Case, context: RankContext) -> Engine:
        """Return an engine that holds the workload's initial values and is ready for its first step."""

    @classmethod
    def environment(cls, device: str) -> dict[str, str]:
        """Return the environment variables that the framework reads when it is imported."""
        return {}

    @classmethod
    def modules(cls) -> list[str]:
        """Return the modules that ranks will import; none if the framework is not installed."""
        if cls.virtual_environment:  # another interpreter, whose packages are not seen from here
            return [*(r.module for r in cls.requires), *cls.preload]
        return [*(r.module for r in cls.requires), *cls.preload] if not any(r.missing for r in cls.requires) else []

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        """Return how this framework stores a model in training. Its planned memory follows from this."""
        return eager_recipe(case)

    def __init_subclass__(cls, **kwargs: Any) -> None:  # noqa: ANN401
        """Accept methods of older adapters under their old names, with a `DeprecationWarning`."""
        super().__init_subclass__(**kwargs)
        for old, new in _RENAMED.items():
            if old in cls.__dict__ and new not in cls.__dict__:
                warnings.warn(
                    f"{cls.__name__}.{old} is now called {new}; the old name works until the next minor version",
                    DeprecationWarning,
                    stacklevel=2,
                )
                setattr(cls, new, cls.__dict__[old])

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        """Return where this framework's states or activations are known to differ from the closed form.

        The closed form is that of its recipe and layout. `rank` is the rank that is asked about. By default it is what
        the workload's algorithm keeps.
        """
        algorithm = case.workload.algorithm
        kept = algorithm.vectors_kept(case, rank)
        count = local_parameters(case.workload.model, case.layout, rank) if kept else None
        if count is None:
            return ()
        num_bytes = kept * count * case.precision.master.itemsize
        return (ExtraMemory(category="optimizer_states", num_bytes=num_bytes, reason=f"what {algorithm.kind} keeps"),)

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        """Return the known differences between this framework's traffic and the planned traffic of `rank`.

        Every case is compared with the plan of `meshmark.theory.traffic.step_traffic`. If steps differ, the exceptions
        describe that module's `METERED_STEP`.
        """
        return ()

    @classmethod
    def plans_traffic(cls, case: Case) -> bool:
        """Return whether this framework's traffic is known. Unknown traffic is reported as *not judged*."""
        return True

    @classmethod
    def one_time_traffic(cls, case: Case, rank: int) -> tuple[OneTimeTraffic, ...]:
        """Return the additional traffic of `rank` in the steps in which this framework sets itself up.

        Every step of a run must send what the metered step sends, plus this traffic. The default is what PyTorch's
        DistributedDataParallel sends in the second step, because many frameworks wrap it.
        """
        from meshmark.adapter.engine import rebuilt_buckets  # loads torch, which a planner does without

        return (rebuilt_buckets(case),) if case.layout.dp > 1 else ()

    @classmethod
    def remainders(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        """Deprecated: call `extra_memory`."""
        warnings.warn("Adapter.remainders is now called extra_memory", DeprecationWarning, stacklevel=2)
        return cls.extra_memory(case, rank)

    @classmethod
    def departures(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        """Deprecated: call `traffic_exceptions`."""
        warnings.warn("Adapter.departures is now called traffic_exceptions", DeprecationWarning, stacklevel=2)
        return cls.traffic_exceptions(case, rank)

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        """Return why the framework cannot run `case` on `device` over `backend`, or None if it can.

        `device` is "cpu" or "cuda", and `backend` is "gloo" or "nccl". The default checks `capabilities`. Override it
        for conditions that capabilities cannot express.
        """
        return cls.capabilities.refusal(case, device, backend)

    @classmethod
    def refusal(cls, case: Case, device: str, backend: str, needs: frozenset[Feature] = frozenset()) -> str | None:
        """Return why `case` must be skipped (it is unsupported, or a package is missing), or None if it can run.

        `needs` is the features that the pass needs beyond those of the case.
        """
        reason, lacking = cls.supports(case, device, backend), cls.capabilities.lacking(needs)
        if reason or lacking:
            return ", ".join([reason or f"{case.adapter} does not support {lacking.pop(0)}", *lacking])
        if name := cls.virtual_environment:
            there = interpreter_of(name).exists()
            return None if there else f"the environment {name} of {case.adapter} is not there: make env NAME={name}"
        return next((reason for requirement in cls.requires if (reason := requirement.missing)), None)
