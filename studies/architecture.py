"""The page docs/architecture.md: the folders as they really import each other, in the words of their docstrings.

python -m studies.architecture
"""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
OUTER = ("adapters", "suites", "studies")
"""Folders at the top that use the core; the first two are links inside the package too."""
FRONT = "front"
"""The modules of the core outside its folders that bring these together: what users call."""
BASE = {"environment", "errors", "import_target", "rank_progress", "serial", "text"}
"""Modules that everyone may import; not drawn."""

QUESTIONS: dict[str, tuple[str, ...]] = {
    "support another framework": ("adapters/ddp.py", "adapters/__init__.py", "docs/adapter.md"),
    "keep an adapter in a package of my own": ("examples/meshmark-mine", "meshmark/adapter/registry.py"),
    "train a model of my own": ("docs/your-model.md", "examples/workloads", "meshmark/reference/own_model.py"),
    "add a model family": (
        "meshmark/models/resnet",
        "meshmark/models/config.py",
        "meshmark/models/module.py",
        "docs/usage.md",
    ),
    "add a workload, or a size of model": ("meshmark/spec/workload.py", "meshmark/models/transformer/__init__.py"),
    "change a model that everyone trains, or its data": (
        "meshmark/models/transformer/module.py",
        "meshmark/models/vision_transformer/module.py",
        "meshmark/reference/data.py",
    ),
    "change what a layout must hold, or send": ("meshmark/theory/memory.py", "meshmark/theory/traffic.py"),
    "let cases ask for a feature that an adapter may lack": ("meshmark/adapter/contract.py",),
    "change when a run counts as correct": ("meshmark/run/verdict.py", "meshmark/judge/tolerance_model.py"),
    "add an algorithm that is not synchronous": (
        "meshmark/spec/algorithm.py",
        "meshmark/algorithms/local_sgd",
        "tests/broken/algorithms",
        "docs/algorithms.md",
    ),
    "have a fault recognised and named": (
        "meshmark/judge/faults.py",
        "meshmark/judge/failed_step.py",
        "meshmark/judge/gradient_faults.py",
        "meshmark/judge/function_faults.py",
        "meshmark/judge/partial_faults.py",
        "meshmark/judge/update_faults.py",
        "meshmark/judge/update_hypotheses.py",
        "tests/broken",
    ),
    "add a clause to the conformance table": (
        "meshmark/conformance/clauses.py",
        "meshmark/conformance/judges.py",
        "meshmark/conformance/scenario.py",
        "tests/broken/clause_mutants.py",
        "tests/broken/options.py",
    ),
    "have ranks do something new": ("meshmark/records/request.py", "meshmark/passes", "meshmark/launch/rank.py"),
    "change how ranks are started and ended": (
        "meshmark/launch/launch.py",
        "meshmark/launch/watchdog.py",
    ),
    "change when a run counts as worse than another": (
        "meshmark/regression/times.py",
        "meshmark/regression/exact.py",
        "docs/compare.md",
    ),
    "put another column into the report": (
        "meshmark/report/sections.py",
        "meshmark/report/tables.py",
        "meshmark/report/communication.py",
        "docs/reading.md",
    ),
    "plan for another GPU": ("meshmark/spec/hardware.py", "meshmark/plan/rates"),
    "add an option to pytest's command line": ("meshmark/pytest_plugin/plugin.py",),
}
"""Questions of somebody who wants to change something, and the files that answer them."""


def folders() -> dict[str, Path]:
    """Name to place, the core's in the order of imports."""
    core = {path.parent.name: path.parent for path in (ROOT / "meshmark").glob("*/__init__.py")}
    found = {name: path for name, path in core.items() if name not in OUTER}
    return found | {name: ROOT / name for name in OUTER}


def files(place: Path) -> list[Path]:
    return sorted(place.rglob("*.py"))


