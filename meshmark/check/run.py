"""One recorded run in the form that the judge uses: facts of all ranks, and each step with its tensors assembled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from meshmark.check.overwritten import Earlier
from meshmark.check.pieces import CannotTellError, Piece, assembled
from meshmark.check.recorder import sketch
from meshmark.check.recording import Call, Facts, Folder, Step
from meshmark.check.tensor_parallel import check_inputs
from meshmark.check.wrappers import NAMES, REFUSED


@dataclass(kw_only=True)
class Moment:
    """One step of all ranks.

    Whole tensors are keyed by replica: the lowest of the ranks that together hold one copy.
    """

    number: int
    ranks: list[Step]
    readers: list[Step]
    """Those of ranks that read rows of their own."""
    before: dict[int, dict[str, Tensor]]
    gradients: dict[int, dict[str, Tensor]]
    """Complete gradients, before clipping if clipping was observed."""
    clipped: dict[int, dict[str, Tensor]]
    """Gradients that the optimizer received."""
    after: dict[int, dict[str, Tensor]]
    added: dict[str, Tensor]
    """Gradients of parameters that every rank holds whole, added up over the first ranks that compute together."""
    before_parts: list[dict[str, Tensor]] = field(default_factory=list)
    """Parts that each rank holds before the step."""
    moved: dict[int, dict[int, dict[str, Tensor]]] = field(default_factory=dict)
    """Parameters at calls before which the script has changed some, by the number of the call."""
    dropped: int = 0
    """Number of calls that all ranks have skipped before these."""

    def weights(self, owner: int, call: int) -> dict[str, Tensor]:
        """Return the parameters of a replica as they were at a call."""
        return self.moved.get(call, self.before)[owner]


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

    @cached_property
    def readers(self) -> list[int]:
        """Ranks that read rows of their own: of those that compute together, the first."""
        return [f.rank for f in self.facts if f.rank == min(f.partners, default=f.rank)]

    @property
    def wrappers(self) -> list[str]:
        return [NAMES.get(w, w) for w in dict.fromkeys(w for f in self.facts for w in f.wrappers)]

    @property
    def trained(self) -> list[str]:
        return self.facts[0].trained

    def known_factors(self, micro: int) -> dict[str, float]:
        """Return the factors by which gradients of a step of `micro` micro-batches are often wrong, by name."""
        world = len(self.readers)
        known: dict[str, float] = {}
        if world > 1:
            known |= {"the number of ranks": float(world), "1 / the number of ranks": 1 / world}
        if micro > 1:
            known |= {"the number of micro-batches": float(micro), "1 / the number of micro-batches": 1 / micro}
        if world > 1 and micro > 1:
            both = float(world * micro)
            known |= {"ranks x micro-batches": both, "1 / (ranks x micro-batches)": 1 / both}
        return known

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
        if numbers := [name for name, dtype in self.facts[0].dtypes.items() if dtype.is_complex]:
            raise CannotTellError(f"parameters are complex numbers, such as {numbers[0]}, which are not judged")
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

    def _added(self, ranks: list[Step]) -> dict[str, Tensor]:
        first = self.facts[0]
        whole = [name for name, piece in first.pieces.items() if not piece.ranks and name not in first.partial]
        parts = [ranks[r].complete_gradients for r in first.partners]
        shared = [name for name in whole if parts and all(name in part for part in parts)]
        return {name: sum((part[name].double() for part in parts), torch.zeros(())) for name in shared}

    def moment(self, number: int) -> Moment:
        """Return a step. Steps must be asked for in order."""
        ranks = [self.folder.step(f.rank, number) for f in self.facts]
        for f, step in zip(self.facts, ranks, strict=True):
            for call in step.calls:
                call.attributes = f.attributes.get(call.root, {}) | call.attributes
        parts = [step.before or last for step, last in zip(ranks, self._last, strict=True)]
        self._last = [step.after for step in ranks]

        def whole(tensors: list[dict[str, Tensor]]) -> dict[int, dict[str, Tensor]]:
            return assembled(dict(enumerate(tensors)), self.pieces)

        placed = {f.rank: f.pieces | f.gradient_pieces for f in self.facts}
        sums = {name: dict(enumerate(self.owners)) for f in self.facts for name in f.partial}

        def gradients(tensors: list[dict[str, Tensor]]) -> dict[int, dict[str, Tensor]]:
            found = assembled(dict(enumerate(tensors)), placed, sums)
            return {owner: found.get(owner, {}) for owner in dict.fromkeys(self.owners)}

        before = whole(parts)
        if not number:
            _check_whole(before, parts)
        moved = {}
        for index in range(max(len(s.calls) for s in ranks)):
            own = [s.calls[index].weights if index < len(s.calls) else {} for s in ranks]
            if any(own):
                moved[index] = whole([part | changed for part, changed in zip(parts, own, strict=True)])
        dropped = self._drop_skipped(ranks)
        clipped = gradients([s.gradients for s in ranks])
        complete = gradients([s.complete_gradients for s in ranks])
        for f, step, owner in zip(self.facts, ranks, self.owners, strict=True):
            for name in f.gradient_pieces.keys() & step.gradients.keys():  # which the optimizer brings into place
                step.gradients[name] = f.pieces[name].take(clipped[owner][name], step.after[name])
            if len(f.partners) > 1:
                check_inputs([ranks[r] for r in f.partners], f.partners)
                if f.rank == f.partners[0]:
                    _assemble_outputs([ranks[r] for r in f.partners])
        return Moment(
            number=number,
            ranks=ranks,
            readers=[ranks[r] for r in self.readers],
            before=before,
            gradients=complete,
            clipped=clipped,
            added=self._added(ranks),
            after=whole([s.after for s in ranks]),
            before_parts=parts,
            moved=moved,
            dropped=dropped,
        )

    def _drop_skipped(self, ranks: list[Step]) -> int:
        """Leave out calls of a step that all ranks have skipped, and return how many there were.

        Their gradients were cleared, and the calls after that are as many as steps usually have. Calls for the
        gradients of inputs, as in adversarial training, are no part of the step.
        """
        cleared = {step.cleared for step in ranks}
        if len(cleared) > 1 or 0 in cleared:
            return 0
        usual = [_most_common(f.num_calls) for f in self.facts]
        if not all(call.of_inputs for step in ranks for call in step.calls[: step.cleared]) and any(
            len(step.calls) - step.cleared != number for step, number in zip(ranks, usual, strict=True)
        ):
            return 0
        for step in ranks:
            step.calls, step.calls_before = step.calls[step.cleared :], step.cleared
            step.clips = [clip for clip in step.clips if clip.num_calls > step.cleared]
        return cleared.pop()

    def history(self, number: int, owner: int, names: Collection[str]) -> list[Earlier]:
        """Return some parameters of a replica at the beginning and after each step before step `number`, and where
        something else had changed them before a step.
        """
        again = Run(folder=self.folder, facts=self.facts)
        found = []
        for earlier in range(number):
            moment = again.moment(earlier)
            if not earlier or any(step.changed for step in moment.ranks):
                values = {name: moment.before[owner][name] for name in names}
                found.append(Earlier(when=f"before step {earlier}", values=values, begins=True))
            values = {name: moment.after[owner][name] for name in names}
            found.append(Earlier(when=f"after step {earlier}", values=values))
        return found


def num_micro_batches(calls: Sequence[Call]) -> int:
    """Return how often a step called the model that it called most."""
    return max(Counter(call.root for call in calls).values(), default=0)


def _most_common(numbers: Sequence[int]) -> int:
    """Return the most common number, or the largest of several."""
    counts = Counter(numbers)
    return max(counts, key=lambda number: (counts[number], number), default=0)


def _assemble_outputs(together: list[Step]) -> None:
    """Join the outputs and gradients of ranks that each recorded a part of them, as with `loss_parallel`.

    The first of these ranks gets the whole tensors.
    """
    for calls in zip(*(step.calls for step in together), strict=True):
        first = calls[0]
        for number in first.output_pieces:
            first.outputs[number] = sketch(
                _joined([(call.output_pieces[number], call.outputs[number]) for call in calls])
            )
        for number in first.gradient_pieces:
            parts = [(call.gradient_pieces[number], call.gradients[number]) for call in calls]
            first.gradients[number] = _joined([(piece, part) for piece, part in parts if part is not None])


def _joined(parts: list[tuple[Piece, Tensor]]) -> Tensor:
    whole = torch.empty(parts[0][0].shape, dtype=parts[0][1].dtype)
    for piece, part in parts:
        piece.put(whole, part)
    return whole


def _check_whole(found: dict[int, dict[str, Tensor]], parts: list[dict[str, Tensor]]) -> None:
    """Raise `CannotTellError` if the ranks' parts of a parameter leave gaps, which were filled with NaN."""
    for tensors in found.values():
        for name, tensor in tensors.items():
            if tensor.isnan().any() and not any(name in of and of[name].isnan().any() for of in parts):
                raise CannotTellError(f"the parts of {name} that ranks hold do not make up the whole")
