"""Find the first bad commit or release between a good and a bad one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

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


def steps_between(good: str, bad: str) -> list[str]:
    """Return commits after `good` up to `bad`, oldest first, or releases if both are `name==version`.

    Raises `InputError` if there are none.
    """
    if (releases := releases_between(good, bad)) is not None:
        return releases
    commits = {text: commit_of(text) for text in (good, bad)}
    if missing := [text for text, commit in commits.items() if commit is None]:
        raise InputError(
            f"{' and '.join(map(repr, missing))}: no commit of the repository here; did you fetch its history?"
        )
    found = git("rev-list", "--reverse", "--ancestry-path", f"{commits[good]}..{commits[bad]}").split()
    if not found:
        raise InputError(f"no commit leads from --good {good} to --bad {bad}; are they the other way round?")
    return found


def bisect(good: str, steps: Sequence[str], search: Search, say: Callable[[str], None] = print) -> BisectResult:
    """Search `steps` for the first one that is worse than `good` as the last one is.

    Steps that cannot be run are skipped, and so are those that are worse in another way, such as by a crash, which say
    nothing about what is wrong with the last.

    Raises `InputError` when the last one is not bad, and `ResultsError` when `good` cannot be run.
    """
    before = _records(good, search, "good")
    changes = _judge(before, steps[-1], search, "bad")
    if not changes:
        raise InputError(f"{steps[-1]} is not worse than {good} by {_limits(search.gate)}: there is nothing to find")
    say(f"bad: {_one_line(steps[-1])}: {changes[0]}")
    wanted, low, high, skipped = _metrics(changes), 0, len(steps) - 1, list[str]()
    while low < high:
        candidates = sorted(range(low, high), key=lambda i: abs(i - (low + high) // 2))
        middle = next((i for i in candidates if steps[i] not in skipped), None)
        if middle is None:
            break
        try:
            worse = _judge(before, steps[middle], search, str(middle))
        except (InputError, ResultsError) as error:
            skipped.append(steps[middle])
            say(f"cannot be run: {_one_line(steps[middle])}: {str(error)[:500]}")
            continue
        if worse and not wanted & _metrics(worse):
            skipped.append(steps[middle])
            say(f"skipped, for it is worse in another way: {_one_line(steps[middle])}: {worse[0]}")
            continue
        say(f"{'bad' if worse else 'good'}: {_one_line(steps[middle])}{f': {worse[0]}' if worse else ''}")
        if worse:
            high, changes = middle, worse
        else:
            low = middle + 1
    unknown = [step for step in skipped if step in steps[low:high]]
    return BisectResult(first_bad=steps[high], subject=_one_line(steps[high]), changes=changes, skipped=unknown)


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
