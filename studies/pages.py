"""`make pages`: render the pages of reports/ from committed records. Nothing is run.

    python -m studies.pages                 # renders every page that can be
    python -m studies.pages --keep report   # keeps results/report as the page's records, then renders
    python -m studies.pages --keep versions --results DIR   # keeps what lies in another folder than results

Every page then says below its title which commit its records are of, and whether it is stale. A page is **stale** when
a file that it depends on differs between that commit and HEAD, by `git diff`. Comments and docstrings do not count.
Without git, or in a clone that lacks the commit, the answer is "not known".
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import functools
import gzip
import io
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import versions
from benchmarks.chaos.page import page as chaos_page
from benchmarks.chaos.page import read_series
from benchmarks.reach.attempts import read_readings, tried_before
from benchmarks.reach.measured import load
from benchmarks.reach.page import page as reach_page
from meshmark.compression.run import read_compression
from meshmark.conformance.reproducers import failed_clauses, read_reproducers, read_trials
from meshmark.inference.run import read_inference
from meshmark.plan.model_names import plan_model
from meshmark.records.record import EquivalenceEvidence, Record
from meshmark.records.record_file import line_of, read_records
from meshmark.report.conformance import (
    Conformance,
    conformance_page,
    draw_clauses,
    judged,
    keep_conformance,
    read_conformance,
)
from meshmark.report.gaps import gaps_page
from meshmark.report.guard import write_page
from meshmark.report.kept_page import SUFFIX, kept_page
from meshmark.report.render import write_report
from meshmark.report.which import Cluster, which_page
from meshmark.spec.hardware import gpu
from studies import compression, inference, tables, trainers, validate

ROOT = Path(__file__).parents[1]
REPORTS = ROOT / "reports"
RECORDS = REPORTS / "records"
BASELINE = ROOT / "baselines" / "epyc-2cpu"
COMMAND = "make pages"
MEASURES = (
    *(f"meshmark/{name}" for name in "spec reference theory adapter algorithms measure judge records".split()),
    *(f"meshmark/{name}" for name in "passes launch run".split()),
    "adapters",
    "constraints.txt",
)
"""Code that any record depends on, and the versions of frameworks."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page of reports/."""

    render: Callable[[Path], object] | None = None
    """Writes the page to a path, and its pictures beside it. None for a page whose tables are its record."""
    needs: Sequence[str] = MEASURES
    """Files and folders that what it says depends on. Empty for a page that the code of today computes."""
    anew: str = ""
    """How a page whose tables are its record is measured anew: the command, and how long it takes."""
    folders: Sequence[str] = ()
    """Folders of results/ that `--keep` packs, for a page of several runs. Empty for the folder of its own name."""


def records_of(name: str) -> list[Record]:
    """Return the committed records of a page."""
    return read_records(RECORDS / f"{name}.jsonl.gz", latest=True).records


def clauses_of(name: str) -> Conformance:
    """Return the committed findings of a page's clauses."""
    return read_conformance(RECORDS / f"{name}.clauses.jsonl")


def measured() -> list[Record]:
    """Return every committed record of the matrix, older ones first: of one case, the last counts."""
    return [*read_records(BASELINE, latest=True).records, *records_of("report")]


def _report(name: str) -> Callable[[Path], None]:
    def render(path: Path) -> None:
        write_report(
            read_records(RECORDS / f"{name}.jsonl.gz", latest=True), path, COMMAND, glossary="../docs/glossary.md"
        )

    return render


def _which(path: Path) -> None:
    cluster = Cluster(model=plan_model("llama-7b"), gpu=gpu("a100-40"), num_gpus=8, global_batch=256)
    kept = [clauses_of("conformance")]
    write_page(path, which_page(measured(), cluster, COMMAND, kept, in_reports=True))


def _conformance(path: Path) -> None:
    kept = clauses_of("conformance")
    write_page(path, conformance_page(kept, COMMAND, picture=draw_clauses(kept, path)))


def _trainers(path: Path) -> None:
    path.write_text(trainers.page(records_of("trainers"), clauses_of("trainers").columns), encoding="utf-8")


def _inference(path: Path) -> None:
    path.write_text(inference.page(read_inference(RECORDS / "inference.jsonl")), encoding="utf-8")


def _compression(path: Path) -> None:
    path.write_text(compression.page(read_compression(RECORDS / "compression.jsonl")), encoding="utf-8")


