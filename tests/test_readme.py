"""Every command that README and docs print is run: for real where it takes seconds, else as far as it goes without the
hardware or the hours (`pytest --collect-only`, `make -n`). Results go to a scratch folder."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.cli.options import chosen_workloads
from meshmark.environment import describe
from meshmark.records.record_file import RecordFile
from meshmark.spec.layout import Layout
from meshmark.spec.precision import Precision
from meshmark.spec.workload import workload
from studies import docs_site
from tests.ci_commands import JOBS, commands_of_job
from tests.factories import make_case, make_good, make_timed, make_timing
from tests.test_plan_search import sweep_rows, write_table

ROOT = Path(__file__).parent.parent
BF16 = Precision.PRESETS["bf16"]
PAGES = sorted([*ROOT.glob("*.md"), ROOT / "baselines" / "README.md", *ROOT.glob("docs/**/*.md")])
PAGES.remove(ROOT / "CHANGELOG.md")  # tells of commands as they were
CORE = ("--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"))
OUTSIDE = """
from meshmark.adapter.contract import Adapter, Capabilities

class Mine(Adapter):
    capabilities = Capabilities(degrees=frozenset({"dp"}))
    def build(self, case, context):
        raise NotImplementedError
"""
ELLIPSIS = "..."
"""Stands for further options where a page prints it last."""


def indented_blocks(text: str) -> list[str]:
    """Paragraphs of which every line is indented by four spaces, dedented; not listings of folders."""
    paragraphs = [part.strip("\n") for part in re.split(r"\n\s*\n", text)]
    blocks = [part for part in paragraphs if part and all(line.startswith("    ") for line in part.splitlines())]
    return [textwrap.dedent(block) for block in blocks if not block.split()[0].endswith("/")]


def commands_of(text: str) -> list[str]:
    """Return the commands that a reader would type: lines of code blocks, without comments, and commands between
    backticks. Of a block of text, which may be output, only lines that begin as a command does."""
    fenced = re.findall(r"^```(?:sh|bash|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    plain = "".join(re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)).splitlines()
    fenced += [line for line in plain if line.split(maxsplit=1)[:1] and line.split()[0] in RUNS]
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in [*fenced, *indented_blocks(text)] for line in block.replace("\\\n", " ").splitlines()]
    found = [shlex.join(shlex.split(line, comments=True)) for line in lines]
    found += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text) if code.split()[0] in RUNS]
    parts = [part for command in found for part in re.split(r"\s+'?&&'?\s+", command) if part]
    return list(dict.fromkeys(parts))


def options_of(text: str) -> set[str]:
    """Options that are printed alone between backticks."""
    return set(re.findall(r"`(--[a-z][\w-]*)[^`]*`", text))


def own_model() -> str:
    """Return the workload that docs/your-model.md shows."""
    shown = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "your-model.md").read_text(), re.DOTALL)
    assert shown
    return shown[1]


def prepare(folder: Path) -> None:
    """Make the files that the pages mention."""
    case = make_case(layout=Layout(dp=2, num_micro_batches=3), workload=workload("gpt-tiny"))
    about = {"case": case, "environment": describe("cpu", "gloo", 1)}
    timing = make_timing(rank_step_seconds=[[0.5] * 16] * 2)
    large = [chosen_workloads("gpt-1.3b", None, 2 * ranks)[0] for ranks in (8, 16)]
    gated = {
        f"baselines/{name}": make_case(
            layout=Layout(dp=w.global_batch // 2, num_micro_batches=2), workload=w, precision=BF16
        )
        for name, w in zip(("gpu", "cluster"), large, strict=True)
    }
    made = ("baselines/main", "baselines/NAME")  # which one page makes, and pages before it name
    plain = ("results", "results/first", "results/ci", "results/gpu", *made, "before", "after")
    for results, one in {**dict.fromkeys(plain, case), **gated}.items():
        file = RecordFile(folder / results)
        file.append(make_good(**{**about, "case": one}))
        file.append(make_timed(**{**about, "case": one}, timing=timing))
        file.close()
    for baseline in made:
        (folder / baseline / "baseline.json").write_text("{}")
    (folder / "results" / "inference").mkdir()
    kept = (ROOT / "reports" / "records" / "inference.jsonl").read_text()
    (folder / "results" / "inference" / "records.jsonl").write_text(kept)
    (folder / "generate.py").write_text((ROOT / "examples" / "generate.py").read_text())
    write_table(folder / "layouts.csv", sweep_rows(1))
    (folder / "suite.toml").write_text((ROOT / "examples" / "ci" / "suite.toml").read_text())
    (folder / "mine.txt").write_text("to be or not to be, that is the question " * 2000)
    (folder / "path" / "to").mkdir(parents=True)
    for place in (folder, folder / "path" / "to"):
        (place / "mine.py").write_text(OUTSIDE)
        (place / "model.py").write_text(own_model())


def collect(words: list[str]) -> list[str]:
    """Pytest as far as collection; on a CPU where there is no GPU."""
    if not torch.cuda.is_available():
        words = ["cpu" if before == "--device" else word for before, word in zip(["", *words], words, strict=False)]
        words = [word for word in words if word != "--oversubscribe"]  # which CPUs refuse
    ours = ("suites", "examples/")
    words = [str(ROOT / word) if word.startswith(ours) else word for word in words if word != ELLIPSIS]
    words = [word.replace("hf:examples", f"hf:{ROOT}/examples") for word in words]
    return ["pytest", *CORE, "-p", "no:cacheprovider", "--collect-only", "-q", *words]


def each_task(words: list[str]) -> list[str]:
    """Return the commands that srun starts; of `doctor`, which compares nodes, this one's part."""
    if "meshmark" in words:
        return ["meshmark", *(word for word in words[words.index("meshmark") + 1 :] if word != "--cluster")]
    if "meshmark.sif" in words:  # containers/meshmark.def runs the suites
        return collect(["--pyargs", "meshmark.suites", *words[words.index("meshmark.sif") + 1 :]])
    return collect(words[words.index("pytest") + 1 :])


