"""Traces: a run's parameters, gradients and losses by step, gathered on rank 0.

Tensors that engines return are checked by name on arrival, and made plain if they are sharded. Values of all ranks are
gathered without pickle, as JSON and plain arrays with checked sizes: PyTorch's object collectives unpickle what peers
send, and unpickling runs any code that the sender names.

Tensors that do not fit in memory are stored on disk. They are written one by one as they are read from an engine, and
read one by one for judging. While an engine is alive, judging it needs one whole tensor besides what it holds, and that
tensor's copy on the host.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from meshmark import rank_progress
from meshmark.adapter.engine import Engine, Holdings
from meshmark.algorithms.contract import ObservedRun, ServerVersions, Tensors
from meshmark.errors import AdapterError
from meshmark.judge.deviation import Drift, QuantityKind
from meshmark.models.module import parameter_shapes
from meshmark.spec.workload import Workload

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


# --- Gather values of every rank without pickle: JSON and plain arrays, with checked sizes.

MOST_BYTES = 2**36
"""Upper bound for one rank's data, above what any model that is compared with the truth needs."""
_ALIGNMENT = 8
_KINDS = "fiu"
"""Kinds of NumPy dtypes that are plain numbers."""


def all_gather_json(value: object) -> list[Any]:
    """Return every rank's `value`, by rank. A collective call."""
    own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device_of_default_group())
    sizes = _all_sizes(len(own))
    padded = _padded(own, max(sizes))
    everyone = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(everyone, padded)
    return [
        json.loads(text[:size].cpu().numpy().tobytes().decode()) for text, size in zip(everyone, sizes, strict=True)
    ]


