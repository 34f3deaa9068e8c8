"""The page of reach: the answer first, then modules, options and mutants, made of committed records alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.reach.attempts import Attempt, End, Reading, ReadingKind
from benchmarks.reach.measured import FileReach, Measured
from benchmarks.reach.options import SOURCES, OptionStatus, status
from benchmarks.reach.scope import MODULES, framework_of, of_ranges
from meshmark.report.table import Markup, code, inline, table

LINES_GOAL, OPTIONS_GOAL, MUTANTS_GOAL = 0.75, 0.70, 0.80
"""Executed lines of a module; judged options of those that are neither refused nor outside of training; mutants killed
before the survivors are read."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """Statements of some files."""

    statements: int
    executed: int
    accelerator: int

    @property
    def on_cpu(self) -> int:
        return self.statements - self.accelerator

    @property
    def share(self) -> float:
        return self.executed / self.on_cpu if self.on_cpu else 1.0

    @property
    def missing(self) -> int:
        """Statements that are still to be executed for the goal."""
        return max(0, -int(-LINES_GOAL * self.on_cpu // 1) - self.executed)


def share_of(found: Iterable[FileReach]) -> Share:
    each = list(found)
    return Share(
        statements=sum(file.statements for file in each),
        executed=sum(len(of_ranges(file.executed)) for file in each),
        accelerator=sum(len(of_ranges(file.accelerator)) for file in each),
    )


_TRAINING = (OptionStatus.JUDGED, OptionStatus.REFUSED, OptionStatus.NOT_ASKED)
"""Of options that change training."""


def page(found: Measured, attempts: Sequence[Attempt] = (), readings: Mapping[str, Reading] | None = None) -> str:
    """Return the page in Markdown. `readings`: of mutants that survived, by name."""
    entries = [entry for entries in MODULES.values() for entry in entries]
    shares = {entry: share_of(file for file in found.files.values() if file.entry == entry) for entry in entries}
    standings = _standings(found)
    whole = share_of(found.files.values())
    asked = Counter(each for _, _, each, _ in standings)
    judged, refused, not_asked = (asked[each] for each in _TRAINING)
    options = judged + refused + not_asked
    reached = sum(one.share >= LINES_GOAL for one in shares.values())
    parts = [
        "# Reach: what judged passes execute of the frameworks",
        f"**Judged passes execute {whole.share:.0%} of the statements that can run on a CPU, and {reached} of "
        f"{len(shares)} modules reach the goal of {LINES_GOAL:.0%}. Of {options} options that change "
        f"training, {judged} are judged ({_share(judged, options)}, for a goal of {OPTIONS_GOAL:.0%}), {refused} are "
        f"refused with a reason, and {not_asked} are not asked.** Each framework is measured in its installed version: "
        f"{', '.join(f'{name} {version}' for name, version in found.versions.items())}.",
        f"Made by `make reach` on {inline(found.made_on)} at {found.commit}: {found.num_suites} cases of the suites "
        f"and {found.num_scenarios} passes of conformance, under coverage.py, in {found.seconds / 60:.0f} minutes of "
        f"launches. {found.num_unjudged} more passes, such as those that kill a rank, came to no end and do not count. "
        + (f"{found.left} units of the list were not run. " if found.left else "")
        + (f"What earlier runs reached counts too: {found.earlier}. " if found.earlier else "")
        + "[How reach is measured](../docs/reach.md) has the rules.",
        "## Lines",
        table([_row(entry, share) for entry, share in sorted(shares.items(), key=lambda item: item[1].share)]),
        "*Statements*: those in functions that can run on a CPU. *CUDA-only*: not executed, and counted apart. "
        f"*To the goal*: statements that are still to be executed for {LINES_GOAL:.0%}.",
        "### Files with most that is not executed",
        table([_file_row(name, file) for name, file in _largest(found)]),
        "## Options",
        table([*_option_rows(standings)]),
        "*Judged*: a judged pass gave the option a value other than its default, or called the method. That says that "
        "its code is held to the verdict, not that every value is. *Refused* and *not training* have their reasons in "
        "[options.toml](../benchmarks/reach/options.toml). *Share*: of options that change training, those judged.",
        "### Not asked",
        _not_tried(standings),
        "## Mutants of the frameworks",
        _mutants(attempts, readings or {}),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "–"


def _row(entry: str, share: Share) -> dict[str, object]:
    return {
        "framework": framework_of(entry),
        "module": Markup(f"`{entry}`"),
        "executed": f"{share.share:.0%}",
        "statements": f"{share.on_cpu:,}",
        "CUDA-only": f"{share.accelerator:,}",
        "to the goal": f"{share.missing:,}" if share.missing else "reached",
    }


def _largest(found: Measured) -> Sequence[tuple[str, FileReach]]:
    return sorted(found.files.items(), key=lambda item: -item[1].not_executed)[:20]


def _file_row(name: str, file: FileReach) -> dict[str, object]:
    share = share_of([file])
    return {"file": Markup(f"`{name}`"), "not executed": f"{file.not_executed:,}", "executed": f"{share.share:.0%}"}


def _standings(found: Measured) -> list[tuple[str, str, OptionStatus, str]]:
    """Return every option with its source and standing, as this version of the table has it."""
    return [
        (source.name, name, *status(source.name, name, option.default, option.values))
        for source in SOURCES
        for name, option in found.options[source.name].items()
    ]


def _option_rows(standings: Sequence[tuple[str, str, OptionStatus, str]]) -> Iterable[dict[str, object]]:
    framework = {source.name: source.framework for source in SOURCES}
    by_framework: dict[str, Counter[OptionStatus]] = defaultdict(Counter)
    for source, _, each, _ in standings:
        by_framework[framework[source]][each] += 1
    everything = sum(by_framework.values(), Counter())
    for name, count in [*by_framework.items(), ("all", everything)]:
        judged, refused, not_asked = (count[each] for each in _TRAINING)
        yield {
            "framework": name,
            "options": sum(count.values()),
            "judged": judged,
            "refused": refused,
            "not training": count[OptionStatus.NOT_TRAINING],
            "not asked": not_asked,
            "share": _share(judged, judged + refused + not_asked),
        }


def _not_tried(standings: Sequence[tuple[str, str, OptionStatus, str]]) -> str:
    """List by source. An option that is seen at its default alone is as little asked about as one that is not seen."""
    lines = []
    for source in SOURCES:
        names = [name for own, name, each, _ in standings if own == source.name and each is OptionStatus.NOT_ASKED]
        if names:
            lines.append(f"- {source.name}: {', '.join(f'`{name}`' for name in names)}")
    return "\n".join(lines)


# --- Mutants.


def _mutants(attempts: Sequence[Attempt], readings: Mapping[str, Reading]) -> str:
    """Return the score first, then by framework, then every survivor with its reading."""
    real = [each for each in attempts if each.end is not End.NO_MUTANT]
    if not real:
        return "None was run."
    ends = Counter(each.end for each in real)
    survivors = [each for each in real if each.end is End.SURVIVED]
    read = Counter(readings[each.mutation.name].kind for each in survivors if each.mutation.name in readings)
    killed, equivalent = len(real) - len(survivors), read[ReadingKind.EQUIVALENT]
    unread = len(survivors) - sum(read.values())
    apart = len(real) - equivalent - read[ReadingKind.SPEED]
    return "\n\n".join(
        [
            f"**{killed} of {len(real)} mutants were killed, {_share(killed, len(real))}, for a goal of "
            f"{MUTANTS_GOAL:.0%} before survivors are read**: {ends[End.VERDICT]} by a verdict, {ends[End.CRASH]} by a "
            f"crash, {ends[End.HANG]} by a hang. Of {len(survivors)} survivors {equivalent} are equivalent, "
            f"{read[ReadingKind.SPEED]} change speed or checks alone, {read[ReadingKind.HOLE]} show a hole, and "
            f"{unread} were not read: {_share(killed, apart)} of those that a run can tell apart were killed. "
            "The sample is random by seed, one of each framework in turn. The goal is 400; "
            f"{len(real)} were run, and {len(attempts) - len(real)} more changed nothing that runs. A mutant had at "
            "most 90 seconds of passes, so a survivor may still be killed by a pass that was not tried.",
            table([*_mutant_rows(real)]),
            "### Survivors",
            "\n".join(_survivor(each, readings.get(each.mutation.name)) for each in survivors) or "None.",
        ]
    )


def _mutant_rows(real: Sequence[Attempt]) -> Iterable[dict[str, object]]:
    for framework in MODULES:
        ends = Counter(each.end for each in real if each.framework == framework)
        if total := sum(ends.values()):
            killed = total - ends[End.SURVIVED]
            yield {
                "framework": framework,
                "mutants": total,
                "by a verdict": ends[End.VERDICT],
                "by a crash": ends[End.CRASH],
                "by a hang": ends[End.HANG],
                "survived": ends[End.SURVIVED],
                "killed": _share(killed, total),
            }


def _survivor(each: Attempt, reading: Reading | None) -> str:
    place = f"{each.mutation.file}:{each.mutation.line}"
    told = f"{reading.kind}: {reading.why}" if reading else "not read"
    return f"- {code(place)} {code(each.before)} became {code(each.after)}: {inline(told)}"
