"""Note ranks that do not train one function, as where a rank alone has a penalty or another temperature."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from meshmark.check.run import Moment, Run
from meshmark.check.verdict import DIFFERENT_FUNCTIONS, Level, Verdict
from meshmark.text import some_of

Operations = set[tuple[str, float | None]]


@dataclass(kw_only=True)
class FunctionJudge:
    """Judge of what ranks compute between the model's outputs and the loss, and of the model's settings.

    Each rank's gradients may be right and their mean is then that of no single function, which no comparison of
    gradients shows. Only what stays the same at all steps of a rank is compared, because a branch or a number that
    depends on the data may differ.
    """

    run: Run
    verdict: Verdict
    operations: list[list[Operations]] = field(default_factory=list)
    """What each reader computes between outputs and loss, by step."""
    weighted: set[tuple[bool, ...]] = field(default_factory=set)
    """Of each reader, whether its losses weigh classes or targets, at every step."""

    def see(self, moment: Moment) -> None:
        """Take in what ranks compute at a step."""
        self.operations.append([step.operations for step in moment.readers])
        terms = [[term.weighted for call in step.calls for term in call.terms] for step in moment.readers]
        self.weighted.add(tuple(any(own) for own in terms))

    def judge(self) -> None:
        """Add a note on ranks whose losses or models differ."""
        if len(self.run.readers) < 2:
            return
        if differences := [*(list(self._operations()) or self._numbers()), *self._weights(), *self._settings()]:
            self.verdict.add(
                Level.NOTE, DIFFERENT_FUNCTIONS,
                f"{some_of(differences)}; one process would train none of them",
            )  # fmt: skip

    def _lasting(self, wanted: Callable[[tuple[str, float | None]], bool]) -> list[Operations]:
        """Return what is wanted of each reader's operations. Empty if it changes from step to step, or may."""
        if len(self.operations) < 2 or not all(map(all, self.operations)):
            return []
        by_step = [[set(filter(wanted, own)) for own in readers] for readers in self.operations]
        return by_step[0] if all(readers == by_step[0] for readers in by_step) else []

    def _operations(self) -> Iterator[str]:
        found = [{name for name, _ in own} for own in self._lasting(lambda operation: operation[1] is None)]
        for rank, own in zip(self.run.readers, found, strict=False):
            others = set[str]().union(*(other for other in found if other is not own))
            if alone := sorted(own - others):
                yield f"the loss of rank {rank} alone has {some_of(alone)}"
                return

    def _numbers(self) -> Iterator[str]:
        found = self._lasting(lambda operation: operation[1] is not None)
        for rank, own in zip(self.run.readers, found, strict=False):
            if own != found[0]:
                first, other = (_told(pairs) for pairs in (found[0] - own, own - found[0]))
                yield f"before its loss rank {self.run.readers[0]} has {first}, and rank {rank} has {other}"
                return

    def _weights(self) -> Iterator[str]:
        if len(self.weighted) == 1 and len(set(weighted := next(iter(self.weighted)))) > 1:
            ranks = [f"rank {rank}" for rank, has in zip(self.run.readers, weighted, strict=True) if has]
            yield f"classes or targets have weights on {some_of(ranks)} alone"

    def _settings(self) -> Iterator[str]:
        facts = [f for f in self.run.facts if f.rank in self.run.readers]
        for root, attributes in facts[0].attributes.items():
            for path, value in attributes.items():
                for other in facts[1:]:
                    there = other.attributes.get(root, {}).get(path)
                    if type(value) is type(there) is float and value != there:
                        name = ".".join(filter(None, path))
                        yield f"{name} is {value:g} on rank {facts[0].rank} and {there:g} on rank {other.rank}"
                        break


def _told(pairs: Operations) -> str:
    verbs = {"MulBackward0": "a product with", "DivBackward0": "a division by"}
    return " and ".join(f"{verbs[name]} {number:g}" for name, number in sorted(pairs, key=str)) or "none"
