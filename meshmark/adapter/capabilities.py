"""What an adapter supports, and what it needs installed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.util import find_spec

from meshmark.spec.algorithm import AlgorithmKind
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout, Recompute
from meshmark.spec.model_spec import Family
from meshmark.spec.precision import Precision


class Feature(StrEnum):
    """What a case or a pass may ask of an adapter beyond degrees, stages and precisions."""

    TIED_EMBEDDINGS = "tied embeddings"
    DROPOUT = "dropout"
    FROZEN = "frozen parameters"
    DECAY_GROUPS = "weight-decay groups"
    SCHEDULE = "a learning-rate schedule"
    UNUSED = "parameters unused in a step"
    RECOMPUTE = "activation recomputation"
    EVALUATE = "evaluation"
    SAVE = "checkpoints"
    RESHARD = "checkpoints across world sizes"


def features(case: Case) -> frozenset[Feature]:
    """What training `case` takes."""
    workload = case.workload
    asked = {
        Feature.TIED_EMBEDDINGS: workload.model.tied_embeddings,
        Feature.DROPOUT: workload.model.dropout > 0,
        Feature.FROZEN: bool(workload.frozen),
        Feature.DECAY_GROUPS: workload.optimizer.decay_matrices_only,
        Feature.SCHEDULE: workload.optimizer.warmup_steps > 0,
        Feature.UNUSED: workload.skipped_block is not None,
        Feature.RECOMPUTE: case.layout.recompute is not Recompute.NONE,
    }
    return frozenset(feature for feature, wanted in asked.items() if wanted)


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What an adapter supports; anything else is skipped with its reason, never run as something else."""

    degrees: frozenset[str] = frozenset()
    """Which of `dp`, `tp`, `pp` may exceed one."""
    zero_stages: frozenset[int] = frozenset({0})
    precisions: frozenset[Precision] = frozenset({Precision.FP32})
    families: frozenset[Family] = frozenset(Family)
    algorithms: frozenset[AlgorithmKind] = frozenset({AlgorithmKind.SYNCHRONOUS})
    lacks: Mapping[Feature | Precision, str] = field(default_factory=dict)
    """Features that are missing, each with its reason, and the reasons of missing precisions."""
    devices: frozenset[str] = frozenset({"cpu", "cuda"})

    def refusal(self, case: Case, device: str, needs: frozenset[Feature] = frozenset()) -> str | None:
        """Why `case` cannot run on `device` under these capabilities; None when it can. `needs`: what the pass takes
        beyond the case."""
        layout, model = case.layout, case.workload.model
        unsupported = [
            f"{d}={getattr(layout, d)}" for d in ("dp", "tp", "pp") if getattr(layout, d) > 1 and d not in self.degrees
        ]
        plain = Layout(
            dp=layout.dp,
            tp=layout.tp,
            pp=layout.pp,
            zero_stage=layout.zero_stage,
            num_micro_batches=layout.num_micro_batches,
            recompute=Recompute.FULL if layout.recompute is Recompute.FULL else Recompute.NONE,
        )
        if layout != plain:  # schedules, context parallelism, selective recomputation, offload: the planner's, so far
            unsupported.append(f"all of layout {layout.id}")
        if layout.zero_stage not in self.zero_stages:
            unsupported.append(f"ZeRO stage {layout.zero_stage}")
        if case.precision not in self.precisions:
            reason = self.lacks.get(case.precision)
            unsupported.append(f"precision {case.precision}" + (f" ({reason})" if reason else ""))
        if (kind := case.workload.algorithm.kind) not in self.algorithms:
            unsupported.append(f"algorithm {kind} (it trains by {', '.join(sorted(self.algorithms))} alone)")
        if model.family not in self.families:
            unsupported.append(f"model family {model.family}")
        unsupported += [f"{f} ({self.lacks[f]})" for f in Feature if f in self.lacks and f in features(case) | needs]
        if device not in self.devices:
            unsupported.append(f"device {device}")
        return f"{case.adapter} does not support {', '.join(unsupported)}" if unsupported else None


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """A package that an adapter needs."""

    module: str
    """Name to import."""
    distribution: str
    """Name to install, also the extra in pyproject.toml that brings it."""

    @property
    def missing(self) -> str | None:
        """What to do when the package is not installed; None when it is. Imports nothing."""
        try:
            found = find_spec(self.module) is not None
        except ModuleNotFoundError:  # a dotted name whose parent is missing
            found = False
        return None if found else f"{self.distribution} is not installed: pip install {self.distribution}"
