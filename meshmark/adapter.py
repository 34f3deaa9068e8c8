"""The one interface that every framework is put behind.

An `Adapter` says what its framework can do and builds an `Engine` inside each rank; an engine trains. Neither times
nor judges itself: meters watch from outside.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from meshmark.case import Case
from meshmark.data import Batch
from meshmark.layout import Layout, Precision, Recompute
from meshmark.model_spec import Family
from meshmark.plan.recipe import TrainingRecipe, eager_recipe
from meshmark.plan.states import Remainder
from meshmark.plan.traffic import Traffic, step_traffic


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
    lacks: Mapping[Feature | Precision, str] = field(default_factory=dict)
    """Features that are missing, each with its reason, and the reasons of missing precisions."""
    devices: frozenset[str] = frozenset({"cpu", "cuda"})

    def refusal(self, case: Case, device: str, needs: frozenset[Feature] = frozenset()) -> str | None:
        """Why `case` cannot run on `device` under these capabilities; None when it can. `needs`: what the pass takes
        beyond the case."""
        layout, model = case.layout, case.workload.model
        unsupported = [f"{d}={getattr(layout, d)}" for d in ("dp", "tp", "pp")
                       if getattr(layout, d) > 1 and d not in self.degrees]  # fmt: skip
        plain = Layout(dp=layout.dp, tp=layout.tp, pp=layout.pp, zero_stage=layout.zero_stage,
                       num_micro_batches=layout.num_micro_batches,
                       recompute=Recompute.FULL if layout.recompute is Recompute.FULL else Recompute.NONE)  # fmt: skip
        if layout != plain:  # schedules, context parallelism, selective recomputation, offload: the planner's, so far
            unsupported.append(f"all of layout {layout.id}")
        if layout.zero_stage not in self.zero_stages:
            unsupported.append(f"ZeRO stage {layout.zero_stage}")
        if case.precision not in self.precisions:
            reason = self.lacks.get(case.precision)
            unsupported.append(f"precision {case.precision}" + (f" ({reason})" if reason else ""))
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


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """Where an engine finds itself. The default process group is up before `build` is called."""

    rank: int
    world_size: int
    device: torch.device
    backend: str
    """gloo or nccl."""
    scratch: Path
    """A folder of this case's own, removed after it."""


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """The tensors that a rank holds right now, by category. Meters count their storages, each once.

    An engine only *names* storages here: the meter's totals come from the allocator, and what is alive without being
    named shows as `other`.
    """

    parameters: list[Tensor] = field(default_factory=list)
    """Local parameters or shards, in every precision that is kept (bf16 weights and fp32 masters both)."""
    gradients: list[Tensor] = field(default_factory=list)
    optimizer_states: list[Tensor] = field(default_factory=list)
    """Moments; master weights are parameters."""
    communication: list[Tensor] = field(default_factory=list)
    """Buffers that live between steps for the sake of communication, such as gradient buckets."""


_MISSING = "this engine has no `{}`: write it, or name Feature.{} in its adapter's `Capabilities.lacks`"


@dataclass(frozen=True, kw_only=True)
class KnownGap:
    """A clause of the conformance table that a framework, in a documented configuration, fails."""

    clause: str
    reason: str
    symptom: str
    """What the evidence of the failure says: a failure that does not is another one."""
    link: str = ""
    """Upstream, where there is one."""
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    """Where it shows."""

    def covers(self, case: Case, clause: str) -> bool:
        return clause == self.clause and case.layout.zero_stage in self.zero_stages


