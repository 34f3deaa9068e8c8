"""Base of all models that are trained here: a list of layers, canonical names, values drawn by name.

Shape suffixes: B rows, T positions, C hidden.

`build_model` and its kin make a model from its spec, whole or in part, and name what it holds.

Initial values of parameters are drawn per name from a counter-based generator: element i of a parameter depends on
(seed, name, i) alone, so any shard can be filled without the whole, and every framework, layout and device starts from
the same bits. The generator is SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) on the element's index; a value is the
centred sum of the four 16-bit fields of its 64 bits, a bell-shaped (Irwin-Hall) variable. All of it is integer
arithmetic up to one exact conversion and one multiplication, hence the same on CPU and GPU.
"""

from __future__ import annotations

import functools
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from meshmark.import_target import class_at
from meshmark.models.config import ModelConfig

if TYPE_CHECKING:
    from meshmark.reference.data import Batch
    from meshmark.reference.tensor_plan import Style


# --- Initial values of parameters, drawn per name from a counter-based generator.

_AT_ONCE = 2**16
"""Elements that are drawn at once, few enough that the generator's wide integers stay in the cache."""
_LEAST_A_THREAD = 2**20
"""Smallest number of elements for each thread."""
_AT_ONCE_ELSEWHERE = 2**22
"""`_AT_ONCE` for devices other than a CPU, where every operator is a launch and an event for profilers."""
_KEY, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""SplitMix64's constants: golden ratio, first and second multiplier."""
# The sum of four uniform integers in [0, 65535]: its mean, and its standard deviation sqrt(4 (65536^2 - 1) / 12).
_MEAN = 2 * 65535
_STD = math.sqrt((65536**2 - 1) / 3)


def _signed(value: int) -> int:
    """The 64-bit pattern `value` as the signed integer that torch's int64 holds."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical (not arithmetic) right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _splitmix64(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 on int64 counters (any shape), with wrap-around multiplication."""
    x = (x ^ _shift_right(x, 30)) * _signed(_FIRST)
    x = (x ^ _shift_right(x, 27)) * _signed(_SECOND)
    return x ^ _shift_right(x, 31)


def _index(full_shape: Sequence[int], shape: Sequence[int], offset: Sequence[int], device: torch.device) -> Tensor:
    """Row-major indices into a tensor of `full_shape` of the block of `shape` at `offset`. int64, shape `shape`."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    stride = 1
    for full, size, start in reversed(list(zip(full_shape, shape, offset, strict=True))):
        position = (torch.arange(size, device=device) + start) * stride
        index = position.view(-1, *([1] * index.dim())) + index
        stride *= full
    return index.reshape(tuple(shape))


@dataclass(frozen=True, kw_only=True)
class Block:
    """A part of a tensor: a rank's shard, say."""

    shape: Sequence[int]
    offset: Sequence[int]
    """Offset of its first element, by dim."""


