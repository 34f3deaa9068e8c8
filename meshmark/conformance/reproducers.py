"""Scripts that reproduce framework defects without Meshmark: `adapters/gaps/*.py`.

Each script begins with a block of inline metadata
(https://packaging.python.org/specifications/inline-script-metadata). Its dependencies name the versions that show the
defect, and the table [tool.meshmark] describes it. While the defect exists, a script ends with exit code 1 and the
line "expected: ...; got: ...". Once it is fixed, it ends with 0.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from meshmark.adapter.registry import inference_adapters, known_adapters, load_adapter
from meshmark.errors import InputError, UnknownNameError
from meshmark.inference.process import load_engine

FOLDER = Path(__file__).parent.parent / "adapters" / "gaps"
TRIALS = FOLDER / "tried.jsonl"
"""Results of reproducers under several versions: one line a run, written by benchmarks/gap_versions.py."""
_BLOCK = re.compile(r"^# /// script\n((?:#.*\n)+?)# ///\n", re.MULTILINE)
_REQUIRED = ("title", "framework", "symptom", "cause", "processes")
_OPTIONAL = ("upstream", "operators", "launcher", "environment", "processor", "gpu")


Clauses = Mapping[str, tuple[str, ...]]
"""By adapter: conformance clauses that it fails."""


@dataclass(frozen=True, kw_only=True)
class Reproducer:
    """A script that shows one defect of one framework."""

    name: str
    """Name of the file without its suffix."""
    title: str
    framework: str
    """Distribution that has the defect."""
    versions: Mapping[str, str]
    """Versions that show it: those of the framework and of the packages it was tried with."""
    symptom: str
    cause: str
    upstream: str
    """URL of an issue, or empty."""
    num_processes: int
    launcher: str
    """Command to which the file's name is appended."""
    operators: tuple[str, ...]
    """C++ operators of DeepSpeed that the script needs."""
    environment: str
    """Name of the virtual environment that the script needs (`make env NAME=...`); empty for Meshmark's own."""
    processor: str
    """Flag of /proc/cpuinfo without which the defect does not show; empty if it shows on every CPU."""
    gpu: bool
    """Whether the script needs a GPU."""
    source: str
    """The script without its metadata."""

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.py"

    @property
    def command(self) -> str:
        return f"{self.launcher} {self.name}.py"

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits that change with the script."""
        return hashlib.sha256(self.source.encode()).hexdigest()[:12]


class Outcome(StrEnum):
    """Result of one run of a reproducer."""

    SHOWS = "shows"
    """It ended with "expected: ...; got: ..."."""
    GONE = "gone"
    """It ended with exit code 0."""
    CANNOT_RUN = "cannot run"
    """It ended in another way, such as an import that these versions lack: nothing is known."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of a reproducer under some versions."""

    reproducer: str
    digest: str
    """Digest of the script that was run: a trial of another script says nothing about this one."""
    versions: Mapping[str, str]
    """Installed versions of the packages that the reproducer names."""
    outcome: Outcome
    last_line: str
    """The line that it ended with. Empty for success."""


def read_trials(reproducers: Iterable[Reproducer], path: Path = TRIALS) -> dict[str, list[Trial]]:
    """Return the recorded trials of the scripts as they are now, by reproducer. Empty where nothing was recorded."""
    digests = {each.name: each.digest for each in reproducers}
    found: dict[str, list[Trial]] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for fields in map(json.loads, lines):
        trial = Trial(**{**fields, "outcome": Outcome(fields["outcome"])})
        if digests.get(trial.reproducer) == trial.digest:
            found.setdefault(trial.reproducer, []).append(trial)
    return found


