"""Recordings of a script's steps, and their files: one for each rank and step, readable only by their owner."""

from __future__ import annotations

import io
import math
import os
import pickle
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from meshmark.check.pieces import Piece
from meshmark.check.tree import tensors_in

ALIGNED = 64
"""Tensors begin at multiples of this number of bytes in a file."""


@dataclass(kw_only=True)
class Term:
    """One call of a loss function such as `cross_entropy`."""

    name: str
    reduction: str
    scored: Tensor
    """Which targets count, as booleans in the shape of the targets."""
    targets: bytes = b""
    """Digest of the targets, whatever their order."""
    constant: float | None = None
    """Value of all targets, if it is one, as in a loss of real or of made-up images."""
    weighted: bool = False
    """Whether classes or targets have weights of their own."""
    gradient: Tensor | None = None
    """Gradient of the loss that was differentiated, with respect to this function's result."""
    inside: bool = False
    """Whether the outermost module made the result, and made its outputs from that."""
    multiplied: float = 1.0
    """Product of the numbers by which the script has multiplied the result. Divisions do not count."""


@dataclass(kw_only=True)
class Call:
    """One call of the outermost module, with gradients enabled."""

    root: int
    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    random_state: Tensor
    host_random: dict[str, Any]
    """States of the global generators of Python's `random` and of NumPy, which a module may draw from too."""
    training: list[bool]
    """Training mode of every module."""
    refrozen: dict[str, bool]
    """Whether a parameter requires a gradient, if that has changed since the module was first called."""
    autocast: torch.dtype | None
    of_inputs: bool
    """Whether an input is a tensor whose own gradient is asked for."""
    buffers: dict[str, Tensor]
    attributes: dict[tuple[str, ...], Any] = field(default_factory=dict)
    """Plain attributes of modules that have changed since the module was first called on this rank."""
    replaced: list[str] = field(default_factory=list)
    """Buffers that a wrapper has replaced before it called the module, as DDP does by the first rank's."""
    outputs: list[Tensor] = field(default_factory=list)
    """The first elements of every output that has a gradient, with the output's norm appended."""
    gradients: list[Tensor | None] = field(default_factory=list)
    """Gradients of the loss that was differentiated, with respect to these outputs."""
    output_pieces: dict[int, Piece] = field(default_factory=dict)
    """Places of this rank's parts of sharded outputs, by number. `outputs` then holds the whole part."""
    gradient_pieces: dict[int, Piece] = field(default_factory=dict)
    """Places of this rank's parts of their gradients."""
    used: set[int] = field(default_factory=set)
    """Outputs that enter the loss directly, not through another output."""
    nested: bool = False
    """Whether one of these outputs is computed from another."""
    terms: list[Term] = field(default_factory=list)
    feeds: bool = False
    """Whether an output entered another module that the script called."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Parameters that the script has changed since the step began, as they were at this call."""
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
    """Gradients before clipping: of all parameters, or of those in `names` where no earlier clipping named them."""
    max_norm: float
    """Largest norm, or with `by_value` the largest absolute value of an element."""
    norm_type: float
    by_value: bool = False
    """True for `clip_grad_value_`."""
    scaled: float = 1.0
    """Factor by which a `GradScaler` had multiplied the gradients at that time."""
    num_calls: int = 0
    """Number of calls of the step before it."""
    acts: bool = True
    """Whether it has changed gradients, where that is known."""

    def is_followed_by(self, gradients: dict[str, Tensor]) -> bool:
        """Return whether `gradients` are those that this clipping left, by whatever norm."""
        names = [name for name in self.names if name in self.gradients and name in gradients]
        if not names:
            return False
        before, after = (torch.cat([of[n].double().reshape(-1) for n in names]) for of in (self.gradients, gradients))
        if self.by_value:
            right = before.clamp(-self.max_norm, self.max_norm)
        else:
            factor = float(after @ before / (before @ before)) if before.any() else 1.0
            if not 0.0 < factor < 1.0 + 1e-6:
                return False
            right = factor * before
        eps = max(torch.finfo(gradients[name].dtype).eps for name in names)
        return float((after - right).norm()) <= 4 * eps * float(right.norm())


@dataclass(kw_only=True)
class Gather:
    """Gradients that passed a `torch.autograd.Function` that gathers a tensor from all ranks."""

    given: Tensor
    """Gradient with respect to this rank's tensor."""
    result: Tensor
    """Gradient with respect to all ranks' tensors, of shape (world, ...), from the loss of this rank."""


@dataclass(kw_only=True)
class Group:
    """One group of parameters of one optimizer, at one step."""

    optimizer: int
    """Index of the optimizer object, in the order in which they were first observed."""
    cls: str
    """The optimizer's class, such as `torch.optim.adamw.AdamW`."""
    names: list[str]
    options: dict[str, Any]
    is_compiled: bool = False
    """Whether `torch.compile` runs the step."""


