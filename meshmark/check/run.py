"""One recorded run in the form that the judge uses: facts of all ranks, and each step with its tensors assembled."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from meshmark.check.pieces import CannotTellError, Piece, assembled
from meshmark.check.recording import Facts, Folder, Step
from meshmark.check.wrappers import NAMES, REFUSED


@dataclass(kw_only=True)
class Moment:
    """One step of all ranks.

    Whole tensors are keyed by replica: the lowest of the ranks that together hold one copy.
    """

    number: int
    ranks: list[Step]
    before: dict[int, dict[str, Tensor]]
    gradients: dict[int, dict[str, Tensor]]
    """Complete gradients, before clipping if clipping was observed."""
    clipped: dict[int, dict[str, Tensor]]
    """Gradients that the optimizer received."""
    after: dict[int, dict[str, Tensor]]
    before_parts: list[dict[str, Tensor]] = field(default_factory=list)
    """Parts that each rank holds before the step."""


@dataclass(kw_only=True)
class Run:
    """A recorded run."""

    folder: Folder
    facts: list[Facts]

    def __post_init__(self) -> None:
        self._last: list[dict[str, Tensor]] = [{} for _ in self.facts]

    @property
    def world(self) -> int:
        return len(self.facts)

    @property
    def num_steps(self) -> int:
        return min(f.num_steps for f in self.facts)

    @cached_property
    def pieces(self) -> dict[int, dict[str, Piece]]:
        return {f.rank: f.pieces for f in self.facts}

    @cached_property
    def owners(self) -> list[int]:
        """The replica that each rank belongs to."""
        found = []
        for f in self.facts:
            groups: list[tuple[int, ...]] = [piece.ranks or (f.rank,) for piece in f.pieces.values()]
            largest: tuple[int, ...] = max(groups, key=len, default=(f.rank,))
            found.append(min(largest))
        return found

    @property
    def wrappers(self) -> list[str]:
        return [NAMES.get(w, w) for w in dict.fromkeys(w for f in self.facts for w in f.wrappers)]

    @property
    def trained(self) -> list[str]:
        return self.facts[0].trained

    def check(self) -> None:
        """Raise `CannotTellError` if the run cannot be judged."""
        for f in self.facts:
            if f.end == "refused":
                raise CannotTellError(f.detail)
        for f in self.facts:
            for wrapper in f.wrappers:
                if wrapper in REFUSED:
                    raise CannotTellError(f"the script uses {REFUSED[wrapper]}")
        if not any(f.pieces for f in self.facts):
            raise CannotTellError("no model with trainable parameters was called")
        if not self.num_steps:
            ended = min(self.facts, key=lambda f: f.num_steps)
            raise CannotTellError(f"rank {ended.rank} called a model, but no step of a PyTorch optimizer was seen")
        first = {name: piece.shape for name, piece in self.facts[0].pieces.items()}
        for f in self.facts[1:]:
            own = {name: piece.shape for name, piece in f.pieces.items()}
            if own != first:
                odd = sorted(set(own.items()) ^ set(first.items()))[0]
                raise CannotTellError(
                    f"ranks 0 and {f.rank} hold different parameters, such as {odd[0]} {odd[1]} (a pipeline or tensor "
                    "parallelism?)"
                )

    def moment(self, number: int) -> Moment:
        """Return a step. Steps must be asked for in order."""
        ranks = [self.folder.step(f.rank, number) for f in self.facts]
        parts = [step.before or last for step, last in zip(ranks, self._last, strict=True)]
        self._last = [step.after for step in ranks]

        def whole(tensors: list[dict[str, Tensor]]) -> dict[int, dict[str, Tensor]]:
            return assembled(dict(enumerate(tensors)), self.pieces)

        return Moment(
            number=number,
            ranks=ranks,
            before=whole(parts),
            gradients=whole([s.complete_gradients for s in ranks]),
            clipped=whole([s.gradients for s in ranks]),
            after=whole([s.after for s in ranks]),
            before_parts=parts,
        )
