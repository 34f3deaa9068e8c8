"""Capabilities of an adapter, and the packages it needs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import version
from importlib.util import find_spec

from packaging.version import Version

from meshmark.errors import AdapterError
from meshmark.spec.algorithm import SYNCHRONOUS, Algorithm
from meshmark.spec.case import Case
from meshmark.spec.layout import AXES, Axis, Layout, Offload, Recompute, Schedule
from meshmark.spec.model_spec import TEXT_FAMILIES, Family
from meshmark.spec.optimizer import OptimizerKind
from meshmark.spec.precision import Precision
from meshmark.spec.tuning import Knob

FUSED = frozenset({OptimizerKind.ADAMW, OptimizerKind.SGD})
"""Kinds of optimizers that PyTorch has a fused kernel for."""


class Feature(StrEnum):
    """Features that a case or a pass may need of an adapter beyond degrees, stages and precisions."""

    TIED_EMBEDDINGS = "tied embeddings"
    DROPOUT = "dropout"
    FROZEN = "frozen parameters"
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
    """The axes whose degree may exceed one, by any number of ranks."""
    combinations: frozenset[frozenset[Axis]] | None = None
    """Which of them may do so together, in the largest sets; None: all."""
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
    """Models that it can train; an adapter takes images only where it says so."""
    algorithms: frozenset[str] = frozenset({SYNCHRONOUS.kind})
    """Kinds of algorithms that it trains by, as `Algorithm.kind` has them."""
    compressors: frozenset[str] = frozenset()
    """Kinds of compressors that it has, for algorithms that compress."""
    dtensors: bool = False
    """Whether its parameters are PyTorch's DTensors."""
    lacks: Mapping[Feature | Precision | Family | Knob, str] = field(default_factory=dict)
    """Features that are missing, each with its reason, and the reasons of missing precisions, families and tunings."""
    devices: frozenset[str] = frozenset({"cpu", "cuda"})

    def __post_init__(self) -> None:
        """A value that no case can have would make every case a skip, in silence."""
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
        """Why `case` cannot run on `device` over `backend` under these capabilities; None when it can."""
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
        """Which of `needs` are missing, each with its reason."""
        return [f"{feature} ({self.lacks[feature]})" for feature in Feature if feature in self.lacks.keys() & needs]


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
"""For what PyTorch 2.11, which Meshmark takes, does not have."""
