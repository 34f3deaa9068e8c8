"""The page of what frameworks get wrong, and the command `meshmark gaps` that prints it."""

from __future__ import annotations

import argparse
import fnmatch
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshmark.adapter.registry import inference_adapters, known_adapters
from meshmark.conformance.reproducers import (
    Clauses,
    Reproducer,
    Trial,
    failed_clauses,
    read_reproducers,
    read_trials,
    version_key,
    versions_that_show,
)
from meshmark.errors import ResultsError, UnknownNameError, refuse_records
from meshmark.text import pluralize

_INTRODUCTION = """Behind each defect stand the versions in which its script was really run; no other has a result here.
*Shows in A to B*: in A, in B, and in every version between them that was tried. *Could not be run*: the script ended
otherwise there, for example because what it uses did not exist yet, so nothing is known of that version.
`python -m benchmarks.gap_versions NAME==VERSION` tries another one. `make test` runs the scripts in the versions of
constraints.txt; one that no longer shows its defect fails that test. `meshmark gaps` prints this list.

A script ends with exit code 1 and a line «expected: ...; got: ...» while the defect is there, and with 0 once it is
gone. Each is under 40 lines and needs no part of Meshmark."""


def add_gaps(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print what frameworks get wrong, with a script for each defect that shows it without Meshmark."
    )
    parser.add_argument("--framework", metavar="NAME", help="defects of this distribution only, such as deepspeed")
    parser.add_argument("--adapter", metavar="NAME", help="defects that this adapter fails clauses by; a shell pattern")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write a Markdown page with the scripts")
    parser.set_defaults(run=_gaps)


def _gaps(parsed: argparse.Namespace) -> None:
    if parsed.output:
        refuse_records(parsed.output)
    reproducers, failed = read_reproducers(), failed_clauses()
    trials = read_trials(reproducers)
    if parsed.framework:
        frameworks = sorted({each.framework for each in reproducers})
        if parsed.framework not in frameworks:
            raise UnknownNameError("framework", parsed.framework, frameworks)
        reproducers = [each for each in reproducers if each.framework == parsed.framework]
    if parsed.adapter:
        known = known_adapters() | inference_adapters()
        if not fnmatch.filter(known, parsed.adapter):
            raise UnknownNameError("adapter", parsed.adapter, known)
        reproducers = [each for each in reproducers if fnmatch.filter(failed.get(each.name, {}), parsed.adapter)]
    if parsed.output is None:
        sys.stdout.write(gaps_text(reproducers, failed, trials))
        return
    try:
        parsed.output.write_text(gaps_page(reproducers, failed, trials), encoding="utf-8")
    except OSError as error:
        raise ResultsError(f"{str(parsed.output)!r} cannot be written: {error.strerror}") from error


def gaps_page(
    reproducers: Sequence[Reproducer],
    failed: Mapping[str, Clauses],
    trials: Mapping[str, Sequence[Trial]],
    scripts: str = "",
) -> str:
    """Return the Markdown page: a list of all defects by framework, then each with its cause and its script.

    The scripts stand in the page, or are links into the folder `scripts`.
    """
    overview = []
    for framework in dict.fromkeys(each.framework for each in reproducers):
        of_it = [each for each in reproducers if each.framework == framework]
        lines = [f"- [{each.title}](#{each.name}): {_shown(each, trials)}{_issue(each)}" for each in of_it]
        overview.append(f"**{framework}**, {_tried(of_it, trials)}\n\n" + "\n".join(lines))
    frameworks = pluralize(len(overview), "released framework")
    head = (
        f"**{pluralize(len(reproducers), 'defect')} in {frameworks}**, each with a script that shows it **without "
        "Meshmark**."
    )
    parts = ["# What frameworks get wrong", head, _INTRODUCTION]
    return "\n\n".join([*parts, *overview, *(_section(each, failed, trials, scripts) for each in reproducers)]) + "\n"


def gaps_text(
    reproducers: Sequence[Reproducer], failed: Mapping[str, Clauses], trials: Mapping[str, Sequence[Trial]]
) -> str:
    """Return the defects as text for a terminal, with the path of each script."""
    if not reproducers:
        return "no known defect\n"
    parts = []
    for each in reproducers:
        lines = [f"{each.framework} {each.versions[each.framework]}: {each.title}", f"  {each.symptom}"]
        lines.append(f"  cause: {each.cause}")
        lines.append(f"  versions: {_shown(each, trials)}")
        if clauses := _clauses(failed.get(each.name, {})):
            lines.append(f"  clauses that fail by it: {clauses}")
        if each.upstream:
            lines.append(f"  upstream: {each.upstream}")
        lines.append(f"  show it: {each.launcher} {each.path}")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + f"\n\n{pluralize(len(reproducers), 'known defect')}\n"


def _section(
    each: Reproducer, failed: Mapping[str, Clauses], trials: Mapping[str, Sequence[Trial]], scripts: str
) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in each.versions.items())
    facts = [
        f"- **Symptom.** {each.symptom}",
        f"- **Cause.** {each.cause}",
        f"- **Versions.** {each.framework}: {_shown(each, trials)}. The script is for {versions}.",
    ]
    if clauses := _clauses(failed.get(each.name, {})):
        facts.append(f"- **Clauses that fail by it.** {clauses}")
    if each.upstream:
        facts.append(f"- **Upstream.** <{each.upstream}>")
    heading = f'<a id="{each.name}"></a>\n\n## {each.framework}: {each.title}'
    if scripts:
        link = f"[{each.name}.py]({scripts}/{each.name}.py)"
        return "\n\n".join([heading, "\n".join([*facts, f"- **Show it.** `{each.command}`: {link}"])])
    return "\n\n".join([heading, "\n".join(facts), f"    {each.command}", f"```python\n{each.source}\n```"])


def _shown(each: Reproducer, trials: Mapping[str, Sequence[Trial]]) -> str:
    return versions_that_show(each, trials.get(each.name, ()))


def _tried(reproducers: Sequence[Reproducer], trials: Mapping[str, Sequence[Trial]]) -> str:
    """Return the versions of a framework that any of its scripts was run in."""
    name = reproducers[0].framework
    run = {trial.versions[name] for each in reproducers for trial in trials.get(each.name, ())}
    versions = sorted(run | {each.versions[name] for each in reproducers}, key=version_key)
    return f"tried in {', '.join(versions)}"


def _issue(each: Reproducer) -> str:
    return f" ([issue]({each.upstream}))" if each.upstream else ""


def _clauses(adapters: Clauses) -> str:
    """Return clauses with the adapters that fail them: "unused (deepspeed, deepspeed-offload)"."""
    by_clauses: dict[tuple[str, ...], list[str]] = {}
    for adapter, clauses in adapters.items():
        by_clauses.setdefault(clauses, []).append(adapter)
    return "; ".join(f"{', '.join(clauses)} ({', '.join(names)})" for clauses, names in by_clauses.items())
