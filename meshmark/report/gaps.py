"""The page of what frameworks get wrong, and the command `meshmark gaps` that prints it."""

from __future__ import annotations

import argparse
import fnmatch
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshmark.adapter.registry import known_adapters
from meshmark.conformance.reproducers import Clauses, Reproducer, failed_clauses, read_reproducers
from meshmark.errors import ResultsError, UnknownNameError
from meshmark.text import pluralize

_INTRODUCTION = """`make test` runs the scripts whose frameworks are installed, in the versions named here; one that
no longer shows its defect fails that test. Other versions were not tried. `meshmark gaps` prints this list.

Save a script under its name and run the command above it. It ends with exit code 1 and a line «expected: ...; got: ...»
while the defect is there, and with 0 once it is gone."""


def add_gaps(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print what frameworks get wrong, with a script for each defect that shows it without Meshmark."
    )
    parser.add_argument("--framework", metavar="NAME", help="defects of this distribution only, such as deepspeed")
    parser.add_argument("--adapter", metavar="NAME", help="defects that this adapter fails clauses by; a shell pattern")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write a Markdown page with the scripts")
    parser.set_defaults(run=_gaps)


def _gaps(parsed: argparse.Namespace) -> None:
    reproducers, failed = read_reproducers(), failed_clauses()
    if parsed.framework:
        frameworks = sorted({each.framework for each in reproducers})
        if parsed.framework not in frameworks:
            raise UnknownNameError("framework", parsed.framework, frameworks)
        reproducers = [each for each in reproducers if each.framework == parsed.framework]
    if parsed.adapter:
        if not fnmatch.filter(known_adapters(), parsed.adapter):
            raise UnknownNameError("adapter", parsed.adapter, known_adapters())
        reproducers = [each for each in reproducers if fnmatch.filter(failed.get(each.name, {}), parsed.adapter)]
    if parsed.output is None:
        sys.stdout.write(gaps_text(reproducers, failed))
        return
    try:
        parsed.output.write_text(gaps_page(reproducers, failed), encoding="utf-8")
    except OSError as error:
        raise ResultsError(f"{str(parsed.output)!r} cannot be written: {error.strerror}") from error


def gaps_page(reproducers: Sequence[Reproducer], failed: Mapping[str, Clauses]) -> str:
    """Return the Markdown page: a list of all defects by framework, then each with its cause and its script."""
    overview = []
    for framework in dict.fromkeys(each.framework for each in reproducers):
        of_it = [each for each in reproducers if each.framework == framework]
        lines = [f"- [{each.title}](#{each.name}){_issue(each)}" for each in of_it]
        overview.append(f"**{framework} {of_it[0].versions[framework]}**\n\n" + "\n".join(lines))
    frameworks = pluralize(len(overview), "released framework")
    head = (
        f"**{pluralize(len(reproducers), 'defect')} in {frameworks}**, each with a script that shows it **without "
        "Meshmark**."
    )
    parts = ["# What frameworks get wrong", head, _INTRODUCTION]
    return "\n\n".join([*parts, *overview, *(_section(each, failed) for each in reproducers)]) + "\n"


def gaps_text(reproducers: Sequence[Reproducer], failed: Mapping[str, Clauses]) -> str:
    """Return the defects as text for a terminal, with the path of each script."""
    if not reproducers:
        return "no known defect\n"
    parts = []
    for each in reproducers:
        lines = [f"{each.framework} {each.versions[each.framework]}: {each.title}", f"  {each.symptom}"]
        lines.append(f"  cause: {each.cause}")
        lines.append(f"  {_tried(each)}")
        if clauses := _clauses(failed.get(each.name, {})):
            lines.append(f"  clauses that fail by it: {clauses}")
        if each.upstream:
            lines.append(f"  upstream: {each.upstream}")
        lines.append(f"  show it: {each.launcher} {each.path}")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + f"\n\n{pluralize(len(reproducers), 'known defect')}\n"


def _section(each: Reproducer, failed: Mapping[str, Clauses]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in each.versions.items())
    facts = [
        f"- **Symptom.** {each.symptom}",
        f"- **Cause.** {each.cause}",
        f"- **Shown by.** {versions}. {_tried(each)}",
    ]
    if clauses := _clauses(failed.get(each.name, {})):
        facts.append(f"- **Clauses that fail by it.** {clauses}")
    if each.upstream:
        facts.append(f"- **Upstream.** <{each.upstream}>")
    heading = f'<a id="{each.name}"></a>\n\n## {each.framework}: {each.title}'
    return "\n\n".join([heading, "\n".join(facts), f"    {each.command}", f"```python\n{each.source}\n```"])


def _tried(each: Reproducer) -> str:
    return f"First and last version that shows it: not known, only {each.versions[each.framework]} was tried."


def _issue(each: Reproducer) -> str:
    return f" ([issue]({each.upstream}))" if each.upstream else ""


def _clauses(adapters: Clauses) -> str:
    """Return clauses with the adapters that fail them: "unused (deepspeed, deepspeed-offload)"."""
    by_clauses: dict[tuple[str, ...], list[str]] = {}
    for adapter, clauses in adapters.items():
        by_clauses.setdefault(clauses, []).append(adapter)
    return "; ".join(f"{', '.join(clauses)} ({', '.join(names)})" for clauses, names in by_clauses.items())
