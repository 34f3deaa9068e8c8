"""The summary of judged passes: what the page is made of, and what is committed."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from benchmarks.reach.options import SOURCES
from benchmarks.reach.runs import done, passes, units
from benchmarks.reach.scope import DISTRIBUTIONS, MODULES, as_ranges, files, of_ranges, statements
from meshmark.environment import describe
from meshmark.errors import InputError
from meshmark.serial import decode, encode

MEASURED = Path("baselines/reach/measured.json")


@dataclass(frozen=True, kw_only=True)
class FileReach:
    """One file of a framework. Lines are ranges as text, each the first line of a statement in a function."""

    entry: str
    """The entry of `MODULES` that it belongs to."""
    statements: int
    executed: str
    accelerator: str
    """Statements that were not executed and need an accelerator."""
    not_executed: int
    """Statements that were not executed and could be on a CPU."""


@dataclass(frozen=True, kw_only=True)
class OptionReach:
    """One option of a framework."""

    default: str
    values: dict[str, list[str]]
    """Adapters whose judged passes gave it that value, three at most."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The units that were run, and what they reached."""

    made_on: str
    commit: str
    versions: dict[str, str]
    """By framework."""
    num_suites: int
    """Cases of the suites."""
    num_scenarios: int
    """Passes of conformance's scenarios."""
    num_unjudged: int
    """Passes that did not come to an end, whose lines do not count."""
    seconds: float
    left: int
    """Units of the list that were not run."""
    adapters: list[str]
    with_clauses: list[str]
    files: dict[str, FileReach]
    options: dict[str, dict[str, OptionReach]]
    """By source and option."""
    earlier: str = ""
    """Earlier runs whose lines and options are kept, in words."""


def versions() -> dict[str, str]:
    """Return the installed versions of the frameworks."""
    return {name: version(distribution) for name, distribution in DISTRIBUTIONS.items()}


def measure() -> Measured:
    """Sum up the passes in results/reach."""
    found, finished = passes(), done()
    judged = [each for each in found if each.judged]
    lines: dict[str, set[int]] = defaultdict(set)
    values: dict[tuple[str, str], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for each in judged:
        for file, executed in each.lines.items():
            lines[file].update(executed)
        for source, options in each.values.items():
            for option, given in options.items():
                for value in given:
                    values[source, option][value].add(each.case.adapter)
    here = describe("cpu", "gloo", 1)
    return Measured(
        made_on=f"{here.machine}, {here.num_cpus} CPUs",
        commit=here.commit,
        versions=versions(),
        num_suites=sum(not each.scenario for each in judged),
        num_scenarios=sum(bool(each.scenario) for each in judged),
        num_unjudged=len(found) - len(judged),
        seconds=sum(each.seconds for each in found),
        left=sum(unit.name not in finished for unit in units()),
        adapters=sorted({each.case.adapter for each in judged}),
        with_clauses=sorted({each.case.adapter for each in judged if each.scenario}),
        files={
            file: _file(entry, file, lines.get(file, set()))
            for entries in MODULES.values()
            for entry in entries
            for file in files(entry)
        },
        options={source.name: _options(source.options(), source.name, values) for source in SOURCES},
    )


def added(found: Measured, before: Measured) -> Measured:
    """Return what a run and an earlier one reached together.

    Raises `InputError` if they are of other versions of the frameworks, whose lines are not comparable.
    """
    if found.versions != before.versions:
        raise InputError(
            f"--add: {MEASURED} is of {before.versions}, this run of {found.versions}; run all without --add"
        )
    earlier = f"{before.num_suites} cases and {before.num_scenarios} passes of conformance at {before.commit}"
    return replace(
        found,
        adapters=sorted({*found.adapters, *before.adapters}),
        with_clauses=sorted({*found.with_clauses, *before.with_clauses}),
        files={name: _both(file, before.files.get(name)) for name, file in found.files.items()},
        options={
            source: {
                name: _values_of_both(option, before.options.get(source, {}).get(name)) for name, option in own.items()
            }
            for source, own in found.options.items()
        },
        earlier="; ".join(filter(None, [earlier, before.earlier])),
    )


def _both(file: FileReach, before: FileReach | None) -> FileReach:
    if before is None:
        return file
    executed = of_ranges(file.executed) | of_ranges(before.executed)
    accelerator = (of_ranges(file.accelerator) | of_ranges(before.accelerator)) - executed
    return replace(
        file,
        executed=as_ranges(executed),
        accelerator=as_ranges(accelerator),
        not_executed=file.statements - len(executed) - len(accelerator),
    )


def _values_of_both(option: OptionReach, before: OptionReach | None) -> OptionReach:
    if before is None or before.default != option.default:
        return option
    values = {
        value: sorted({*option.values.get(value, ()), *before.values.get(value, ())})[:3]
        for value in [*option.values, *before.values]
    }
    return replace(option, values=dict(sorted(values.items())[:8]))


def _file(entry: str, file: str, lines: set[int]) -> FileReach:
    own = statements(file)
    executed = own.executed(lines)
    accelerator = set(own.accelerator) - executed
    return FileReach(
        entry=entry,
        statements=len(own.lines),
        executed=as_ranges(executed),
        accelerator=as_ranges(accelerator),
        not_executed=len(own.lines) - len(executed) - len(accelerator),
    )


def _options(
    options: dict[str, str], source: str, values: dict[tuple[str, str], dict[str, set[str]]]
) -> dict[str, OptionReach]:
    return {
        name: OptionReach(
            default=default, values={value: sorted(by)[:3] for value, by in sorted(values[source, name].items())[:8]}
        )
        for name, default in options.items()
    }


def save(found: Measured, path: Path = MEASURED) -> None:
    """Write the summary whole, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    # One file or option a line: a diff of two runs then shows what changed.
    partial.write_text(_lines(encode(found)))
    partial.replace(path)


def _lines(encoded: dict[str, object]) -> str:
    def line(value: object) -> str:
        return json.dumps(value, separators=(",", ":"))

    parts = []
    for key, value in encoded.items():
        if key == "files" and isinstance(value, dict):
            inner = ",\n".join(f"{line(name)}:{line(each)}" for name, each in value.items())
            parts.append(f"{line(key)}:{{\n{inner}\n}}")
        elif key == "options" and isinstance(value, dict):
            inner = ",\n".join(f"{line(name)}:{line(each)}" for name, each in value.items())
            parts.append(f"{line(key)}:{{\n{inner}\n}}")
        else:
            parts.append(f"{line(key)}:{line(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def load(path: Path = MEASURED) -> Measured:
    """Return what `save` wrote."""
    found: Measured = decode(Measured, json.loads(path.read_text()))
    return found