def keep_trials(trials: Sequence[Trial], path: Path = TRIALS) -> None:
    """Add trials to the record. A trial of the same reproducer under the same versions takes the older one's place."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    kept = {(old["reproducer"], str(sorted(old["versions"].items()))): old for old in map(json.loads, lines)}
    for trial in trials:
        kept[trial.reproducer, str(sorted(trial.versions.items()))] = asdict(trial)
    path.write_text("".join(json.dumps(kept[key]) + "\n" for key in sorted(kept)), encoding="utf-8")


def versions_that_show(reproducer: Reproducer, trials: Sequence[Trial]) -> str:
    """Return the framework's versions that show a defect, those that do not, and those that tell nothing, as text.

    The version that the script pins shows it: a test holds that. Others count only if they were really run.
    """
    outcomes: dict[str, set[Outcome]] = {reproducer.versions[reproducer.framework]: {Outcome.SHOWS}}
    for trial in trials:
        outcomes.setdefault(trial.versions[reproducer.framework], set()).add(trial.outcome)
    decided = [version for version in sorted(outcomes, key=version_key) if outcomes[version] != {Outcome.CANNOT_RUN}]
    shows = [version for version in decided if Outcome.SHOWS in outcomes[version]]
    gone = [version for version in decided if Outcome.SHOWS not in outcomes[version]]
    mixed = [version for version in shows if Outcome.GONE in outcomes[version]]
    silent = sorted(outcomes.keys() - set(decided), key=version_key)
    between = decided[decided.index(shows[0]) : decided.index(shows[-1]) + 1]
    said = f"{shows[0]} to {shows[-1]}" if len(shows) > 1 and between == shows else ", ".join(shows)
    tried = f" ({len(shows)} versions tried)" if len(shows) > 2 and between == shows else ""
    parts = [f"shows in {said}{tried}"]
    for version in mixed:
        others = [t for t in trials if t.versions[reproducer.framework] == version and t.outcome is Outcome.GONE]
        names = (name for name in reproducer.versions if name != reproducer.framework)
        packages = ", ".join(dict.fromkeys(f"{name} {t.versions[name]}" for name in names for t in others))
        parts.append(f"not in {version} with {packages}")
    if gone:
        parts.append(f"not in {', '.join(gone)}")
    if silent:
        parts.append(f"could not be run in {', '.join(silent)}")
    return "; ".join(parts)


def version_key(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, by which versions sort: "2.13.0+cpu" is (2, 13, 0)."""
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))


def read_reproducers() -> list[Reproducer]:
    """Return all reproducers, by framework and title."""
    return sorted(map(read_reproducer, FOLDER.glob("*.py")), key=lambda each: (each.framework, each.title))


def read_reproducer(path: Path) -> Reproducer:
    """Return the reproducer in a script. Raises `InputError` if its metadata is missing or incomplete."""
    text = path.read_text(encoding="utf-8")
    if not (block := _BLOCK.search(text)):
        raise InputError(f"{path.name}: expected a block '# /// script' ... '# ///' of inline script metadata")
    metadata = tomllib.loads("".join(line[2:] or "\n" for line in block[1].splitlines(keepends=True)))
    fields = metadata.get("tool", {}).get("meshmark", {})
    for key in fields:
        if key not in (*_REQUIRED, *_OPTIONAL):
            raise UnknownNameError(f"key of [tool.meshmark] in {path.name}", key, (*_REQUIRED, *_OPTIONAL))
    if missing := [key for key in _REQUIRED if key not in fields]:
        raise InputError(f"{path.name}: [tool.meshmark] lacks {', '.join(missing)}")
    versions = dict(dependency.split("==") for dependency in metadata["dependencies"])
    if fields["framework"] not in versions:
        raise InputError(f"{path.name}: its dependencies pin no version of {fields['framework']}")
    return Reproducer(
        name=path.stem,
        **{key: " ".join(str(fields[key]).split()) for key in ("title", "framework", "symptom", "cause")},
        versions=versions,
        upstream=fields.get("upstream", ""),
        num_processes=fields["processes"],
        launcher=fields.get("launcher", f"torchrun --nproc-per-node {fields['processes']}"),
        operators=tuple(fields.get("operators", "").split()),
        environment=fields.get("environment", ""),
        processor=fields.get("processor", ""),
        gpu=fields.get("gpu", False),
        source=text[block.end() :].strip(),
    )


def failed_clauses() -> dict[str, Clauses]:
    """Return, by reproducer, the clauses that adapters fail because of its defect, as their known gaps declare."""
    failed: dict[str, dict[str, tuple[str, ...]]] = {}
    declared = {name: load_adapter(target).known_gaps for name, target in known_adapters().items()}
    declared |= {name: load_engine(target).known_gaps for name, target in inference_adapters().items()}
    for name, gaps in declared.items():
        for gap in gaps:
            clauses = failed.setdefault(gap.reproducer, {}).get(name, ())
            failed[gap.reproducer][name] = tuple(dict.fromkeys((*clauses, gap.clause)))
    return dict(failed)