def uses(path: Path) -> set[str]:
    """Folders, or the front, that the file at `path` imports of."""
    names = set()
    for node in ast.walk(without_type_checking(ast.parse(path.read_text(), str(path)))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    units = {parts[1] if parts[0] == "meshmark" else parts[0] for n in names if len(parts := n.split(".")) > 1}
    ours = {path.stem for path in (ROOT / "meshmark").glob("*.py")} - BASE - {"__init__"}
    return (units & folders().keys()) | ({FRONT} if units & ours else set())


def without_type_checking(tree: ast.Module) -> ast.Module:
    """Return the module without the `if TYPE_CHECKING:` blocks at its top level."""
    kept = [node for node in tree.body if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")]
    return ast.Module(body=kept, type_ignores=[])


def imports() -> dict[str, set[str]]:
    """Which folders each imports of, itself left out."""
    found = {name: set[str]().union(*map(uses, files(place))) - {name} for name, place in folders().items()}
    front = [path for path in (ROOT / "meshmark").glob("*.py") if path.stem not in BASE]
    return found | {FRONT: set[str]().union(*map(uses, front)) - {FRONT}}


def reach(graph: dict[str, set[str]], start: str) -> set[str]:
    """All that `start` stands on."""
    seen: set[str] = set()
    todo = set(graph[start])
    while todo:
        seen.add(name := todo.pop())
        todo |= graph[name] - seen
    return seen


def drawn(graph: dict[str, set[str]]) -> list[tuple[str, str]]:
    """The imports without those that follow from others: an arrow fewer for each way around."""
    below = {name: reach(graph, name) for name in graph}
    return [
        (name, used)
        for name, uses_ in graph.items()
        for used in sorted(uses_)
        if not any(used in below[other] and name not in below[other] for other in uses_ - {used})
    ]


def ordered(graph: dict[str, set[str]]) -> list[str]:
    """From the folder that stands on none to those that stand on all."""
    return sorted(graph, key=lambda name: (len(reach(graph, name)), name))


def paragraph(place: Path) -> str:
    """The docstring of the folder, without its last line if that says what it may import."""
    text = ast.get_docstring(ast.parse((place / "__init__.py").read_text())) or ""
    return text.partition("\n\nMay import:")[0].strip()


def shown(place: Path) -> str:
    return str(place.relative_to(ROOT))


def folder_section(name: str, graph: dict[str, set[str]]) -> str:
    if name == FRONT:
        where, text = (
            "meshmark/*.py",
            ast.get_docstring(ast.parse((ROOT / "meshmark" / "__init__.py").read_text())) or "",
        )
        text += " Its modules outside the folders are the class of a user's own workload, and those that every folder"
        text += " may import: "
        text = textwrap.fill(text + ", ".join(f"`{base}`" for base in sorted(BASE)) + ".", 120)
    else:
        where, text = shown(folders()[name]), paragraph(folders()[name])
    used = ", ".join(n for n in ordered(graph) if n in graph[name]) or "nothing"
    return f"### {where}\n\n{text}\n\nImports: {used}.\n"


def page() -> str:
    """The whole page."""
    graph = imports()
    arrows = "\n".join(f"    {name} --> {used}" for name, used in drawn(graph))
    sections = "\n".join(folder_section(name, graph) for name in ordered(graph))
    answers = "\n".join(
        f"- **{question}**: " + ", ".join(f"[`{path}`](../{path})" for path in paths)
        for question, paths in QUESTIONS.items()
    )
    return f"""# Architecture

Made by `python -m studies.architecture` from the imports and docstrings of the folders. To change this page, edit the
docstrings.

Data flows one way: case -> launch -> worker -> adapter and engine -> meters -> record -> verdict -> report. Imports
point one way as well, downward in this picture. An arrow is left out if a path of other arrows implies it.
`tests/test_architecture.py` checks every folder against the line «May import: ...» of its docstring.

```mermaid
graph TD
{arrows}
```

`{FRONT}` stands for the modules of `meshmark/` outside its folders. `adapters` and `suites` are folders at the top, and
symbolic links inside the package: they are imported only as `meshmark.adapters` and `meshmark.suites`.

## The folders, from the bottom up

{sections}
## Where would I ...

{answers}
"""


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
    print(PAGE.relative_to(ROOT))