def of_script(words: list[str]) -> list[str]:
    """Return what a script of examples/slurm starts with the words after its name; empty if the command is only
    named."""
    if not words:
        return ["true"]
    (script,) = [i for i, word in enumerate(words) if word.endswith(".sbatch")]
    assert "pytest --pyargs meshmark.suites --resume" in (ROOT / words[script]).read_text()
    return collect(["--pyargs", "meshmark.suites", "--resume", *words[script + 1 :]])


def meshmark(words: list[str]) -> list[str]:
    """For real; what measures for its time's sake, in less time; what trains, as far as collection; of what runs suites
    of several commits, the suites' side (tests/test_ab.py holds the other)."""
    if words[:1] in (["ab"], ["bisect"]) and "--" in words:
        asked = words[words.index("--") + 1 :]
        return collect(asked if asked[0].startswith("suites") else ["--pyargs", "meshmark.suites", *asked])
    if words[:1] == ["check"]:  # tests/test_check.py runs the script; a page may show one that is wrong
        scripts = [str(ROOT / word) for word in words if word.endswith(".py")]
        return ["test", "-f", scripts[0]] if scripts else ["meshmark", "check", "--help"]
    if words[:1] == ["submit"]:
        return ["meshmark", "submit", "--dry-run", *words[1:]]
    if "--run" in words:
        words = [*words[:-1], f"{words[-1]} --collect-only"]
    less = {"calibrate": ["--seconds", "1", "--ranks", "1"], "run": ["--collect-only"], "baseline": ["--replace"]}
    return ["meshmark", *words, *less.get(words[0], [])]


def make(words: list[str]) -> list[str]:
    """Prints what it would run."""
    return ["make", "-n", "-C", str(ROOT), *words]


