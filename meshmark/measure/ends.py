"""Record point-to-point calls of this process.

The profiler does not see their group, and gloo's flight recorder does not see them at all.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

_KINDS = {"send": "send", "recv": "recv", "recv_anysource": "recv"}
"""Methods of a process group that `torch.distributed` sends and receives through, with the kinds of their calls."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """One point-to-point call."""

    kind: str
    ranks: tuple[int, ...]
    """Both ends, or the whole group if a receive accepts any rank."""
    num_bytes: int
    time_ns: int


class Ends:
    """Records every point-to-point call of this process between `start` and `stop`, in order."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._kept: dict[str, object] = {}
        """Original class attributes. `getattr` would return them in a form that no longer binds to a group."""

    def start(self) -> None:
        if self._kept or not dist.is_available() or not dist.is_initialized():
            return
        for name, kind in _KINDS.items():
            self._kept[name] = vars(dist.ProcessGroup)[name]
            noting = self._noting(getattr(dist.ProcessGroup, name), kind, names_peer=name != "recv_anysource")
            setattr(dist.ProcessGroup, name, noting)

    def stop(self) -> None:
        for name, method in self._kept.items():
            setattr(dist.ProcessGroup, name, method)
        self._kept = {}

    def _noting(self, method: Callable[..., Any], kind: str, *, names_peer: bool) -> Callable[..., Any]:
        @functools.wraps(method)
        def noting(group: dist.ProcessGroup, *arguments: Any) -> Any:  # noqa: ANN401
            ranks = dist.get_process_group_ranks(group)
            # Arguments are the tensors, the peer's place in the group, and a tag.
            ends = {dist.get_rank(), ranks[arguments[1]]} if names_peer else ranks
            self.messages.append(
                Message(
                    kind=kind,
                    ranks=tuple(sorted(ends)),
                    num_bytes=sum(tensor.numel() * tensor.element_size() for tensor in arguments[0]),
                    time_ns=time.time_ns(),
                )
            )
            return method(group, *arguments)

        return noting
