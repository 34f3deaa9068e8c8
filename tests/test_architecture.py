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

from studies import architecture

ROOT = Path(__file__).parent.parent
CORE = ROOT / "meshmark"
FRAMEWORKS = {
    "deepspeed",
    "accelerate",
    "fairscale",
    "horovod",
    "megatron",
    "lightning",
    "pytorch_lightning",
    "torchtitan",
    "vllm",
    "bitsandbytes",
    "torchao",
    "torch_pruning",
}
MODELLING = {"transformers": {CORE / "reference" / "transformers_model.py", CORE / "inference" / "model.py"}}
"""Packages of models, and the modules of the core that import each, inside functions."""
MAX_ARGUMENTS = 6
TABLE_HELPERS = {"spec/hardware.py::_gpu"}
"""Functions that stand for one line of a table of data, and may take more."""

BASE = {"environment", "errors", "import_target", "rank_progress", "serial", "text"}
"""Modules that every folder may import."""
FRONT = {"__init__", "__main__", "moved", "user_workload"}
"""Modules that users name: the package, `python -m meshmark`, old names, and the class of a user's own workload."""
SLOW = {
    "sympy",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
}
"""Modules that take a second to import, for ranks alone."""
OUTSIDE = {"adapters", "suites"}
"""Real folders at the top of the checkout, linked into the package under one name."""

SCRIPTS = ROOT / "adapters" / "gaps"
"""Scripts that nothing imports: they show what frameworks get wrong, without Meshmark."""


def python_files(folder: str) -> list[Path]:
    """Return the Python files of a folder, without those behind the links of OUTSIDE and without SCRIPTS."""
    passed_over = {CORE / "adapters", CORE / "suites", SCRIPTS}
    return sorted(p for p in (ROOT / folder).rglob("*.py") if not passed_over.intersection(p.parents))


