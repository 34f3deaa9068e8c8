"""Recordings of a script's steps, and their files: one for each rank and step, readable only by their owner."""

from __future__ import annotations

import io
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshmark.check.pieces import Piece


@dataclass(kw_only=True)
class Term:
    """One call of a loss function such as `cross_entropy`."""

    name: str
    reduction: str
    scored: Tensor
    """Which targets count, as booleans in the shape of the targets."""
    weighted: bool = False
    """Whether classes or targets have weights of their own."""
    gradient: Tensor | None = None
    """Gradient of the loss that was differentiated, with respect to this function's result."""
    inside: bool = False
    """Whether the outermost module made the result, and made its outputs from that."""


@dataclass(kw_only=True)
class Call:
    """One call of the outermost module, with gradients enabled."""

    root: int
    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    random_state: Tensor
    training: list[bool]
    """Training mode of every module."""
    autocast: torch.dtype | None
    buffers: dict[str, Tensor]
    replaced: list[str] = field(default_factory=list)
    """Buffers that a wrapper has replaced before it called the module, as DDP does by the first rank's."""
    outputs: list[Tensor] = field(default_factory=list)
    """The first elements of every output that has a gradient, with the output's norm appended."""
    gradients: list[Tensor | None] = field(default_factory=list)
    """Gradients of the loss that was differentiated, with respect to these outputs."""
    used: set[int] = field(default_factory=set)
    """Outputs that enter the loss directly, not through another output."""
    nested: bool = False
    """Whether one of these outputs is computed from another."""
    terms: list[Term] = field(default_factory=list)
    feeds: bool = False
    """Whether an output entered another module that the script called."""
    scale: float = 1.0
    """Factor by which a `GradScaler` had multiplied the loss."""
    entering: float = 1.0
    """Factor by which a wrapper multiplied the gradients that entered its outputs."""

    @property
    def used_gradients(self) -> list[tuple[int, Tensor]]:
        """Gradients with which the model is differentiated, by output number. Empty if its outputs were not used."""
        return [(n, g) for n, g in enumerate(self.gradients) if g is not None and n in self.used]


@dataclass(kw_only=True)
class Clip:
    """One call of `clip_grad_norm_` or `clip_grad_value_`."""

    names: list[str]
    """Parameters that were passed to it."""
    gradients: dict[str, Tensor]
    """Gradients before clipping."""
    max_norm: float
    """Largest norm, or with `by_value` the largest absolute value of an element."""
    norm_type: float
    by_value: bool = False
    """True for `clip_grad_value_`."""
    scaled: float = 1.0
    """Factor by which a `GradScaler` had multiplied the gradients at that time."""


@dataclass(kw_only=True)
class Group:
    """One group of parameters of one optimizer, at one step."""

    optimizer: int
    """Index of the optimizer object, in the order in which they were first observed."""
    cls: str
    """The optimizer's class, such as `torch.optim.adamw.AdamW`."""
    names: list[str]
    options: dict[str, Any]


@dataclass(kw_only=True)
class Step:
    """Record of one rank up to and including one optimizer step. Tensors are this rank's parts."""

    calls: list[Call] = field(default_factory=list)
    clips: list[Clip] = field(default_factory=list)
    clipped_nothing: list[str] = field(default_factory=list)
    """Parameters that were clipped while none of them had a gradient."""
    groups: list[Group] = field(default_factory=list)
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    """State of the optimizer before the first recorded step, by parameter."""
    before: dict[str, Tensor] = field(default_factory=dict)
    """Parameters when the step began. Empty if they are those after the step before."""
    changed: bool = False
    """Whether something other than the optimizer has changed parameters since the step before."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Gradients that the optimizer received."""
    after: dict[str, Tensor] = field(default_factory=dict)
    """Parameters after the optimizer's step."""
    losses: list[float] = field(default_factory=list)
    """Values of everything that was differentiated."""
    gathered: str = ""
    """Collective by which the script brought values together between forward and backward, if it did."""
    schedule_steps: int = 0
    """Most steps that one learning-rate schedule took for this step."""
    skipped: int = 0
    """Number of steps before this one that a `GradScaler` skipped."""
    seconds: float = 0.0
    """Seconds that recording took."""

    @property
    def clips_parts(self) -> bool:
        """Whether several clippings each had parameters of their own."""
        names = [name for clip in self.clips for name in clip.names]
        return len(self.clips) > 1 and len(names) == len(set(names))

    @property
    def complete_gradients(self) -> dict[str, Tensor]:
        """Gradients before clipping, if clipping was observed. Of several clippings of the same, the last counts."""
        return self.clips[0 if self.clips_parts else -1].gradients if self.clips else self.gradients