@dataclass(kw_only=True)
class Step:
    """Record of one rank up to and including one optimizer step. Tensors are this rank's parts."""

    calls: list[Call] = field(default_factory=list)
    calls_before: int = 0
    """Number of calls that were left out before these, because their gradients were dropped."""
    cleared: int = 0
    """Number of calls after which `zero_grad` has cleared their gradients, without a step of the optimizer."""
    clips: list[Clip] = field(default_factory=list)
    edited: set[str] = field(default_factory=set)
    """Parameters whose gradients the script has changed by itself, on this rank alone, in a hook or after the last
    backward pass. Empty if it has called a collective since."""
    clipped_nothing: list[str] = field(default_factory=list)
    """Parameters that were clipped while none of them had a gradient."""
    groups: list[Group] = field(default_factory=list)
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    """State of the optimizer by parameter, where something else than the optimizer's steps has set it. Before the first
    recorded step it is all that there is."""
    before: dict[str, Tensor] = field(default_factory=dict)
    """Parameters when the step began. Empty if they are those after the step before."""
    changed: bool = False
    """Whether something other than the optimizer has changed parameters since the step before."""
    stepped_from: dict[str, Tensor] = field(default_factory=dict)
    """Parameters that the script has changed since the step began, as the optimizer found them."""
    beside: set[str] = field(default_factory=set)
    """Parameters that the loss reaches by another way than the outputs of a module, as a penalty on weights does."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Gradients that the optimizer received."""
    still_scaled: float = 1.0
    """Factor by which a `GradScaler` had multiplied the gradients that the optimizer received."""
    not_scaled: float = 1.0
    """Factor of a `GradScaler` by which the last loss that was differentiated had not been multiplied."""
    after: dict[str, Tensor] = field(default_factory=dict)
    """Parameters after the optimizer's step."""
    losses: list[float] = field(default_factory=list)
    """Values of everything that was differentiated."""
    operations: set[tuple[str, float | None]] = field(default_factory=set)
    """Names of autograd's operations between the model's outputs and the loss. Those between the outputs and the result
    of a loss function have the number with which they multiply or divide, if they have one."""
    gathered: str = ""
    """Collective by which the script brought values together between forward and backward, if it did."""
    gathers: list[Gather] = field(default_factory=list)
    """The same in functions of the script's own that have a backward pass."""
    schedule_steps: int = 0
    """Most steps that one learning-rate schedule took for this step."""
    schedule_steps_by_design: int = 1
    """How many of them a schedule takes at once by design."""
    metrics: list[float] = field(default_factory=list)
    """What `ReduceLROnPlateau` was given after this step."""
    epoch_again: int | None = None
    """Epoch whose order a shuffling `DistributedSampler` has begun again since the step before, if it has."""
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
    def clips_in_turn(self) -> bool:
        """Whether each of several clippings was given what the one before it left."""
        pairs = zip(self.clips, self.clips[1:], strict=False)
        return len(self.clips) > 1 and all(clip.is_followed_by(after.gradients) for clip, after in pairs)

    @property
    def complete_gradients(self) -> dict[str, Tensor]:
        """Gradients before clipping, or as the optimizer received them where they were not clipped.

        Of several clippings of the same, the last counts.
        """
        if not self.clips:
            return self.gradients
        clipped = {name for clip in self.clips for name in clip.names}
        held = {name for group in self.groups for name in group.names}
        before: dict[str, Tensor] = {}
        for clip in self.clips[:1] if self.clips_in_turn and not self.clips_parts else self.clips:
            # Of several that clip other parameters, as in a loop over them, each tells those that it names.
            own = set(clip.names) if before and self.clips_parts else clip.gradients.keys()
            before |= {name: clip.gradients[name] for name in own if name in clip.gradients}
        others = {name: x for name, x in self.gradients.items() if name not in clipped}
        return {name: x for name, x in before.items() if name in clipped or name not in held} | others


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
    """Parameters whose gradients on these ranks must be added up."""
    trained: list[str]
    """Parameters that require a gradient."""
    held: list[str]
    """Parameters that an optimizer held at any step: optimizers may take turns."""
    aliases: dict[str, str]
    """Names of parameters that an outermost module shares with an earlier one, and what they are called there."""
    strangers: int
    """Most tensors that an optimizer held in one group and that belong to no model that was called."""
    device: str
    attributes: dict[int, dict[tuple[str, ...], Any]]
    """Plain attributes of every outermost module and those in it, as at its first call."""
    dtypes: dict[str, torch.dtype]
    hooks: list[str]
    """Names of DDP's communication hooks, which may change gradients on their way."""
    sums_narrow: str
    """The dtype below 32 bits in which the script itself has summed tensors over ranks after a forward pass, such as
    `bfloat16`. Empty if it has not."""
    end: str
    """Why recording ended: `enough`, `script ended`, `raised`, `refused`, `left behind`; or `still running`."""
    detail: str = ""
    script_seconds: float = 0.0
    """Seconds from the first recorded step to the last."""
    record_seconds: float = 0.0
    num_steps: int = 0
    num_calls: list[int] = field(default_factory=list)
    """Number of calls of each step."""
    blind_steps: int = 0
    """Number of steps of an optimizer after calls with gradients switched off alone. They are not among `num_steps`."""


