"""Full tensors that ranks bring together one at a time, so that a large model's never are in memory all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from torch import Tensor

Gather = Callable[[], Sequence[Tensor]]
"""A collective call, and what it brings together."""


class Gathered(Mapping[str, Tensor]):
    """Tensors by name, each brought together when it is asked for: all ranks ask for the same ones in the same order.
    What the last call brought is kept until another is made."""

    def __init__(self, calls: Iterable[tuple[Sequence[str], Gather]]) -> None:
        """`calls`: some names, and what brings their tensors together in that order."""
        self._places = {name: (gather, i) for names, gather in calls for i, name in enumerate(names)}
        self._last: tuple[Gather, Sequence[Tensor]] | None = None

    def __getitem__(self, name: str) -> Tensor:
        gather, place = self._places[name]
        if self._last is None or self._last[0] is not gather:
            self._last = None  # makes room for the next
            self._last = gather, gather()
        return self._last[1][place]

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