def activate(words: list[str]) -> list[str]:
    """A shell's own business; `make install` makes what it names."""
    return ["test", words[0], "=", ".venv/bin/activate"]


def python(words: list[str]) -> list[str]:
    """As far as what it runs is there."""
    if words[0] != "-m":
        return ["test", "-f", str(ROOT / words[0])]
    there = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    return [sys.executable, "-c", there, words[1]]


def pip(words: list[str]) -> list[str]:
    """Nothing is installed: what it names of ours must be there."""
    named = " ".join(words)
    extras = [extra for listed in re.findall(r"meshmark\[([\w,-]+)\]", named) for extra in listed.split(",")]
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    right = words[:1] in (["install"], ["freeze"]) and set(extras) <= set(known)
    return ["true" if right else "false"]


def export(words: list[str]) -> list[str]:
    """A variable that something here reads."""
    name = words[0].partition("=")[0]
    return ["grep", "-rqs", "--include=*.py", name, str(ROOT / "meshmark")]


def ours(words: list[str]) -> list[str]:
    """A script of the checkout; there, and to be run."""
    return ["test", "-x", str(ROOT / ".ci" / "run")]


RUNS: dict[str, Callable[[list[str]], list[str]]] = {
    ".": activate,
    "pytest": collect,
    "srun": each_task,
    "sbatch": of_script,
    "meshmark": meshmark,
    "make": make,
    "python": python,
    "pip": pip,
    "export": export,
    ".ci/run": ours,
}
"""By a command's first word: from the words behind it to what is run for it."""

RUN_ALL = """
import contextlib, io, json, subprocess, sys
import pytest
from meshmark.cli.commands import main
ended = []
for name, *words in json.load(sys.stdin):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            if name in ("pytest", "meshmark"):
                code = int((pytest.main if name == "pytest" else main)(words))
            else:
                done = subprocess.run([name, *words], capture_output=True, text=True)
                code = done.returncode
                said.write(done.stderr)
        except SystemExit as exit:
            code = exit.code
    ended.append([code, said.getvalue()])
print()
print(json.dumps(ended))
"""
"""In one process, for importing PyTorch takes longer than a command."""


def run(commands: Sequence[list[str]], folder: Path) -> list[tuple[int, str]]:
    """Exit code and output of each, run in `folder` one after the other."""
    outside = ("PYTEST_ADDOPTS", "GROUP_RANK", "LOCAL_WORLD_SIZE", "SLURM_STEP_NUM_NODES")
    environment = {name: value for name, value in os.environ.items() if name not in outside}
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL],
        cwd=folder,
        input=json.dumps(commands),
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return [(code, said) for code, said in json.loads(done.stdout.splitlines()[-1])]


def complaints(commands: Sequence[str], folder: Path) -> dict[str, str]:
    """Return complaints about commands that do not end well when typed, and about those that nothing here can run."""
    prepare(folder)
    words = {command: shlex.split(command) for command in commands}
    strange = {
        c: f"no way to run {w[0]!r}: give tests/test_readme.py one" for c, w in words.items() if w[0] not in RUNS
    }
    known = [command for command in commands if command not in strange]
    ended = run([RUNS[words[command][0]](words[command][1:]) for command in known], folder)
    return strange | {
        c: f"ended with {code}: {said[-2000:]}" for c, (code, said) in zip(known, ended, strict=True) if code
    }


WRONG = [
    "pytest suites --wrold 2",
    "srun -N2 pytest suites --world 2 --precison bf16",
    "pytest suites --world nine",
    "srun -N2 meshmark doctor --custer",
    "pytest suites/test_nothing.py",
    "meshmark plan --gpus 8 --modle llama-8b",
    "meshmark reprot results",
    "make conformity",
    "torchrun suites",
    ". .venv/bin/actuate",
    "python -m benchmarks.biscet",
    "python examples/ray/none.py",
    'pip install "meshmark[htlm]"',
    "export MESHMARK_RDVZ_SECRET=1",
]