class Folder:
    """Recordings of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write_step(self, rank: int, number: int, step: Step, limit: int) -> int:
        """Write a step of a rank, and return its size in bytes.

        Raises `OSError` if it would take more than `limit` bytes.
        """
        return self._write(f"rank{rank}-step{number}.pt", step, limit)

    def write_facts(self, facts: Facts, *, so_far: bool = False) -> None:
        """Write the facts about a rank, or those that are known `so_far`."""
        self._write(f"rank{facts.rank}{'-so-far' if so_far else ''}.pt", facts, 1 << 40)

    def _write(self, name: str, value: object, limit: int) -> int:
        size = sum(t.numel() * t.element_size() for t in tensors_in(value))
        if size > limit:
            raise OSError(f"a step of this rank takes {size:,} bytes, and {limit:,} are left of --max-disk")
        part = self.path / f".{name}.part"
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            pickled = io.BytesIO()
            _Pickler(pickled, file).dump(value)
            end = file.tell()
            file.write(pickled.getbuffer())
            file.write(end.to_bytes(8, "little"))
            size = file.tell()
        part.rename(self.path / name)
        return size

    def has_facts(self, rank: int) -> bool:
        """Return whether recording has ended on this rank."""
        return (self.path / f"rank{rank}.pt").exists()

    def facts(self, rank: int) -> Facts | None:
        """Return the facts about a rank, or those so far if it runs on. None if no step has ended."""
        names = [f"rank{rank}.pt", f"rank{rank}-so-far.pt"]
        return next((self._read(self.path / name) for name in names if (self.path / name).exists()), None)

    def meet(self, rank: int, world: int, seconds: float) -> bool:
        """Wait until every rank is here or has ended. Return whether they are.

        A rank that left earlier would break transfers that others still receive.
        """
        (self.path / f"rank{rank}.here").touch(mode=0o600)
        end = time.monotonic() + seconds
        while not all((self.path / f"rank{r}.here").exists() or self.has_facts(r) for r in range(world)):
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True

    def step(self, rank: int, number: int) -> Step:
        return self._read(self.path / f"rank{rank}-step{number}.pt")  # type: ignore[no-any-return]

    def _read(self, path: Path) -> Any:  # noqa: ANN401
        """Load a recording. It contains the script's data, of any class, and must belong to this user.

        Raises `OSError` if the file belongs to another user.
        """
        status = path.stat()
        if status.st_uid != os.getuid():
            raise OSError(f"{path} belongs to another user")
        content = bytearray(path.read_bytes())
        end = int.from_bytes(content[-8:], "little")
        return _Unpickler(io.BytesIO(content[end:-8]), content).load()


class _Pickler(pickle.Pickler):
    """Pickles values, and writes their tensors to a file as they are.

    `torch.save` takes as long as a step of a small model.
    """

    def __init__(self, pickled: io.BytesIO, file: BinaryIO) -> None:
        super().__init__(pickled, protocol=pickle.HIGHEST_PROTOCOL)
        self.file = file
        self.places: dict[int, tuple[Tensor, int]] = {}
        """Tensors that were written, by id, and where."""

    def persistent_id(self, value: Any) -> tuple[torch.dtype, tuple[int, ...], int] | None:  # noqa: ANN401
        if type(value) is not Tensor or value.device.type != "cpu" or value.layout is not torch.strided:
            return None
        if value.requires_grad or value.is_quantized:
            return None
        if id(value) not in self.places:
            self.file.write(bytes(-self.file.tell() % ALIGNED))
            self.places[id(value)] = value, self.file.tell()
            self.file.write(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return value.dtype, tuple(value.shape), self.places[id(value)][1]


class _Unpickler(pickle.Unpickler):
    """Reads what `_Pickler` has written."""

    def __init__(self, pickled: io.BytesIO, content: bytearray) -> None:
        super().__init__(pickled)
        self.content = content

    def persistent_load(self, place: tuple[torch.dtype, tuple[int, ...], int]) -> Tensor:
        dtype, shape, begin = place
        number = math.prod(shape)
        if not number:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self.content, dtype=dtype, count=number, offset=begin).reshape(shape)