def random_bits(
    name: str,
    full_shape: Sequence[int],
    *,
    seed: int,
    block: Block | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Return 64 random bits for every element of a block of a tensor of `full_shape`, as int64 of the block's shape.

    The bits depend on (seed, name, element) alone. `block` defaults to the whole tensor.
    """
    part = block or Block(shape=full_shape, offset=[0] * len(full_shape))
    return _splitmix64(_counters(name, full_shape, part, seed, device or torch.device("cpu")))


def _counters(name: str, full_shape: Sequence[int], block: Block, seed: int, device: torch.device) -> Tensor:
    """Return the counters from which the generator makes the bits of each element. int64, the block's shape."""
    key = int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")
    return _index(full_shape, block.shape, block.offset, device) * _signed(_KEY) + _signed(key)


def row_blocks(block: Block, device: torch.device | None = None) -> list[Block]:
    """Split a block by rows into blocks of no more elements than are drawn at once.

    A row that has more elements is a block by itself.
    """
    if not block.shape:
        return [block]
    on_host = device is None or device.type == "cpu"
    rows = _rows_at_once(block.shape, _AT_ONCE if on_host else _AT_ONCE_ELSEWHERE)
    return [
        Block(
            shape=[min(rows, block.shape[0] - i), *block.shape[1:]],
            offset=[block.offset[0] + i, *block.offset[1:]],
        )
        for i in range(0, max(block.shape[0], 1), rows)
    ]


def _rows_at_once(shape: Sequence[int], elements: int) -> int:
    return max(elements // max(math.prod(shape[1:]), 1), 1)


def _fill_on_host(out: NDArray[np.float32], counters: NDArray[np.uint64], advance: int, std: float) -> None:
    """Fill `out` in place with bell-shaped values, in as many threads as PyTorch may use.

    The values do not depend on the number of threads, because each follows from its counter alone. Threads run in
    parallel, because NumPy releases the interpreter lock while it computes.
    """
    at_once = max(len(counters), 1)
    num_threads = min(torch.get_num_threads(), out.size // _LEAST_A_THREAD) or 1
    share = -(-len(out) // (at_once * num_threads)) * at_once
    starts = range(0, len(out), max(share, 1))

    def fill(first: int) -> None:
        _fill_rows(out[first : first + share], counters, first * advance, advance, std)

    if len(starts) < 2:
        fill(0)
        return
    with ThreadPoolExecutor(len(starts)) as threads:
        list(threads.map(fill, starts))


def _fill_rows(out: NDArray[np.float32], counters: NDArray[np.uint64], ahead: int, advance: int, std: float) -> None:
    """Fill `out`, several rows at once. The counters of its first rows are `counters` plus `ahead`.

    `counters` has as many rows as are drawn at once. Each row's counters are `advance` larger than those of the row
    before. NumPy is used because profilers of PyTorch record every operator and allocation, which came to gigabytes for
    a large model.
    """
    bits, shifted, total = np.empty_like(counters), np.empty_like(counters), np.empty(counters.shape, np.int32)
    for first in range(0, len(out), max(len(counters), 1)):
        rows = out[first : first + len(counters)]
        x, s, t = (each[: len(rows)] for each in (bits, shifted, total))
        np.add(counters[: len(rows)], np.uint64((ahead + first * advance) % 2**64), out=x)
        for shift, factor in ((30, _FIRST), (27, _SECOND)):
            x ^= np.right_shift(x, np.uint64(shift), out=s)
            x *= np.uint64(factor)
        x ^= np.right_shift(x, np.uint64(31), out=s)
        fields = x.view(np.uint16).reshape(*x.shape, 4)
        np.add(fields[..., 0], fields[..., 1], out=t, dtype=np.int32)
        t += fields[..., 2]
        t += fields[..., 3]
        t -= _MEAN
        rows[...] = t
        rows *= np.float32(1.0 / _STD)
        rows *= np.float32(std)


def _fill(out: Tensor, counters: Tensor, advance: int, std: float) -> None:
    """Fill `out` in place, as `_fill_on_host` does, with PyTorch's operators on any device."""
    bits, shifted, total = (torch.empty_like(counters) for _ in range(3))
    for first in range(0, len(out), max(len(counters), 1)):
        rows = out[first : first + len(counters)]
        x, s, t = (each[: len(rows)] for each in (bits, shifted, total))
        torch.add(counters[: len(rows)], _signed(first * advance), out=x)
        for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
            torch.bitwise_right_shift(x, shift, out=s)
            x.bitwise_xor_(s.bitwise_and_((1 << (64 - shift)) - 1)).mul_(_signed(factor))
        torch.bitwise_and(x, 0xFFFF, out=t)
        for shift in (16, 32, 48):
            torch.bitwise_right_shift(x, shift, out=s)
            t.add_(s.bitwise_and_(0xFFFF))
        rows.copy_(t.sub_(_MEAN)).mul_(1.0 / _STD).mul_(std)


def initial_value(
    model: ModelConfig,
    name: str,
    full_shape: Sequence[int],
    *,
    seed: int,
    block: Block | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Return the initial value of the parameter with canonical `name`, or of one block of it: float32, of that shape.

    The model's family says how values are made.
    """
    values: Callable[..., Tensor] = class_at(model.initial_values)
    return values(model, name, full_shape, seed=seed, block=block, device=device)


def drawn_value(
    model: ModelConfig,
    name: str,
    full_shape: Sequence[int],
    *,
    seed: int,
    block: Block | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """The initial value of the parameter with canonical `name` (or of one block of it), float32, the block's shape.

    Norm weights are one and biases zero; every other weight is bell-shaped with standard deviation `init_std`,
    residual projections with init_std / sqrt(2 num_layers) (Radford et al. 2019, section 2.3).
    """
    size = tuple(block.shape if block else full_shape)
    if name.endswith("bias"):
        return torch.zeros(size, device=device)
    if "norm." in name:
        return torch.ones(size, device=device)
    std = model.init_std
    if name.endswith(("attention.out.weight", ".down.weight")):
        std /= math.sqrt(2 * model.num_layers)
    full, shape = tuple(full_shape) or (1,), size or (1,)  # a scalar is a row of one
    offset = (block.offset if block else ()) or [0] * len(shape)
    out = torch.empty(shape, dtype=torch.float32, device=device or torch.device("cpu"))
    on_host = type(out) is Tensor and out.device.type == "cpu"
    rows = min(_rows_at_once(shape, _AT_ONCE if on_host else _AT_ONCE_ELSEWHERE), shape[0])
    first = Block(shape=(rows, *shape[1:]), offset=offset)
    counters, advance = _counters(name, full, first, seed, out.device), math.prod(full[1:]) * _KEY
    if on_host:
        _fill_on_host(out.numpy(), counters.numpy().view(np.uint64), advance, std)
    else:
        _fill(out, counters, advance, std)
    return out.view(size)


# --- Base of all models that are trained here: a list of layers, canonical names, values drawn by name.

Recomputer = Callable[[nn.Module, Tensor], Tensor]
"""`torch.utils.checkpoint.checkpoint`, or a framework's own."""


class Model(nn.Module, ABC):
    """All of a model, or some of its layers: 0 is the embedding, 1 to num_layers the blocks, num_layers + 1 the head.

    Names of parameters and buffers are canonical: the same for a part as for the whole.
    Values are not initialised (build under `torch.device("meta")` to allocate none); see `initialize`.
    """

    block: ClassVar[type[nn.Module]]
    """Class of every block."""

    def __init__(self, spec: ModelConfig, layers: Sequence[int] | None = None) -> None:
        super().__init__()
        layers = range(spec.num_layers + 2) if layers is None else layers
        self.spec = spec
        self.skipped_block: int | None = None
        """Index of the block that the forward pass leaves out, if any. It is set before every step."""
        self.recompute: Recomputer | None = None
        """Runs a block such that its activations are computed again in the backward pass. None keeps them."""
        self.embedding: nn.Module | None = self.make_embedding() if 0 in layers else None
        self.blocks = nn.ModuleDict({str(i - 1): self.make_block(i - 1) for i in layers if 1 <= i <= spec.num_layers})
        self.head: nn.Module | None = self.make_head() if spec.num_layers + 1 in layers else None

    @abstractmethod
    def make_embedding(self) -> nn.Module:
        """First layer: inputs [B, ...] to the residual stream [B, T, C]."""

    @abstractmethod
    def make_block(self, index: int) -> nn.Module:
        """Return a block, which maps [B, T, C] to [B, T, C], or images to images in convolutional nets."""

    @abstractmethod
    def make_head(self) -> nn.Module:
        """Last layer: the residual stream to logits, one row of them for every target."""

    @classmethod
    def join(cls, chunks: Sequence[Model]) -> Model:
        """Return a model that holds the layers of all `chunks`, for names, the optimizer and checkpoints."""
        if len(chunks) == 1:
            return chunks[0]
        joined = cls(chunks[0].spec, layers=())
        joined.embedding, joined.head = chunks[0].embedding, chunks[-1].head
        for chunk in chunks:
            joined.blocks.update(dict(chunk.blocks.items()))
        return joined

    @classmethod
    def skeleton(cls, spec: ModelConfig) -> Model:
        """Return a model without values. Its parameters must be replaced before it computes."""
        with torch.device("meta"):
            return cls(spec)

    @classmethod
    def block_classes_of(cls, spec: ModelConfig) -> set[type[nn.Module]]:
        """Return the classes of the blocks, for frameworks that wrap each module of a class."""
        return {cls.block}

    @classmethod
    def initial_buffers(cls, spec: ModelConfig, seed: int) -> dict[str, Tensor]:
        """Return the values that buffers start with, by canonical name."""
        shapes = {name: tuple(b.shape) for name, b in cls.skeleton(spec).named_buffers()}
        return {
            name: torch.full(shape, initial_buffer(name), dtype=torch.float64 if shape else torch.int64)
            for name, shape in shapes.items()
        }

    def hold(self, batch: Batch) -> None:
        """Keep what pipeline stages look up in `batch`. Called before each step; does nothing by default."""

    def stage_inputs(self, batch: Batch) -> Tensor:
        """Return the first pipeline stage's input. Its first dimension is split into micro-batches."""
        return cast(Tensor, batch.inputs)

    def stage_loss(self, outputs: Tensor, numbers: Tensor) -> Tensor:
        """Return the sum of the loss of the rows with these numbers, where the model has a loss of its own."""
        raise NotImplementedError

    def tensor_parallel_plan(self) -> Mapping[str, Style]:
        """Return how each module is split, where `ModelConfig.brings_plan`."""
        raise NotImplementedError

    def split_dims(self) -> Mapping[str, int]:
        """Return the dimension along which each parameter that the plan splits is split, by canonical name."""
        raise NotImplementedError

    def block_of(self, name: str) -> str:
        """Return the key of the block that holds the parameter `name`; empty where none does."""
        return name.split(".")[1] if name.startswith("blocks.") else ""

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for index, block in self.blocks.items():
            if int(index) != self.skipped_block:
                x = self.recompute(block, x) if self.recompute and self.training else block(x)
        return x if self.head is None else cast(Tensor, self.head(x))

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Fill every (materialised, unsharded) parameter, and every buffer, with its initial value."""
        for name, parameter in self.named_parameters():
            parameter.copy_(
                initial_value(
                    self.spec, drawn_name(self.spec, name), parameter.shape, seed=seed, device=parameter.device
                )
            )
        self.initialize_buffers()

    @torch.no_grad()
    def initialize_buffers(self) -> None:
        for name, buffer in self.named_buffers():
            buffer.fill_(initial_buffer(name))


T = TypeVar("T")


class _Holder(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], object]) -> object:
        return compute()


def with_values(model: nn.Module, values: Mapping[str, Tensor], compute: Callable[[], T]) -> T:
    """Return what `compute` returns while `model` has `values` in the place of its parameters and buffers.

    Unlike in one call of the model by `torch.func.functional_call`, a backward pass in `compute` has them too, in which
    a model that calls `torch.utils.checkpoint` runs again in part.
    """
    held = {f"model.{name}": value for name, value in values.items()}
    found: T = torch.func.functional_call(_Holder(model), held, (compute,))
    return found


def drawn_name(spec: ModelConfig, name: str) -> str:
    """The name under which a parameter's values are drawn: a tied head's copy takes the embedding's."""
    tied = spec.tied_embeddings and name == "head.output.weight"
    return "embedding.tokens.weight" if tied else name


def initial_buffer(name: str) -> float:
    """Return the initial value of all elements of the buffer with this canonical name.

    A batch norm's running variance starts at one, its mean and its count of batches at zero.
    """
    return 1.0 if name.endswith("running_var") else 0.0


# --- From a spec to its model.


def module_class(spec: ModelConfig) -> type[Model]:
    """Return the module class that the model's family names."""
    found: type[Model] = class_at(spec.module)
    return found


def build_model(spec: ModelConfig, layers: Sequence[int] | None = None) -> Model:
    """Return the module of `spec`, or of some of its layers; see `Model`."""
    return module_class(spec)(spec, layers)


def block_classes(spec: ModelConfig) -> set[type[nn.Module]]:
    """Return the classes of the model's blocks, for frameworks that wrap each module of a class."""
    return module_class(spec).block_classes_of(spec)


@functools.lru_cache(maxsize=4)
def skeleton(spec: ModelConfig) -> Model:
    """Return the model of `spec` without values.

    It is cached, because building it takes as long as a step of a tiny model. It is shared, so callers that depend on
    the training mode of its modules must set it.
    """
    return module_class(spec).skeleton(spec)


def parameter_shapes(spec: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name and full shape of every parameter, without allocating any."""
    return {name: tuple(p.shape) for name, p in skeleton(spec).named_parameters()}


def sizes_by_block(spec: ModelConfig) -> dict[str, list[int]]:
    """Return the numbers of elements of parameters by block. Parameters outside all blocks have the key ""."""
    found: dict[str, list[int]] = {"": []}
    for name, shape in parameter_shapes(spec).items():
        block = block_of(spec, name)
        found.setdefault(block, []).append(math.prod(shape))
    return found


def block_of(spec: ModelConfig, name: str) -> str:
    """Return the key of the block that holds the parameter `name`; empty where none does."""
    return skeleton(spec).block_of(name)


def buffer_shapes(spec: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the canonical name and full shape of every buffer. Each replica has different values of buffers."""
    return {name: tuple(b.shape) for name, b in skeleton(spec).named_buffers()}