@pytest.fixture(scope="module")
def complaint(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By command, of every page and of wrong ones; in their order, for one may read what another wrote."""
    pages = [command for page in PAGES for command in commands_of(page.read_text())]
    pages += [command for name in docs_site.FRAMEWORKS for command in commands_of(docs_site.framework_page(name))]
    jobs = [command for path in JOBS for command in commands_of_job(path)]
    return complaints(list(dict.fromkeys([*pages, *jobs, *WRONG])), tmp_path_factory.mktemp("reader"))


COMMANDING = [page for page in PAGES if commands_of(page.read_text())]


def test_pages_that_teach_commands_are_read() -> None:
    teaching = {"README.md", "adapter.md", "tutorial.md", "ci.md", "planner.md", "compare.md"}
    assert teaching <= {page.name for page in COMMANDING}


@pytest.mark.slow
@pytest.mark.parametrize("page", COMMANDING, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_runs(page: Path, complaint: dict[str, str]) -> None:
    commands = commands_of(page.read_text())
    assert not {command: complaint[command] for command in commands if command in complaint}


@pytest.mark.slow
@pytest.mark.parametrize("name", docs_site.FRAMEWORKS)
def test_a_framework_s_page_shows_how_to_run_it_on_two_ranks(name: str, complaint: dict[str, str]) -> None:
    commands = commands_of(docs_site.framework_page(name))
    (adapter,) = [command.split()[3] for command in commands if command.endswith("--world 2")]
    assert "dp" in load_adapter(builtin_adapters()[adapter]).capabilities.degrees, "one rank alone is nothing to try"
    assert not {command: complaint[command] for command in commands if command in complaint}


@pytest.mark.slow
@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_every_command_of_a_job_runs(path: Path, complaint: dict[str, str]) -> None:
    commands = commands_of_job(path)
    assert commands and not {command: complaint[command] for command in commands if command in complaint}


@pytest.mark.slow
@pytest.mark.parametrize("command", WRONG)
def test_a_command_that_is_wrong_is_found(command: str, complaint: dict[str, str]) -> None:
    """The test above stands on this."""
    assert command in complaint


def test_every_option_of_a_page_is_one(tmp_path: Path) -> None:
    """Also where it is printed without its command."""
    verbs = (
        "doctor",
        "cases",
        "check",
        "report",
        "compare",
        "baseline accept",
        "ab",
        "bisect",
        "history",
        "plan",
        "predict",
        "calibrate",
        "submit",
    )
    slurm = {"--kill-on-bad-exit", "--no-kill", "--ntasks-per-node", "--requeue"}
    torchrun, pip = {"--max-restarts", "--rdzv-conf", "--standalone"}, {"--extra-index-url"}
    helps = [
        ["pytest", *CORE, "--help", str(ROOT / "suites")],
        *(["meshmark", *verb.split(), "--help"] for verb in verbs),
    ]
    known = set(re.findall(r"--[a-z][\w-]*", "\n".join(said for _, said in run(helps, tmp_path))))
    assert {"--world", "--junit-xml", "--schedules", "--baseline"} <= known
    printed = {option for page in PAGES for option in options_of(page.read_text())}
    assert "--corpus" in printed
    assert not printed - known - slurm - torchrun - pip


def test_commands_are_found_wherever_a_page_prints_them() -> None:
    page = """Say `make one`, not `two`, or `pytest
suites --co` with `--lf 1`:

    make three   # a comment
    srun -N2 pytest \\
        suites && meshmark doctor

    meshmark/    a folder

    ls

```sh
make four
```

```text
make five
what it prints
```
"""
    expected = ["make four", "make five", "make three", "srun -N2 pytest suites", "meshmark doctor", "ls", "make one"]
    assert commands_of(page) == [*expected, "pytest suites --co"]
    assert options_of(page) == {"--lf"}
