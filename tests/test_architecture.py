"""Who may import whom. Read from the source, and once from what a real process has loaded."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FRAMEWORKS = {"deepspeed", "accelerate", "fairscale", "megatron", "transformers", "lightning", "pytorch_lightning"}
MAX_LINES = 320

ORDER = """
    errors model_spec layout workload case
    serial device machine initial data model objective
    plan
    adapter registry
    trace truth yardstick faults gradient_faults update_faults diagnosis
    meters rank_report passes
    worker preload
    cluster launch
    session record
    verdict
    conformance
    scratch runner
    throughput report
    options expect plugin session_log cli __main__
""".split()
"""The modules and packages of the core, a stage a line: each may import only what stands before it. Values come first;
a launcher stands behind the worker because it names the function that its processes run. A new module gets a place."""


def python_files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports_of(node: ast.AST) -> Iterator[str]:
    """Modules that `node` and all inside it import; `from a import b` counts as a and a.b."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Import):
            yield from (alias.name for alias in inner.names)
        elif isinstance(inner, ast.ImportFrom):
            assert inner.level == 0, "imports are absolute here"
            yield inner.module or ""
            yield from (f"{inner.module}.{alias.name}" for alias in inner.names)


def top_level_imports(tree: ast.Module) -> set[str]:
    """What importing the module imports: all but what functions import when they are called."""

    class Remover(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:  # noqa: N802
            return ast.Pass()

    stripped = Remover().visit(ast.parse(ast.unparse(tree)))
    return set(imports_of(stripped))


def roots(names: Iterator[str] | set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def unit(module: str) -> str:
    """`meshmark.theory.states` belongs to plan."""
    return module.split(".")[1]


def core_units() -> set[str]:
    return {path.relative_to(ROOT / "meshmark").parts[0].removesuffix(".py") for path in python_files("meshmark")}


@pytest.mark.parametrize("path", python_files("meshmark"), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_core_imports_no_framework_no_adapter_and_no_suite(path: Path) -> None:
    forbidden = FRAMEWORKS | {"adapters", "suites", "tests"}
    assert not roots(imports_of(parse(path))) & forbidden


def test_every_module_of_the_core_has_a_place_in_the_order() -> None:
    assert core_units() - {"__init__"} == set(ORDER)
    assert len(ORDER) == len(set(ORDER))


@pytest.mark.parametrize("name", ORDER)
def test_no_stage_imports_a_later_one(name: str) -> None:
    folder = ROOT / "meshmark" / name
    paths = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    allowed = set(ORDER[: ORDER.index(name) + 1])
    for path in paths:
        # `from meshmark import report` reads meshmark and meshmark.report; only names that are modules count.
        used = {unit(m) for m in imports_of(parse(path)) if m.startswith("meshmark.")} & set(ORDER)
        assert used <= allowed, f"{path.name} imports {sorted(used - allowed)}, which stand after {name}"


@pytest.mark.parametrize("framework", sorted(FRAMEWORKS))
def test_a_framework_is_imported_by_one_file_or_folder_alone(framework: str) -> None:
    files = python_files("adapters") + python_files("suites") + [ROOT / "conftest.py"]
    users = {path for path in files if framework in roots(imports_of(parse(path)))}
    own = ROOT / "adapters" / framework
    assert users <= {own.with_suffix(".py"), *own.glob("*.py")}


@pytest.mark.parametrize("path", python_files("adapters"), ids=lambda p: p.name)
def test_an_adapter_imports_its_framework_inside_functions_alone(path: Path) -> None:
    assert not roots(top_level_imports(parse(path))) & FRAMEWORKS


def test_top_level_imports_see_class_bodies_and_branches_but_not_functions() -> None:
    """The test above stands on this."""
    source = "import a\nif x:\n    import b\nclass C:\n    import c\n    def f(self):\n        import d\n"
    assert top_level_imports(ast.parse(source)) == {"a", "b", "c"}


LOADED = """
import importlib, json, pathlib, sys
import meshmark.adapters
for file in sorted(pathlib.Path("adapters").glob("*.py")):
    importlib.import_module(f"adapters.{file.stem}".removesuffix(".__init__"))
after_adapters = sorted({name.partition(".")[0] for name in sys.modules})
import pytest
status = pytest.main(["suites", "--collect-only", "-q", "-p", "no:cacheprovider"])
print()
print(json.dumps([after_adapters, sorted({name.partition(".")[0] for name in sys.modules}), int(status)]))
"""


@pytest.fixture(scope="module")
def loaded() -> list:
    """Top-level packages in memory after importing every adapter, after collecting the suites; pytest's status."""
    run = subprocess.run([sys.executable, "-c", LOADED], cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def test_importing_every_adapter_loads_no_framework(loaded: list) -> None:
    assert {"adapters", "torch"} <= set(loaded[0])
    assert not set(loaded[0]) & FRAMEWORKS


def test_collecting_the_suites_loads_no_framework(loaded: list) -> None:
    assert loaded[2] == 0
    assert "suites" in loaded[1]
    assert not set(loaded[1]) & FRAMEWORKS


def test_the_planner_loads_no_torch() -> None:
    """A planner must answer on a login node, and fast. `measure` is what `calibrate` alone loads, when it measures."""
    names = [path.stem for path in python_files("meshmark/plan")]
    modules = [f"meshmark.plan.{name}" for name in names if name not in ("__init__", "measure")]
    code = f"import sys, {', '.join(modules)}; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


@pytest.mark.parametrize("path", python_files("meshmark") + python_files("adapters"), ids=lambda p: p.name)
def test_files_stay_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


def tracked_files() -> list[Path]:
    """What git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


@pytest.mark.parametrize(
    "what, pattern",
    [
        ("an absolute path of one machine", r"(?<![\w.~-])/(?:work|root|home/\w+|tmp/w)/"),
        ("a package registry", r"pypi" + r"\.org|pythonhosted" + r"\.org|download\.pytorch" + r"\.org|--index-url"),
    ],
)
def test_no_file_names(what: str, pattern: str) -> None:
    """A clone must work anywhere, with whatever index pip is set up for."""
    own = Path(__file__)
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in tracked_files()
        if path != own and (match := re.search(pattern, path.read_text(errors="ignore")))
    ]
    assert not found, f"{what} in {found}"