def folders() -> dict[str, set[str]]:
    """Each folder of the core, and those that its docstring says it may import: the tree itself tells the order."""
    found = {}
    for path in sorted(CORE.glob("*/__init__.py")):
        if path.parent.name not in OUTSIDE:
            last = (ast.get_docstring(parse(path)) or "").splitlines()[-1]
            assert (match := re.fullmatch(r"May import: (.*)\.", last)), (
                f"{path.parent.name}: no line «May import: ...»"
            )
            found[path.parent.name] = set(match[1].split(", ")) - {"nothing"}
    return found


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
    """Return the modules that importing a module imports, without those that its functions import when called."""

    class Remover(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:  # noqa: N802
            return ast.Pass()

    stripped = Remover().visit(ast.parse(ast.unparse(tree)))
    return set(imports_of(stripped))


def roots(names: Iterator[str] | set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def used_by(path: Path) -> set[str]:
    """Folders and modules of the core that `path` imports: `meshmark.theory.memory` belongs to theory.

    Imports that only type checkers see do not count: a contract may name the types of those who implement it.
    """
    units = {path.stem for path in CORE.iterdir()}
    seen = architecture.without_type_checking(parse(path))
    return {m.split(".")[1] for m in imports_of(seen) if m.startswith("meshmark.")} & units


@pytest.mark.parametrize("path", python_files("meshmark"), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_core_imports_no_framework_no_adapter_and_no_suite(path: Path) -> None:
    assert not roots(imports_of(parse(path))) & (FRAMEWORKS | {"adapters", "suites", "studies", "tests"})
    assert not used_by(path) & OUTSIDE


@pytest.mark.parametrize("package", MODELLING)
def test_a_package_of_models_is_imported_by_named_modules_inside_functions(package: str) -> None:
    users = {path for path in python_files("meshmark") if package in roots(imports_of(parse(path)))}
    assert users == MODELLING[package]
    assert not [path for path in users if package in roots(top_level_imports(parse(path)))]


@pytest.mark.parametrize("path", python_files("meshmark") + python_files("adapters"), ids=lambda p: p.name)
def test_nothing_is_mocked_outside_tests(path: Path) -> None:
    assert "unittest" not in roots(imports_of(parse(path)))


def test_every_module_of_the_core_stands_in_a_folder_or_is_named_here() -> None:
    assert {path.stem for path in CORE.glob("*.py")} == BASE | FRONT


def test_folders_may_import_without_a_circle() -> None:
    allowed, placed = folders(), set[str]()
    while ready := {name for name, may in allowed.items() if name not in placed and may <= placed}:
        placed |= ready
    assert placed == allowed.keys()


@pytest.mark.parametrize("name", sorted(folders()))
def test_a_folder_imports_what_its_docstring_says_alone(name: str) -> None:
    may = folders()[name]
    used: dict[str, list[str]] = {}
    for path in python_files(f"meshmark/{name}"):
        for other in used_by(path) - {name} - BASE:
            used.setdefault(other, []).append(path.name)
    assert used.keys() <= may, {other: used[other] for other in used.keys() - may}
    assert may <= used.keys(), f"{name} may import {sorted(may - used.keys())} and does not"


def test_base_modules_import_no_folder() -> None:
    for name in BASE:
        assert used_by(CORE / f"{name}.py") <= BASE


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
    importlib.import_module(f"meshmark.adapters.{file.stem}".removesuffix(".__init__"))
after_adapters = sorted(sys.modules)
import pytest
status = pytest.main(["suites", "--collect-only", "-q", "-p", "no:cacheprovider"])
print()
print(json.dumps([after_adapters, sorted(sys.modules), int(status)]))
"""


@pytest.fixture(scope="module")
def loaded() -> tuple[set[str], set[str], int]:
    """Modules in memory after importing every adapter, after collecting the suites; pytest's status."""
    run = subprocess.run([sys.executable, "-c", LOADED], cwd=ROOT, capture_output=True, text=True, check=True)
    adapters, suites, status = json.loads(run.stdout.splitlines()[-1])
    return set(adapters), set(suites), status


def test_importing_every_adapter_loads_no_framework(loaded: tuple[set[str], set[str], int]) -> None:
    assert {"meshmark.adapters.fsdp2", "torch"} <= loaded[0]
    assert not roots(loaded[0]) & FRAMEWORKS


def test_collecting_the_suites_loads_no_framework_and_of_pytorch_no_more_than_it_needs(
    loaded: tuple[set[str], set[str], int],
) -> None:
    """Modules that only ranks need take as long to import as all others together."""
    assert loaded[2] == 0
    assert "suites" in roots(loaded[1])
    assert not roots(loaded[1]) & (FRAMEWORKS | MODELLING.keys())
    assert not loaded[1] & SLOW


def test_asking_planning_and_reading_records_load_no_torch() -> None:
    """A planner must answer on a login node, and fast; a reader of records has no use for torch. `microbenchmarks` is
    what `calibrate` alone loads, when it measures; a family's `module` is what ranks build."""
    paths = [p for name in ("models", "spec", "theory", "plan") for p in python_files(f"meshmark/{name}")]
    with_torch = ("module", "microbenchmarks")
    names = [".".join(p.relative_to(ROOT).with_suffix("").parts) for p in paths if p.stem not in with_torch]
    names += ["meshmark.records.record", "meshmark.environment", "meshmark.cli.plan_run"]
    code = f"import sys, {', '.join(n.removesuffix('.__init__') for n in names)}; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_the_page_of_the_architecture_is_up_to_date() -> None:
    assert architecture.PAGE.read_text() == architecture.page(), "run `python -m studies.architecture`"


def test_the_page_of_the_architecture_answers_with_places_that_exist() -> None:
    places = [path for paths in architecture.QUESTIONS.values() for path in paths]
    assert len(architecture.QUESTIONS) >= 10
    assert [path for path in places if not (ROOT / path).exists()] == []


def test_the_picture_draws_no_arrow_that_follows_from_others() -> None:
    """But all of a circle, which should not be there."""
    graph = {"a": {"b", "c"}, "b": {"c"}, "c": set[str](), "d": {"a", "e"}, "e": {"d"}}
    assert architecture.drawn(graph) == [("a", "b"), ("b", "c"), ("d", "a"), ("d", "e"), ("e", "d")]


def num_arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of a call's arguments, without `self` and `cls`."""
    given = node.args
    named = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([n for n in named if n not in ("self", "cls")]) + bool(given.vararg) + bool(given.kwarg)


def test_functions_take_few_arguments() -> None:
    """More of them are a concept without a name."""
    wide = {
        f"{path.relative_to(root)}::{node.name}"
        for root, files in ((CORE, python_files("meshmark")), (ROOT, python_files("adapters")))
        for path in files
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and num_arguments(node) > MAX_ARGUMENTS
    }
    assert wide == TABLE_HELPERS


def tracked_files() -> list[Path]:
    """Return the files that git tracks or would track."""
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
