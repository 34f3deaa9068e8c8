"""Between which ranks point-to-point calls went: the profiler does not see their group, and gloo's flight recorder does
not see them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_CALLS = ("send", "recv", "recv_anysource")
"""Methods of a process group, through which `torch.distributed` sends and receives."""


class Ends:
    """The ranks of every point-to-point call of this process between `start` and `stop`, in order."""

    def __init__(self) -> None:
        self.ranks: list[tuple[int, ...]] = []
        self._kept: dict[str, object] = {}
        """As the class has them: what `getattr` makes of them would no longer be bound to a group."""

    def start(self) -> None:
        if not dist.is_available() or not dist.is_initialized():
            return
        for name in _CALLS:
            self._kept[name] = vars(dist.ProcessGroup)[name]
            noting = self._noting(getattr(dist.ProcessGroup, name), names_peer=name != "recv_anysource")
            setattr(dist.ProcessGroup, name, noting)

    def stop(self) -> None:
        for name, method in self._kept.items():
            setattr(dist.ProcessGroup, name, method)
        self._kept = {}

    def _noting(self, method: Callable[..., Any], *, names_peer: bool) -> Callable[..., Any]:
        @functools.wraps(method)
        def noting(group: dist.ProcessGroup, *arguments: Any) -> Any:  # noqa: ANN401
            ranks = dist.get_process_group_ranks(group)
            # Of the tensors, the peer's place in the group, and a tag.
            ends = {dist.get_rank(), ranks[arguments[1]]} if names_peer else ranks
            self.ranks.append(tuple(sorted(ends)))
            return method(group, *arguments)

        return noting
