"""Read a backend's flight recorder: fold the entries of a dump into one operation per call.

NCCL's recorder writes an entry for every part of a coalesced group, and one without sizes for the group itself. An
all-gather of unequal parts, for example, is one `_broadcast_oop` per rank and an `ALLGATHER_coalesced`.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_PARTS = {"_broadcast_oop": "all_gather", "_reduce_oop": "reduce_scatter"}
"""Titles of the parts of a call with unequal parts in NCCL, and the kind of the whole call."""
_ENDINGS = ("_coalesced", "_into_tensor", "_tensor", "_v_single", "_single", "_v", "_base", "_oop")
"""Suffixes of titles for the form of a call. They are removed in this order, repeatedly."""
_KINDS = {
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "all_reduce_barrier": "barrier",
    "sparse_all_reduce": "all_reduce",
    "alltoall": "all_to_all",
}
"""Kinds for shortened titles that are not a kind by themselves."""
_ITEM_BYTES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2}
"""Bytes per element by scalar type. All others (Char, Byte, Bool, the Float8s) have one byte."""
_COMPLEX = {"ComplexHalf": 4, "ComplexFloat": 8, "ComplexDouble": 16}


_MOST_TOLD = 20


@dataclass(frozen=True, kw_only=True)
class IssuedOperation:
    """An operation that the backend performed."""

    kind: str
    """Kind as in `wire_factor` if known there, otherwise the backend's name."""
    time_ns: int
    ranks: tuple[int, ...]
    """Ranks of its group. Empty if the group no longer exists."""
    num_bytes: int
    """Bytes of the larger of input and output, over all parts."""
    seconds: float | None = None
    """Duration, if the backend measured it (NCCL, with TORCH_NCCL_ENABLE_TIMING)."""


def dump() -> dict[str, Any]:
    """Return the dump of the default group's backend.

    TORCH_FR_BUFFER_SIZE must have been set before the first group was created.
    """
    c10d = torch._C._distributed_c10d
    dumped = c10d._dump_nccl_trace if torch.distributed.get_backend() == "nccl" else c10d._dump_fr_trace  # type: ignore[attr-defined]
    recorded: dict[str, Any] = pickle.loads(dumped())
    return recorded


def under_way(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describe the last call that had ended when the dump was made, and those that had not, oldest first.

    PyTorch leaves the parts of a batch `scheduled` for good. They have ended when the entry that closes the batch has.
    """
    closed = {_batch(e) for e in entries if _marks_a_group(e["profiling_name"], e) and e.get("state") == "completed"}
    done, open_ones = list[Mapping[str, Any]](), list[Mapping[str, Any]]()
    for entry in entries:
        (done if entry.get("state") == "completed" or _batch(entry) in closed else open_ones).append(entry)
    return [_describe(entry) for entry in [*done[-1:], *open_ones[:_MOST_TOLD]]]


def _batch(entry: Mapping[str, Any]) -> tuple[object, ...]:
    """Return what the parts of a batch and the entry that closes it have in common."""
    return *_call(entry), entry.get("p2p_seq_id")


def _describe(entry: Mapping[str, Any]) -> str:
    number = entry.get("p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id")
    tensors = ", ".join(
        f"{dtype} {list(sizes)}" for sizes, dtype in zip(entry["input_sizes"], entry["input_dtypes"], strict=True)
    )
    group = " ".join(str(part) for part in entry["process_group"] if part)
    return f"{entry['profiling_name']}, number {number} of group {group}, of {tensors or 'nothing'}: {entry['state']}"


def kind_of(title: str) -> str:
    """Return the kind of a title: `nccl:_all_gather_base` is an `all_gather`."""
    name = title.rpartition(":")[2].strip("_").lower()
    while ending := next((e for e in _ENDINGS if name.endswith(e)), None):
        name = name.removesuffix(ending)
    return _KINDS.get(name, name)


def issued_operations(
    entries: Sequence[Mapping[str, Any]], groups: Mapping[str, tuple[int, ...]]
) -> Iterator[IssuedOperation]:
    """Yield the collectives (not point-to-point) of a dump, in order. `groups` maps a group's name to its ranks."""
    parts = list[Mapping[str, Any]]()
    for entry in entries:
        title = entry["profiling_name"].rpartition(":")[2]
        if entry.get("is_p2p"):
            continue
        if title in _PARTS:
            parts.append(entry)
            continue
        if _marks_a_group(title, entry):
            own = [part for part in parts if _call(part) == _call(entry)]
            parts = [part for part in parts if _call(part) != _call(entry)]
            if own:
                yield _operation(own, _PARTS[own[0]["profiling_name"].rpartition(":")[2]], groups, entry)
            continue
        yield _operation([entry], kind_of(title), groups)
    for part in parts:  # whose group never ended
        yield _operation([part], kind_of(part["profiling_name"]), groups)


def _marks_a_group(title: str, entry: Mapping[str, Any]) -> bool:
    """Return whether an entry stands for the calls before it: it has no tensors itself."""
    return title.endswith("coalesced") and not entry["input_sizes"] and not entry["output_sizes"]


def _call(entry: Mapping[str, Any]) -> tuple[object, ...]:
    """Return the group and number of the call that an entry belongs to."""
    return entry["process_group"][0], entry.get("collective_seq_id")


def _operation(
    entries: Sequence[Mapping[str, Any]],
    kind: str,
    groups: Mapping[str, tuple[int, ...]],
    closing: Mapping[str, Any] | None = None,
) -> IssuedOperation:
    """Combine entries into one operation. `closing` is the entry that stands for all of them and was timed."""
    timed = (closing or entries[-1]).get("duration_ms")
    return IssuedOperation(
        kind=kind,
        time_ns=entries[0]["time_created_ns"],
        ranks=groups.get(entries[0]["process_group"][0], ()),
        num_bytes=sum(max(_num_bytes(entry, "input"), _num_bytes(entry, "output")) for entry in entries),
        seconds=None if timed is None else timed / 1000,
    )


def _num_bytes(entry: Mapping[str, Any], side: str) -> int:
    total = 0
    for sizes, dtype in zip(entry[f"{side}_sizes"], entry[f"{side}_dtypes"], strict=True):
        count = {**_ITEM_BYTES, **_COMPLEX}.get(dtype, 1)
        for size in sizes:
            count *= size
        total += count
    return total
