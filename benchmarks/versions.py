"""`make versions`: run the core's adapters under other versions than constraints.txt pins; leaves reports/versions.md.

Three sets of versions are compared:

- `oldest`: every lower bound of pyproject.toml, exactly;
- `pinned`: constraints.txt, which is this environment;
- `newest`: the newest that pip finds, without any bound. `--pre` takes pre-releases too. Where pip looks is said by its
  own variables, such as `PIP_EXTRA_INDEX_URL`, so a nightly PyTorch needs no change here.

Each set but `pinned` gets an environment of its own, in .environments/versions-SET, which is kept; `--fresh` makes it
anew. A set fails if a case fails that does not fail under `pinned`, so that CI can run `newest` on a schedule.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from benchmarks.roster_page import wrong
from meshmark.environment import PACKAGES
from meshmark.records.record import Record, Status
from meshmark.records.record_file import read_records
from meshmark.report.table import code, inline, table

ROOT = Path(__file__).parent.parent
SETS = ("oldest", "pinned", "newest")
EXTRAS = ("deepspeed", "accelerate", "fairscale", "lightning-fabric", "transformers", "pytorch-lightning", "greenlet")
WITHOUT_DEPENDENCIES = "megatron-core"
"""It asks for packages that its layers do not need, as the Makefile says."""
BUILD_TOOLS = ("setuptools<81", "wheel", "ninja", "py-cpuinfo")
"""Packages that DeepSpeed and FairScale need to build. Old releases of PyTorch need setuptools' pkg_resources."""
SUITES = ("equivalence", "memory", "communication")
_BOUND = re.compile(r"^([A-Za-z0-9-]+)>=([0-9][0-9.]*)$")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versions", description=__doc__.partition("\n")[0])
    parser.add_argument("sets", nargs="*", metavar="SET", help=f"what to run, of {', '.join(SETS)} (default: all)")
    parser.add_argument("--pre", action="store_true", help="let `newest` be a pre-release")
    parser.add_argument("--fresh", action="store_true", help="make environments anew that are there already")
    parser.add_argument("--adapters", default="", metavar="NAMES", help="as of `pytest suites` (default: the core)")
    parser.add_argument("--results", type=Path, default=Path("results/versions"), metavar="DIR")
    parser.add_argument("-o", "--output", type=Path, default=Path("reports/versions.md"))
    parsed = parser.parse_args(arguments)
    if unknown := [name for name in parsed.sets if name not in SETS]:
        parser.error(f"{unknown[0]}: expected one of {', '.join(SETS)}")
    for name in parsed.sets or SETS:
        python = sys.executable if name == "pinned" else str(environment(name, parsed.pre, parsed.fresh))
        print(f"{name}: running the suites", flush=True)
        run_suites(python, parsed.results / name, parsed.adapters)
    sets = {name: records for name in SETS if (records := records_of(parsed.results / name))}
    parsed.output.write_text(page(sets))
    worse = [f"{name}: {failure}" for name, records in sets.items() for failure in new_failures(records, sets)]
    print(f"{parsed.output}: {'; '.join(worse) or 'nothing fails that does not fail under the pinned versions'}")
    return 1 if worse else 0


def requirements(pyproject: str, name: str) -> list[str]:
    """Return what pip is asked for: the dependencies and extras of `pyproject`, at their lower bounds for `oldest`."""
    project = tomllib.loads(pyproject)["project"]
    extras = [each for extra in EXTRAS for each in project["optional-dependencies"][extra]]
    wanted = [*project["dependencies"], *extras, *project["optional-dependencies"][WITHOUT_DEPENDENCIES]]
    if name == "oldest":
        return [_BOUND.sub(r"\1==\2", each) for each in wanted]
    return [_BOUND.sub(r"\1", each) for each in wanted]