class Engine(ABC):
    """One rank's part of a training run under one framework."""

    @abstractmethod
    def backward(self, batch: Batch) -> Tensor:
        """Forward and backward over a whole *global* batch (on the CPU), of which the engine trains its part.

        Afterwards every reduction over ranks is done: the gradient is that of the mean over all unmasked tokens of the
        global batch, not yet clipped. Returns this rank's share of the loss, a scalar on any device: the shares of all
        ranks add up to the global mean (a rank that computes none, or the same as another, returns zero).
        """

    @abstractmethod
    def update(self) -> Tensor | None:
        """Clip, step the optimizer, forget the gradients. Returns the global gradient norm before clipping, where the
        framework tells it."""

    def step(self, batch: Batch) -> Tensor:
        """One whole optimizer step; what the clock is held to. Returns what `backward` does."""
        loss = self.backward(batch)
        self.update()
        return loss

    @abstractmethod
    def parameters(self) -> Mapping[str, Tensor]:
        """The full value, by canonical name, of every parameter of which this rank holds any part; a collective call.
        Master weights where there are such. Without data parallelism's help: a replica returns its own."""

    @abstractmethod
    def gradients(self) -> Mapping[str, Tensor]:
        """The full reduced, unclipped gradients, like `parameters`; to be called between `backward` and `update`."""

    @abstractmethod
    def holdings(self) -> Holdings:
        """What this rank holds right now."""

    def evaluate(self, batch: Batch) -> Tensor:
        """This rank's share of the loss of a whole global batch in evaluation: no dropout, no gradients; the next step
        is as if it had not happened."""
        raise NotImplementedError(_MISSING.format("evaluate", Feature.EVALUATE.name))

    def save(self, folder: Path) -> None:
        """Leave all that training needs to go on in `folder`, which exists and all ranks share; a collective call."""
        raise NotImplementedError(_MISSING.format("save", Feature.SAVE.name))

    def load(self, folder: Path) -> None:
        """Go on from where the engine was that saved to `folder`: in the same layout or, unless the adapter lacks
        `RESHARD`, another. To be called before the first step; a collective call."""
        raise NotImplementedError(_MISSING.format("load", Feature.SAVE.name))

    def close(self) -> None:  # noqa: B027
        """Release what the process's end would not."""


class Adapter(ABC):
    """One framework. Its module must import without the framework: the import belongs into `build`."""

    requires: ClassVar[tuple[Requirement, ...]] = ()
    preload: ClassVar[tuple[str, ...]] = ()
    """Modules that `build` will import besides, slow enough to be worth importing once for all ranks."""
    capabilities: ClassVar[Capabilities]
    known_gaps: ClassVar[tuple[KnownGap, ...]] = ()

    @abstractmethod
    def build(self, case: Case, context: RankContext) -> Engine:
        """An engine ready for its first step, holding the workload's initial values."""

    @classmethod
    def environment(cls, device: str) -> dict[str, str]:
        """Variables that the framework reads when it is imported."""
        return {}

    @classmethod
    def modules(cls) -> list[str]:
        """What ranks will import; nothing when the framework is not installed."""
        return [*(r.module for r in cls.requires), *cls.preload] if not any(r.missing for r in cls.requires) else []

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        """How this framework keeps a model in training: what the planner's memory follows from."""
        return eager_recipe(case)

    @classmethod
    def remainders(cls, case: Case, rank: int) -> tuple[Remainder, ...]:
        """Where this framework's states, or activations, are known to differ from the closed form of its recipe and
        layout."""
        return ()

    @classmethod
    def traffic(cls, case: Case, rank: int) -> Traffic:
        """What this framework's algorithm asks for in one step, bytes by kind; scalars need not be counted."""
        return step_traffic(case, rank)

    @classmethod
    def refusal(cls, case: Case, device: str, needs: frozenset[Feature] = frozenset()) -> str | None:
        """Why `case` must be skipped on `device`: unsupported, or not installed. None when it can run. `needs`: what
        the pass takes beyond the case."""
        missing = [reason for requirement in cls.requires if (reason := requirement.missing)]
        return cls.capabilities.refusal(case, device, needs) or (missing[0] if missing else None)


def storage_bytes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address and size of every distinct storage behind `tensors`, empty ones left out."""
    storages = (t.untyped_storage() for t in tensors)
    return {s.data_ptr(): s.nbytes() for s in storages if s.nbytes()}