def gaps(scripts: str = "") -> str:
    """Return the page of known defects, with each script or, if their folder is given, with links to them."""
    reproducers = read_reproducers()
    return gaps_page(reproducers, failed_clauses(), read_trials(reproducers), scripts)


def _gaps(path: Path) -> None:
    path.write_text(gaps(scripts="../adapters/gaps"), encoding="utf-8")


def _versions(path: Path) -> None:
    sets = {name: records_of(f"versions-{name}") for name in versions.SETS}
    path.write_text(versions.page(sets), encoding="utf-8")


def _reach(path: Path) -> None:
    path.write_text(reach_page(load(), tried_before(), read_readings()), encoding="utf-8")


def _chaos(path: Path) -> None:
    path.write_text(chaos_page(*read_series(sorted(RECORDS.glob("chaos-*.jsonl")))), encoding="utf-8")


def _tables(path: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        tables.main(["-o", str(path)])


PAGES: dict[str, Page] = {
    "which": Page(render=_which, needs=(*MEASURES, "meshmark/conformance")),
    "report": Page(render=_report("report")),
    "conformance": Page(
        render=_conformance,
        needs=(*MEASURES, "meshmark/conformance"),
    ),
    "gaps": Page(
        render=_gaps,
        needs=(),
    ),
    "trainers": Page(render=_trainers, needs=(*MEASURES, "meshmark/conformance")),
    "compression": Page(
        render=_compression,
        needs=(
            "meshmark/compression",
            *(f"adapters/{name}.py" for name in ("torchao", "bitsandbytes", "torch_pruning", "weight_masks")),
            "studies/compression_costs.py",
            "examples/workloads/distillation.py",
        ),
    ),
    "inference": Page(
        render=_inference,
        needs=(
            "meshmark/inference",
            "meshmark/measure/laps.py",
            "adapters/paged",
            "adapters/vllm",
            "adapters/transformers_generate.py",
            "environments",
        ),
    ),
    "scale": Page(render=_report("scale")),
    "gpu": Page(render=_report("gpu"), anew="make gpu PYTHON=python3: half an hour of a machine with a GPU"),
    "gpu-nccl": Page(render=_report("gpu-nccl"), anew="make gpu PYTHON=python3: its piece nccl, three minutes"),
    "tables": Page(render=_tables, needs=()),
    "architectures": Page(anew="make architectures: trains 23 models under four frameworks"),
    "roster": Page(anew="make roster: hours"),
    "size": Page(anew="make size: an hour and 12 GiB", needs=(*MEASURES, "benchmarks")),
    "convergence": Page(anew="make convergence: trains for 13 minutes", needs=("meshmark/algorithms", "studies")),
    "coatnet": Page(anew="make coatnet: measures for 6 minutes"),
    "validation": Page(render=validate.write_page, needs=()),
    "versions": Page(render=_versions, folders=tuple(f"versions/{name}" for name in versions.SETS)),
    "validation-runs": Page(render=validate.write_runs, needs=()),
    "dry-runs": Page(anew="make dry-runs: single ranks of worlds of 16,384, for two minutes"),
    "power": Page(anew="make power: four hours", needs=(*MEASURES, "tests/broken")),
    "correct-engines": Page(anew="make correct-engines: 7 minutes", needs=(*MEASURES, "tests/correct")),
    "reach": Page(render=_reach, needs=()),
    "gate": Page(anew="make gate: 35 minutes of launches", needs=("meshmark/regression",)),
    "chaos": Page(
        render=_chaos if any(RECORDS.glob("chaos-*.jsonl")) else None,
        anew="make chaos: an hour of faults",
        needs=("meshmark/launch",),
    ),
    "cluster": Page(anew="make cluster-test: a real SLURM, as root", needs=("meshmark/launch",)),
}
"""Every page of reports/."""


# --- Stale or not.

MARK = "> *Records*: "
_COMMIT = re.compile(r"(?<![-\w])[0-9a-f]{12}(?:-dirty)?\b")


def _git(*arguments: str) -> str | None:
    """Return what git prints, or None where there is no git, no repository, or no such commit."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout


@functools.cache
def changed(commit: str, needs: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the folders of `needs` of which a file differs between a commit and HEAD, or None if git cannot say."""
    listed = _git("diff", "--name-only", commit, "HEAD", "--", *needs)
    if listed is None:
        return None
    files = {need: [file for file in listed.split() if f"{file}/".startswith(f"{need}/")] for need in needs}
    return tuple(need for need in needs if any(_does_otherwise(file, commit) for file in files[need]))


def _does_otherwise(file: str, commit: str) -> bool:
    """Return whether a file that differs between a commit and HEAD differs in more than comments and docstrings."""
    before, now = _git("show", f"{commit}:{file}"), _git("show", f"HEAD:{file}")
    if before is None or now is None or not file.endswith(".py"):
        return True
    return _code(before) != _code(now)


@functools.lru_cache(maxsize=1024)
def _code(source: str) -> str:
    """Return what a Python file does, without comments, docstrings and line breaks."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [part for part in node.body if not _is_text(part)]
    return ast.dump(tree)


def _is_text(part: ast.stmt) -> bool:
    return isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant) and isinstance(part.value.value, str)


def status(name: str, text: str) -> str:
    """Return what a page says of its records: their commits, and whether it is stale."""
    page = PAGES[name]
    if not page.needs:
        return "none; the code that rendered this page computed, or read, what it says."
    commits = sorted(set(_COMMIT.findall(text)))
    if not commits:
        return "of a commit that the page does not name, so that whether it is stale is not known."
    found = [changed(commit.removesuffix("-dirty"), tuple(page.needs)) for commit in commits]
    known = [folders for folders in found if folders is not None]
    folders = [need for need in page.needs if any(need in each for each in known)]
    said = f"of commit {', '.join(commits)}. "
    if folders:
        rest = f" and {len(folders) - 3} more" if len(folders) > 3 else ""
        return f"{said}**Stale**: since then {', '.join(folders[:3])}{rest} changed."
    if len(known) < len(found):
        return f"{said}Whether it is stale is not known: git has no such commit here."
    dirty = " But for changes that were not committed then." if "-dirty" in said else ""
    return f"{said}Not stale: nothing that it depends on has changed since.{dirty}"


def unmarked(text: str) -> str:
    """Return a page without what it says of its records."""
    return re.sub(rf"^{re.escape(MARK)}.*\n\n", "", text, flags=re.MULTILINE)


def marked(name: str, text: str) -> str:
    """Return a page with what it says of its records, below its title."""
    title, _, rest = unmarked(text).partition("\n\n")
    return f"{title}\n\n{MARK}{status(name, rest)}\n\n{rest}"


# --- Keeping, and the command.


def renderer(name: str) -> Callable[[Path], object]:
    """Return what writes a page to a path: from measurements where they were kept, else from its tables."""

    def from_tables(path: Path) -> None:
        path.write_text(kept_page(RECORDS / f"{name}{SUFFIX}"), encoding="utf-8")

    return PAGES[name].render or from_tables


def keep(results: Path, name: str) -> None:
    """Keep the records of a results folder under a name: no bulky evidence, and clauses as they were judged."""
    reading = read_records(results, latest=True)
    RECORDS.mkdir(exist_ok=True)
    if clauses := judged(reading.records):
        keep_conformance(clauses, RECORDS / f"{name}.clauses.jsonl")
    if plain := [record for record in reading.records if not record.conformance.scenario]:
        lean = [dataclasses.replace(r, equivalence=_lean(r)) for r in plain]
        lines = b"".join(line_of(line) for line in [*reading.sessions, *lean])
        (RECORDS / f"{name}.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))


def _lean(record: Record) -> EquivalenceEvidence:
    return dataclasses.replace(record.equivalence, deviations={}, noise={}, factors={})


def render(name: str, folder: Path = REPORTS) -> Path:
    """Render a page and mark whether it is stale. Returns its path."""
    path = folder / f"{name}.md"
    renderer(name)(path)
    path.write_text(marked(name, path.read_text(encoding="utf-8")), encoding="utf-8")
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m studies.pages", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PAGES)} (default: all)")
    parser.add_argument("--keep", metavar="NAME", help="first keep results/NAME as the records of that page")
    parser.add_argument("--results", type=Path, default=ROOT / "results", metavar="DIR", help="(default: results)")
    parsed = parser.parse_args(arguments)
    if parsed.keep:
        kept = PAGES[parsed.keep].folders if parsed.keep in PAGES else ()
        for folder in kept or [parsed.keep]:
            keep(parsed.results / folder, folder.replace("/", "-"))
    for name in parsed.names or ([parsed.keep] if parsed.keep else PAGES):
        if name not in PAGES:
            parser.error(f"no page {name!r}; there are {', '.join(PAGES)}")
        path, page = render(name), PAGES[name]
        anew = f" Anew: {page.anew}." if page.anew else ""
        print(f"{path.name:18} rendered; records {status(name, path.read_text(encoding='utf-8'))}{anew}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
