"""Find the first bad commit or release between a good and a bad one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from meshmark.errors import InputError, ResultsError
from meshmark.records.record import Record
from meshmark.regression.change import Change
from meshmark.regression.compare import compare
from meshmark.regression.gate import Gate
from meshmark.regression.releases import releases_between
from meshmark.regression.side import commit_of, git, open_side, run_suites


@dataclass(frozen=True, kw_only=True)
class Search:
    """Settings of a bisection."""

    options: Sequence[str]
    """Options of the suites, which select the case."""
    gate: Gate
    scratch: Path
    launches: int = 1
    """Sessions per side. A slow-down needs more than one, to measure how launches scatter."""


@dataclass(frozen=True, kw_only=True)
class BisectResult:
    """Result of a bisection."""

    first_bad: str
    subject: str
    """The commit in one line."""
    changes: list[Change]
    """Changes for the worse between the good commit and this one."""
    skipped: list[str]
    """Steps that could not be run, or were worse in another way, so that the first bad one may be among them."""


class Suspects(Protocol):
    """The steps between a good and a bad one, of which one is the first bad one."""

    @property
    def bad(self) -> str:
        """The earliest step that is known to be bad."""

    def best_first(self) -> list[str]:
        """Return all suspects but `bad`, the one that halves them best first."""

    def judged(self, step: str, *, is_bad: bool) -> None:
        """Take in that a suspect is good or bad, and drop those that are the same for it."""


class Releases:
    """Releases of one package, of which the later ones follow the earlier ones."""

    def __init__(self, releases: Sequence[str]) -> None:
        self.left = list(releases)

    @property
    def bad(self) -> str:
        return self.left[-1]

    def best_first(self) -> list[str]:
        middle = (len(self.left) - 1) // 2
        return sorted(self.left[:-1], key=lambda step: abs(self.left.index(step) - middle))

    def judged(self, step: str, *, is_bad: bool) -> None:
        place = self.left.index(step) + 1
        self.left = self.left[:place] if is_bad else self.left[place:]


class Commits:
    """Commits of a history that may have merges: a good commit clears its ancestors alone, a bad one all others."""

    def __init__(self, good: str, bad: str) -> None:
        self.good, self.bad = [good], bad

    def best_first(self) -> list[str]:
        listed = git("rev-list", "--bisect-all", self.bad, "--not", *self.good).splitlines()
        return [commit for commit in (line.split()[0] for line in listed) if commit != self.bad]

    def judged(self, step: str, *, is_bad: bool) -> None:
        if is_bad:
            self.bad = step
        else:
            self.good.append(step)


def suspects_between(good: str, bad: str) -> Suspects:
    """Return the commits between two, or the releases if both are `name==version`.

    Raises `InputError` if there are none.
    """
    if (releases := releases_between(good, bad)) is not None:
        return Releases(releases)
    first, last = commit_of(good), commit_of(bad)
    if first is None or last is None:
        missing = " and ".join(repr(text) for text, commit in ((good, first), (bad, last)) if commit is None)
        raise InputError(f"{missing}: no commit of the repository here; did you fetch its history?")
    if not git("rev-list", "--max-count=1", "--ancestry-path", f"{first}..{last}"):
        shallow = git("rev-parse", "--is-shallow-repository") == "true"
        why = "this clone is shallow: git fetch --unshallow" if shallow else "are they the other way round?"
        raise InputError(f"no commit leads from --good {good} to --bad {bad}; {why}")
    return Commits(first, last)


def bisect(good: str, suspects: Suspects, search: Search, say: Callable[[str], None] = print) -> BisectResult:
    """Search for the first of the suspects that is worse than `good` as the last one is.

    Steps that cannot be run are skipped, and so are those that are worse in another way, such as by a crash, which say
    nothing about what is wrong with the last.

    Raises `InputError` when the last one is not bad, and `ResultsError` when `good` cannot be run.
    """
    before = _records(good, search, "good")
    changes = _judge(before, suspects.bad, search, "bad")
    if not changes:
        raise InputError(f"{suspects.bad} is not worse than {good} by {_limits(search.gate)}: there is nothing to find")
    say(f"bad: {_one_line(suspects.bad)}: {changes[0]}")
    wanted, skipped, numbers = _metrics(changes), list[str](), itertools.count()
    while step := next((each for each in suspects.best_first() if each not in skipped), None):
        try:
            worse = _judge(before, step, search, str(next(numbers)))
        except (InputError, ResultsError) as error:
            skipped.append(step)
            say(f"cannot be run: {_one_line(step)}: {str(error)[:500]}")
            continue
        if worse and not wanted & _metrics(worse):
            skipped.append(step)
            say(f"skipped, for it is worse in another way: {_one_line(step)}: {worse[0]}")
            continue
        say(f"{'bad' if worse else 'good'}: {_one_line(step)}{f': {worse[0]}' if worse else ''}")
        suspects.judged(step, is_bad=bool(worse))
        changes = worse or changes
    left = suspects.best_first()
    unknown = [step for step in skipped if step in left]
    return BisectResult(first_bad=suspects.bad, subject=_one_line(suspects.bad), changes=changes, skipped=unknown)


def _metrics(changes: Sequence[Change]) -> set[tuple[str, str]]:
    return {(change.case, change.metric) for change in changes}


def _records(text: str, search: Search, label: str) -> list[Record]:
    """Return the records of as many fresh sessions as the search asks for."""
    with open_side(text, search.scratch / "sides", label) as side:
        folders = [search.scratch / label / str(i) for i in range(search.launches)]
        return [record for folder in folders for record in run_suites(side, search.options, folder)]


def _judge(before: Sequence[Record], text: str, search: Search, label: str) -> list[Change]:
    found = compare(before, _records(text, search, label), across=True, margin=search.gate.margin)
    return search.gate.failing(found.changes)


def _one_line(text: str) -> str:
    return git("log", "-1", "--format=%h %ad %s", "--date=short", text) if commit_of(text) else text


def _limits(gate: Gate) -> str:
    return ", ".join(f"{kind}{f':{limit:.2%}' if limit else ''}" for kind, limit in gate.limits.items())