def environment(name: str, pre: bool, fresh: bool) -> Path:
    """Return the Python of the set's environment, which is made if it is not there."""
    folder = ROOT / ".environments" / f"versions-{name}"
    python = folder / "bin" / "python"
    complete = folder / ".complete"
    if complete.exists() and not fresh:
        return python
    print(f"{name}: making {folder.relative_to(ROOT)}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    wanted = requirements((ROOT / "pyproject.toml").read_text(), name)
    torch = [each for each in wanted if _name(each) == "torch"]
    alone = [each for each in wanted if _name(each) == WITHOUT_DEPENDENCIES]
    others = [each for each in wanted if each not in (*torch, *alone)]
    # torch goes first, as in the Makefile; the second call repeats it, so that no package changes its version.
    for packages in ([*torch, "numpy", *BUILD_TOOLS], [*torch, *BUILD_TOOLS, *others], ["--no-deps", *alone]):
        command = [python, "-m", "pip", "install", "-q", "--no-build-isolation", *(["--pre"] if pre else []), *packages]
        # A machine's own constraints are not the project's.
        subprocess.run(command, check=True, env={**os.environ, "PIP_CONSTRAINT": os.devnull}, cwd=folder)
    complete.touch()
    return python


def _name(requirement: str) -> str:
    return re.split(r"[<>=!~\[]", requirement, maxsplit=1)[0]


def run_suites(python: str, results: Path, adapters: str) -> None:
    """Run the three suites in the environment of `python`. Records say what failed; the exit code is not used."""
    shutil.rmtree(results, ignore_errors=True)
    suites = [f"suites/test_{suite}.py" for suite in SUITES]
    chosen = ["--adapters", adapters] if adapters else []
    command = [python, "-m", "pytest", "-q", *suites, *chosen, "--workload", "gpt-mini", "--results", str(results)]
    subprocess.run(command, cwd=ROOT, check=False)


def records_of(folder: Path) -> list[Record]:
    return read_records(folder, latest=True).records if (folder / "records.jsonl").exists() else []


def failures(records: Sequence[Record]) -> dict[str, str]:
    """Return what is wrong with each case that has something wrong."""
    return {record.case.id: text for record in records if (text := wrong(record))}


def new_failures(records: Sequence[Record], sets: dict[str, list[Record]]) -> list[str]:
    """Return the cases that fail here and do not fail under the pinned versions."""
    pinned = failures(sets.get("pinned", []))
    return [case for case in failures(records) if case not in pinned]


def page(sets: dict[str, list[Record]]) -> str:
    """Return the page, in Markdown: outcomes by adapter, what fails, and the versions of each set."""
    ran = [r for records in sets.values() for r in records if r.outcome.status is not Status.SKIPPED]
    adapters = dict.fromkeys(record.case.adapter for record in ran)
    outcomes = [
        {"adapter": code(adapter), **{name: _outcome(adapter, records) for name, records in sets.items()}}
        for adapter in adapters
    ]
    packages = [
        {"package": code(package), **{name: _version(package, records) for name, records in sets.items()}}
        for package in ("python", *PACKAGES)
        if any(_version(package, records) for records in sets.values())
    ]
    wrongs = [
        f"- {name}, {code(case)}: {inline(text)}"
        for name, records in sets.items()
        for case, text in failures(records).items()
    ]
    commits = ", ".join(dict.fromkeys(r.environment.commit for records in sets.values() for r in records))
    return (
        "\n\n".join(
            [
                "# Versions that work",
                _headline(sets),
                "Each cell counts the cases of an adapter that the equivalence, memory and communication suites find "
                "right, of those that ran, on 2 ranks. *oldest*: the lower bounds of pyproject.toml; *pinned*: "
                "constraints.txt; *newest*: the newest releases.",
                table(outcomes),
                "## What is wrong",
                "\n".join(wrongs) or "Nothing that ran.",
                "## Which versions these are",
                table(packages),
                f"Made by `make versions`, at {inline(commits)}. There are no upper bounds in pyproject.toml: a "
                "release that breaks something is found by running `newest` on a schedule, not by forbidding it.",
            ]
        )
        + "\n"
    )


def _headline(sets: dict[str, list[Record]]) -> str:
    """Return how many cases are right under each set of versions."""
    counts = []
    for name, records in sets.items():
        ran = [record for record in records if record.outcome.status is not Status.SKIPPED]
        right = sum(not wrong(record) for record in ran)
        counts.append(f"{right} of {len(ran)} under the {name} (torch {_version('torch', records)})")
    return f"**Cases that are right**: {', '.join(counts)}."


def _outcome(adapter: str, records: Sequence[Record]) -> str:
    own = [record for record in records if record.case.adapter == adapter]
    ran = [record for record in own if record.outcome.status is not Status.SKIPPED]
    if not ran:
        return f"skipped: {inline(own[0].outcome.message)}" if own else "not run"
    right = sum(not wrong(record) for record in ran)
    return f"{right} of {len(ran)}"


def _version(package: str, records: Sequence[Record]) -> str:
    return records[0].environment.versions.get(package, "") if records else ""


if __name__ == "__main__":
    sys.exit(main())