def gather_arrays(arrays: list[NDArray[Any]]) -> list[list[NDArray[Any]]] | None:
    """Return every rank's `arrays` on rank 0, by rank, and None elsewhere. A collective call."""
    own = np.zeros(sum(_room(array) for array in arrays), dtype=np.uint8)
    offset = 0
    for array in arrays:
        own[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        offset += _room(array)
    forms = all_gather_json([[array.dtype.str, list(array.shape)] for array in arrays])
    sizes = _all_sizes(len(own))
    padded = _padded(torch.from_numpy(own).to(device_of_default_group()), max(sizes))
    everyone = [torch.empty_like(padded) for _ in sizes] if dist.get_rank() == 0 else None
    dist.gather(padded, everyone)
    if everyone is None:
        return None
    return [
        _unpacked(form, payload[:size].cpu().numpy())
        for form, payload, size in zip(forms, everyone, sizes, strict=True)
    ]


def _unpacked(forms: list[tuple[str, list[int]]], payload: NDArray[np.uint8]) -> list[NDArray[Any]]:
    """Return copies of the arrays in `payload`. Raises `ValueError` unless they fill it."""
    arrays, offset = [], 0
    for name, shape in forms:
        dtype = np.dtype(name)
        if dtype.kind not in _KINDS or any(dim < 0 for dim in shape):
            raise ValueError(f"a rank sent an array of {name!r} and shape {shape}: expected plain numbers")
        num_bytes = math.prod(shape) * dtype.itemsize
        array = payload[offset : offset + num_bytes].view(dtype).reshape(shape).copy()
        arrays.append(array)
        offset += _room(array)
    if offset != len(payload):
        raise ValueError(f"a rank sent {len(payload)} bytes where its arrays take {offset}")
    return arrays


def _room(array: NDArray[Any]) -> int:
    return -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT


def _all_sizes(own: int) -> list[int]:
    """Return every rank's number of bytes. Raises `ValueError` for sizes that no trace can have."""
    sizes = [torch.zeros(1, dtype=torch.int64, device=device_of_default_group()) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([own], dtype=torch.int64, device=device_of_default_group()))
    told = [int(size) for size in sizes]
    if not all(0 <= size <= MOST_BYTES for size in told):
        raise ValueError(f"the ranks want to send {told} bytes: expected 0 to {MOST_BYTES} each")
    return told


def _padded(own: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(own, (0, size - len(own)))


def device_of_default_group() -> torch.device:
    """Return the device on which the default process group takes its tensors."""
    on_gpu = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


# --- Traces: a run's parameters, gradients and losses by step, gathered on rank 0.

_MOST_DRIFTED = 16
"""Number of tensors per rank, the smallest ones: enough to show which parts they are made of."""


@dataclass(kw_only=True)
class Trace:
    """Notes of one rank, or of all ranks together. Lists run over steps."""

    parameters: list[Tensors] = field(default_factory=list)
    """Before the first step, then after every step: one more than steps."""
    gradients: list[Tensors] = field(default_factory=list)
    """Reduced, unclipped."""
    losses: list[float] = field(default_factory=list)
    """Shares, or the global mean."""
    norms: list[float | None] = field(default_factory=list)
    """Global gradient norm before clipping, as the framework reports it."""
    other_norms: list[list[float]] = field(default_factory=list)
    """The same by other ranks, of all ranks together."""
    evaluations: list[float] = field(default_factory=list)
    """Losses like `losses`, but in evaluation, before each step. Empty if not requested."""
    buffers: list[list[Tensors]] = field(default_factory=list)
    """By replica, then like `parameters`. Empty if the workload has none."""
    replica: int = 0
    """Replica whose buffers a rank reports. Each rank of a pipeline has some of them."""
    left_out: list[int] = field(default_factory=list)
    """Attempts at each step that loss scaling skipped on all ranks. Only running statistics remain of them.

    Empty if they were not counted.
    """
    loss_scales: list[float] = field(default_factory=list)
    """Factors on the loss. Empty if not requested."""
    versions: list[ServerVersions | None] = field(default_factory=list)
    """Versions of a parameter server that the engine reported for each step."""
    drifted: dict[int, Tensors] = field(default_factory=dict)
    """By rank: some of the gradients that differ from the lowest rank's, at the first step with drift.

    Only for all ranks together.
    """

    @property
    def reports_norms(self) -> bool:
        """Whether the gradient norm of any step is known. Each step then has a place in the deviations."""
        return any(norm is not None for norm in self.norms)

    def take_worst_norm(self, step: int, exact: float) -> None:
        """Let the norm of a step be the one that is farthest from `exact`, of those that ranks report."""
        first = self.norms[step]
        others = self.other_norms[step] if self.other_norms else []
        if first is not None:

            def distance(norm: float) -> float:
                return abs(norm - exact) if math.isfinite(norm) else math.inf

            self.norms[step] = max([first, *others], key=distance)


def moved(traces: Sequence[Trace]) -> list[float]:
    """Return how far each step moved the parameters: the L2 norm of the change, over all traces together."""
    squares = [0.0] * min((len(trace.gradients) for trace in traces), default=0)
    for trace in traces:
        for step in range(len(squares)):
            before, after = trace.parameters[step], trace.parameters[step + 1]
            for name in after:
                if (old := before.get(name)) is not None:
                    squares[step] += float(np.sum(np.square(np.subtract(after[name], old, dtype=np.float64))))
    return [math.sqrt(square) for square in squares]


def observed_run(traces: Sequence[Trace], failed_step: int = 0) -> ObservedRun:
    """Return what all replicas reported, for algorithms to inspect."""
    return ObservedRun(
        parameters=[trace.parameters for trace in traces],
        gradients=[trace.gradients for trace in traces],
        server_versions=[trace.versions for trace in traces],
        failed_step=failed_step,
    )


def host_copies(tensors: Mapping[str, Tensor]) -> Tensors:
    """Return copies on the host. bf16 and fp16 are widened to float32, exactly."""
    return {name: host_copy(tensor) for name, tensor in tensors.items()}


def host_copy(tensor: Tensor, *, shared: bool = False) -> NDArray[np.floating]:
    """Return a copy on the host. With `shared`, it may share the tensor's memory, if it is not kept."""
    host = tensor.detach().cpu()
    value: NDArray[np.floating] = (host if host.dtype.itemsize >= 4 else host.float()).numpy()
    return value if shared else value.copy()


def gather_trace(own: Trace) -> tuple[Trace | None, list[Drift], int]:
    """Gather all ranks' traces on rank 0. A collective call.

    Returns the union (None elsewhere) with each tensor from the lowest rank that holds it, the drifts between
    replicas, and the number of tensors over all steps that more than one rank reported.
    """
    traces, drifts, num_replicated = gather_replicas(own, [0] * dist.get_world_size())
    return (traces[0] if traces else None), drifts, num_replicated


def gather_replicas(
    own: Trace, replicas: Sequence[int], together: bool = False
) -> tuple[list[Trace], list[Drift], int]:
    """Gather one trace per replica on rank 0 (none elsewhere). A collective call.

    `replicas` is the replica of each rank. Also returns the drifts between ranks of one replica, and the number of
    tensors that more than one rank reported. With `together`, parameters of all ranks are compared.
    """
    rank_progress.begin(rank_progress.Phase.GATHER)
    digests = [tensor_digests(own.parameters), tensor_digests(own.gradients)]
    everyone: list[list[list[dict[str, str]]]] = all_gather_json(digests)
    peers = {r: [rank for rank, its in enumerate(replicas) if its == r] for r in dict.fromkeys(replicas)}
    alike = [list(range(len(replicas)))] if together else list(peers.values())
    lower = [rank for rank in peers[replicas[dist.get_rank()]] if rank < dist.get_rank()]
    mine = Trace(
        parameters=_owned(own.parameters, [everyone[rank][0] for rank in lower]),
        gradients=_owned(own.gradients, [everyone[rank][1] for rank in lower]),
        losses=own.losses,
        norms=own.norms,
        evaluations=own.evaluations,
        buffers=own.buffers,
        replica=own.replica,
        left_out=own.left_out,
        loss_scales=own.loss_scales,
        versions=own.versions,
    )
    drifts = [
        drift
        for i, kind in enumerate((QuantityKind.PARAMETERS, QuantityKind.GRADIENTS))
        for ranks in (alike if kind is QuantityKind.PARAMETERS else peers.values())
        for drift in drifts_between(kind, {rank: everyone[rank][i] for rank in ranks})
    ]
    mine.drifted = _drifted(own, drifts)
    traces = _gather(mine)
    if traces is None:
        return [], [], 0
    unions = [union_of([traces[rank] for rank in ranks]) for _, ranks in sorted(peers.items())]
    num_told = sum(len(tensors) for kinds in everyone for steps in kinds for tensors in steps)
    num_held = sum(len(tensors) for union in unions for tensors in [*union.parameters, *union.gradients])
    return unions, drifts, num_told - num_held


def union_of(traces: Sequence[Trace]) -> Trace:
    """Return the union of traces of one replica's ranks, no two of which hold the same tensor."""
    reported = [[n for n in norms if n is not None] for norms in zip(*(t.norms for t in traces), strict=True)]
    return Trace(
        parameters=[_union(parts) for parts in zip(*(t.parameters for t in traces), strict=True)],
        gradients=[_union(parts) for parts in zip(*(t.gradients for t in traces), strict=True)],
        losses=[sum(shares) for shares in zip(*(t.losses for t in traces), strict=True)],
        norms=[norms[0] if norms else None for norms in reported],
        other_norms=[norms[1:] for norms in reported],
        evaluations=[sum(shares) for shares in zip(*(t.evaluations for t in traces), strict=True)],
        buffers=_whole_buffers(traces),
        left_out=traces[0].left_out,
        loss_scales=traces[0].loss_scales,
        versions=traces[0].versions,
        drifted={rank: held for trace in traces for rank, held in trace.drifted.items()},
    )


def _whole_buffers(traces: Sequence[Trace]) -> list[list[Tensors]]:
    """Return the buffers by replica, from the parts that its ranks report."""
    ranks: dict[int, list[list[Tensors]]] = {}
    for trace in traces:
        for told in trace.buffers:
            ranks.setdefault(trace.replica, []).append(told)
    return [[_union(parts) for parts in zip(*ranks[replica], strict=True)] for replica in sorted(ranks)]


def _gather(own: Trace) -> list[Trace] | None:
    """Return every rank's trace on rank 0, and None elsewhere. A collective call."""
    buffers = [tensors for replica in own.buffers for tensors in replica]
    kinds = (own.parameters, own.gradients, list(own.drifted.values()), buffers)
    names = [[list(tensors) for tensors in kind] for kind in kinds]
    counts = [len(replica) for replica in own.buffers]
    numbers = [own.losses, own.norms, own.evaluations, own.left_out, own.loss_scales, own.versions]
    headers = all_gather_json([names, numbers, list(own.drifted), counts, own.replica])
    everyone = gather_arrays([value for kind in kinds for tensors in kind for value in tensors.values()])
    if everyone is None:
        return None
    traces = []
    for (kinds_names, numbers, ranks, counts, replica), arrays in zip(headers, everyone, strict=True):
        losses, norms, evaluations, left_out, loss_scales, versions = numbers
        values = iter(arrays)
        every: list[list[Tensors]] = [[{name: next(values) for name in step} for step in kind] for kind in kinds_names]
        parameters, gradients, drifted, buffers = every
        steps = iter(buffers)
        traces.append(
            Trace(
                parameters=parameters,
                gradients=gradients,
                losses=losses,
                norms=norms,
                evaluations=evaluations,
                left_out=left_out,
                loss_scales=loss_scales,
                versions=versions,
                drifted=dict(zip(ranks, drifted, strict=True)),
                replica=replica,
                buffers=[[next(steps) for _ in range(count)] for count in counts],
            )
        )
    return traces


def _drifted(own: Trace, drifts: list[Drift]) -> dict[int, Tensors]:
    """Return this rank's part of `Trace.drifted`."""
    rank, gradients = dist.get_rank(), [d for d in drifts if d.quantity.kind is QuantityKind.GRADIENTS]
    first = min((d.step for d in gradients), default=0)
    here = {
        d.quantity.name: own.gradients[first][d.quantity.name] for d in gradients if d.step == first and rank in d.ranks
    }
    smallest = sorted(here, key=lambda name: here[name].size)[:_MOST_DRIFTED]
    return {rank: {name: here[name] for name in smallest}} if here else {}


def tensor_digests(steps: list[Tensors]) -> list[dict[str, str]]:
    """Return a hash of every tensor's bits, by step and name."""
    return [{name: digest(value) for name, value in s.items()} for s in steps]


_HASHED_AT_ONCE = 2**23
"""Bytes per part. Larger tensors are hashed in parts, on all cores that a rank may use, and then their hashes."""


def digest(value: NDArray[np.floating]) -> str:
    """Return a hash of all bits of `value`. It does not depend on the number of cores."""
    content = np.ascontiguousarray(value).data.cast("B") if value.size else memoryview(b"")
    if len(content) <= _HASHED_AT_ONCE:
        return _hash(content).hexdigest()
    parts = [content[first : first + _HASHED_AT_ONCE] for first in range(0, len(content), _HASHED_AT_ONCE)]
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    with ThreadPoolExecutor(max(len(os.sched_getaffinity(0)) // num_ranks, 1)) as threads:
        return _hash(b"".join(part.digest() for part in threads.map(_hash, parts))).hexdigest()


def _hash(content: bytes | memoryview) -> hashlib.blake2b:
    return hashlib.blake2b(content, digest_size=8)


def _owned(steps: list[Tensors], lower: list[list[dict[str, str]]]) -> list[Tensors]:
    """Return the tensors that no lower rank of the same replica also holds."""
    return [
        {name: value for name, value in tensors.items() if not any(name in held[step] for held in lower)}
        for step, tensors in enumerate(steps)
    ]


def _union(parts: tuple[Tensors, ...]) -> Tensors:
    return {name: value for part in parts for name, value in part.items()}


def drifts_between(kind: QuantityKind, everyone: Mapping[int, list[dict[str, str]]]) -> list[Drift]:
    """Return the drifts between ranks that should hold the same."""
    found = []
    for step in range(len(next(iter(everyone.values())))):
        names = {name for held in everyone.values() for name in held[step]}
        for name in sorted(names):
            digests = {rank: held[step][name] for rank, held in everyone.items() if name in held[step]}
            most = Counter(digests[rank] for rank in sorted(digests)).most_common(1)[0][0]
            if ranks := sorted(rank for rank, digest in digests.items() if digest != most):
                others = sorted(digests.keys() - set(ranks))
                unchanged = step > 0 and all(everyone[rank][step - 1].get(name) == digests[rank] for rank in ranks)
                found.append(Drift(quantity=kind.of(name), step=step, ranks=ranks, others=others, unchanged=unchanged))
    return found


# --- Tensors that engines return: checked by name on arrival, and made plain if they are sharded.

_CATEGORIES = ("parameters", "gradients", "optimizer_states", "communication")


@torch.no_grad()
def host_parameters(engine: Engine, workload: Workload) -> Tensors:
    """Return a copy of `engine.parameters()`, a collective call.

    Raises `AdapterError` for anything that is neither a full tensor under its canonical name nor sharded.
    """
    return {name: host_copy(tensor) for name, tensor in full_parameters(engine, workload)[1]}


@torch.no_grad()
def host_gradients(engine: Engine, workload: Workload) -> Tensors:
    """Return a copy of `engine.gradients()`; see `host_parameters`."""
    return {name: host_copy(tensor) for name, tensor in full_gradients(engine, workload)[1]}


NamedTensors = tuple[list[str], Iterator[tuple[str, Tensor]]]
"""Names, and an iterator over names and tensors in order. Each tensor is gathered on demand: a collective call."""


def full_parameters(engine: Engine, workload: Workload) -> NamedTensors:
    """Return the tensors of `engine.parameters()` one after the other. For `AdapterError` see `host_parameters`."""
    return _full("parameters()", engine.parameters(), workload)


def full_gradients(engine: Engine, workload: Workload) -> NamedTensors:
    """Return the tensors of `engine.gradients()` one after the other."""
    return _full("gradients()", engine.gradients(), workload)


@torch.no_grad()
def local_holdings(engine: Engine) -> Holdings:
    """Return `engine.holdings()` with the local part of each sharded tensor.

    Raises `AdapterError` for anything without its own storage.
    """
    held: object = engine.holdings()
    if not isinstance(held, Holdings):
        raise AdapterError(f"holdings() returned {_kind(held)}; expected a Holdings")
    return Holdings(
        **{
            name: [_local(f"holdings(): {name}[{i}]", t) for i, t in enumerate(getattr(held, name))]
            for name in _CATEGORIES
        }
    )


def _full(method: str, told: object, workload: Workload) -> NamedTensors:
    if not isinstance(told, Mapping):
        raise AdapterError(f"{method} returned {_kind(told)}; expected a mapping of canonical names to tensors")
    shapes = parameter_shapes(workload.model)
    for name in told:
        if name not in shapes:
            raise AdapterError(f"{method} returned {name!r}; the canonical names are {', '.join(shapes)}")
    return list(told), _whole(method, told, shapes)


def _whole(
    method: str, told: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Tensor]]:
    for name in told:
        value = told[name]
        # All ranks gather a DTensor here, so all must return their tensors in the same order.
        tensor = value.full_tensor() if _is_sharded(value) else value
        tensor = _check(f"{method}: {name}", tensor, f"a plain float tensor of shape {tuple(shapes[name])}")
        if tensor.shape != shapes[name]:
            raise AdapterError(f"{method}: {name} has shape {tuple(tensor.shape)}; its full shape is {shapes[name]}")
        yield name, tensor
        del value, tensor  # free this tensor before the next one is gathered


def _local(where: str, value: object) -> Tensor:
    tensor = value.to_local() if _is_sharded(value) else value
    return _check(where, tensor, "a plain tensor, whose storage is counted")


def _is_sharded(value: object) -> TypeGuard[DTensor]:
    from torch.distributed.tensor import DTensor  # a second, which only ranks should take

    return isinstance(value, DTensor)


def _check(where: str, value: object, expected: str) -> Tensor:
    """Return `value` if it is a tensor whose operators and storage PyTorch can access."""
    if not isinstance(value, Tensor) or type(value.detach()) is not Tensor:
        problem = f"is {_kind(value)}"
    elif value.is_meta:
        problem = "is on the meta device, without values"
    elif value.layout is not torch.strided:
        problem = f"is of layout {value.layout}"
    elif "float" not in expected or value.is_floating_point():
        return value
    else:
        problem = f"is of {value.dtype}"
    raise AdapterError(f"{where} {problem}; expected {expected}")


def _kind(value: object) -> str:
    cls = type(value)
    return cls.__name__ if cls.__module__ in ("builtins", "torch") else f"{cls.__module__}.{cls.__name__}"


# --- Store a run's tensors on disk if they do not fit in memory.


class StoredTensors(Mapping[str, NDArray[np.floating]]):
    """Tensors by name. Each is read from its file on access, and not cached."""

    def __init__(self, folder: Path) -> None:
        """`folder` is for these tensors only. It is created, or emptied if it exists."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.folder = folder
        self._names: dict[str, None] = {}

    def __getitem__(self, name: str) -> NDArray[np.floating]:
        if name not in self._names:
            raise KeyError(name)
        value: NDArray[np.floating] = np.load(self._path(name), allow_pickle=False)
        return value

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def write(self, name: str, value: NDArray[np.floating]) -> None:
        np.save(self._path(name), np.ascontiguousarray(value), allow_pickle=False)
        self._names[name] = None

    def remove(self, name: str) -> None:
        del self._names[name]
        self._path(name).unlink()

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.npy"


def stored_copies(tensors: Mapping[str, Tensor], folder: Path) -> StoredTensors:
    """Write all `tensors` to a new folder."""
    found = StoredTensors(folder)
    for name, tensor in tensors.items():
        found.write(name, host_copy(tensor, shared=True))
    return found


class DiskNotebook:
    """Notes of all ranks together, which hold one state, on disk.

    They are whole on rank 0, with each tensor from the lowest rank that reports it. All methods are collective calls.
    """

    def __init__(self, folder: Path, around: AbstractContextManager[None] | None = None) -> None:
        """`folder` is this rank's own. The context `around` is entered whenever an engine's tensors are gathered."""
        self.folder, self.around = folder, around or nullcontext()
        self.digests: dict[QuantityKind, list[dict[str, str]]] = {}
        """Digests of what this rank reported, by step and name."""

    def parameters(self, engine: Engine, workload: Workload, step: int) -> StoredTensors:
        with self.around:
            return self._take(QuantityKind.PARAMETERS, step, full_parameters(engine, workload))

    def gradients(self, engine: Engine, workload: Workload, step: int) -> StoredTensors:
        with self.around:
            return self._take(QuantityKind.GRADIENTS, step, full_gradients(engine, workload))

    @torch.no_grad()
    def _take(self, kind: QuantityKind, step: int, named: NamedTensors) -> StoredTensors:
        names, told = named
        everyone: list[list[str]] = all_gather_json(names)
        owners = {name: rank for rank, its in reversed(list(enumerate(everyone))) for name in its}
        found, digests, rank = StoredTensors(self.folder / f"{kind}-{step}"), dict[str, str](), dist.get_rank()
        for name, tensor in told:
            value = host_copy(tensor, shared=True)
            digests[name] = digest(value)
            if owners[name] == rank:
                found.write(name, value)
            del tensor, value  # the next takes their room
        noted = self.digests.setdefault(kind, [])
        noted[step:] = [digests]  # a step that loss scaling left out is told again
        _send_to_first(found)
        return found

    def gather(self, own: Trace) -> tuple[list[Trace], list[Drift], int]:
        """Like `gather_replicas` for one replica. `own.parameters` and `own.gradients` are results of this class."""
        rank_progress.begin(rank_progress.Phase.GATHER)
        kinds = (QuantityKind.PARAMETERS, QuantityKind.GRADIENTS)
        numbers = [own.losses, own.norms, own.evaluations, own.left_out, own.loss_scales]
        everyone = all_gather_json([numbers, [self.digests.get(kind, []) for kind in kinds]])
        if dist.get_rank():
            return [], [], 0
        drifts = [
            drift
            for i, kind in enumerate(kinds)
            for drift in drifts_between(kind, {rank: digests[i] for rank, (_, digests) in enumerate(everyone)})
        ]
        fields = ("losses", "norms", "evaluations", "left_out", "loss_scales")
        union = union_of([Trace(**dict(zip(fields, numbers, strict=True))) for numbers, _ in everyone])
        union.parameters, union.gradients = own.parameters, own.gradients
        num_told = sum(len(tensors) for _, digests in everyone for steps in digests for tensors in steps)
        num_held = sum(len(tensors) for tensors in [*own.parameters, *own.gradients])
        return [union], drifts, num_told - num_held


def _send_to_first(own: StoredTensors) -> None:
    """Send what other ranks have written to rank 0, tensor by tensor."""
    rank, device = dist.get_rank(), device_of_default_group()
    forms = {} if rank == 0 else {name: [str(own[name].dtype), list(own[name].shape)] for name in own}
    for sender, told in enumerate(all_gather_json(forms)):
        for name, (dtype, shape) in told.items():
            if rank == sender:
                dist.send(torch.from_numpy(own[name]).to(device), 0)
                own.remove(name)
            elif rank == 0:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
                dist.recv(tensor, sender)
                own.write(name, tensor.cpu().numpy())


def low_precisions(tensors: Iterator[NDArray[np.floating]]) -> list[str]:
    """Return the dtypes narrower than float32 that represent every value of all tensors.

    Tensors are read one by one, because they may be large.
    """
    kinds = list(_SIGNIFICANT_BITS)
    for tensor in tensors:
        kinds = [kind for kind in kinds if num_wider(tensor, kind) == 0]
        if not kinds:
            break
    return kinds


_SIGNIFICANT_BITS = {"bf16": 8, "fp16": 11}
"""Bits of the significand, with the one that is not stored."""


def num_wider(tensor: NDArray[np.floating], kind: str) -> int:
    """Return the number of elements that need more significant bits than `kind` ("bf16" or "fp16") has."""
    significands = np.frexp(np.asarray(tensor, dtype=np.float64))[0]
    return int(np.count_nonzero(np.mod(significands * 2.0 ** _SIGNIFICANT_BITS[kind], 1)))