@dataclass(kw_only=True)
class Facts:
    """Facts that do not change from step to step."""

    rank: int
    world: int
    wrappers: list[str]
    bypassed: str
    """Class of a wrapper past which the script calls a module. Empty if there is none."""
    pieces: dict[str, Piece]
    partners: tuple[int, ...]
    """Ranks that compute each forward pass together, as in tensor parallelism. Empty if this rank computes alone."""
    gradient_pieces: dict[str, Piece]
    """Places of gradients that are stored otherwise than their parameters."""
    partial: set[str]
    """Parameters of whose gradients each of these ranks holds a summand."""
    trained: list[str]
    """Parameters that require a gradient."""
    held: list[str]
    """Parameters that an optimizer held at any step: optimizers may take turns."""
    strangers: int
    """Most tensors that an optimizer held in one group and that belong to no model that was called."""
    device: str
    dtypes: dict[str, torch.dtype]
    end: str
    """Why recording ended: `enough`, `script ended`, `raised`, `refused`."""
    detail: str = ""
    script_seconds: float = 0.0
    """Seconds from the first recorded step to the last."""
    record_seconds: float = 0.0
    num_steps: int = 0


class Folder:
    """Recordings of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write_step(self, rank: int, number: int, step: Step, limit: int) -> int:
        """Write a step of a rank, and return its size in bytes.

        Raises `OSError` if it would take more than `limit` bytes.
        """
        return self._write(f"rank{rank}-step{number}.pt", step, limit)

    def write_facts(self, facts: Facts) -> None:
        self._write(f"rank{facts.rank}.pt", facts, 1 << 40)

    def _write(self, name: str, value: object, limit: int) -> int:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        size = buffer.tell()
        if size > limit:
            raise OSError(f"a step of this rank takes {size:,} bytes, and {limit:,} are left of --max-disk")
        part = self.path / f".{name}.part"
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(buffer.getbuffer())
        part.rename(self.path / name)
        return size

    def has_facts(self, rank: int) -> bool:
        """Return whether recording has ended on this rank."""
        return (self.path / f"rank{rank}.pt").exists()

    def facts(self, rank: int) -> Facts:
        return self._read(self.path / f"rank{rank}.pt")  # type: ignore[no-any-return]

    def meet(self, rank: int, world: int, seconds: float) -> None:
        """Wait until every rank is here or has ended.

        A rank that left earlier would break transfers that others still receive.
        """
        (self.path / f"rank{rank}.here").touch(mode=0o600)
        end = time.monotonic() + seconds
        while time.monotonic() < end and not all(
            (self.path / f"rank{r}.here").exists() or self.has_facts(r) for r in range(world)
        ):
            time.sleep(0.01)

    def step(self, rank: int, number: int) -> Step:
        return self._read(self.path / f"rank{rank}-step{number}.pt")  # type: ignore[no-any-return]

    def _read(self, path: Path) -> Any:  # noqa: ANN401
        """Load a recording. It contains the script's data, of any class, and must belong to this user.

        Raises `OSError` if the file belongs to another user.
        """
        status = path.stat()
        if status.st_uid != os.getuid():
            raise OSError(f"{path} belongs to another user")
        return torch.load(path, map_location="cpu", weights_only=False)
