"""Small mutations of a framework's source: where they can be made, and how a process comes to run one.

Installed files are never changed. A rank compiles the mutated source and gives its functions that code; modules that it
imports later are compiled from the mutated source by an import hook.
"""

from __future__ import annotations

import ast
import copy
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

from benchmarks.reach.scope import SITE

_EXCLUDED = re.compile(
    r"\b(logger|logging|log_dist|print|print_rank_0|warnings?|warn\w*|record_function|_log_api|profil\w*|timers?|debug\w*"
    r"|see_memory_usage|nvtx\w*|instrument_w_nvtx|empty_cache|record_stream|wait_stream|prefetch\w*|trace\w*|gc)\b"
    r"|^assert\b|^raise\b",
)
"""Statements that print, time, profile, check or prefetch. They are not mutated."""

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One change of one node."""

    file: str
    """Below site-packages."""
    line: int
    """First line of the statement."""
    operator: str
    """comparison, arithmetic, boolean, constant, condition, deleted or swapped."""
    index: int
    """Which of the file's sites it is, in the order of `_sites`."""

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}:{self.operator}:{self.index}"


def mutations(file: str, lines: set[int], source: str | None = None) -> list[Mutation]:
    """Return every mutation of statements that begin on one of `lines`. `source`: the file's text, by default read."""
    text = (SITE / file).read_text() if source is None else source
    return [
        Mutation(file=file, line=statement.lineno, operator=operator, index=index)
        for index, (statement, operator, _) in enumerate(_sites(ast.parse(text)))
        if statement.lineno in lines
    ]


def change_of(mutation: Mutation, source: str | None = None) -> tuple[str, str]:
    """Return the mutated statement's code before and after, each in one line."""
    tree = ast.parse((SITE / mutation.file).read_text() if source is None else source)
    statement, _, change = list(_sites(tree))[mutation.index]
    before = _head(statement)
    change()
    return before, _head(statement)


def mutated(mutation: Mutation, source: str | None = None) -> ast.Module:
    """Return the module's tree with the mutation."""
    tree = ast.parse((SITE / mutation.file).read_text() if source is None else source)
    for index, (_, _, change) in enumerate(_sites(tree)):
        if index == mutation.index:
            change()
            return ast.fix_missing_locations(tree)
    raise ValueError(f"{mutation.name}: the installed file has no such place; was another version mutated?")


def _head(statement: ast.stmt) -> str:
    """Return a statement's code without the statements in it, in one line."""
    alone = copy.deepcopy(statement)
    for name in ("body", "orelse", "finalbody", "handlers"):
        if getattr(alone, name, None) and isinstance(getattr(alone, name), list):
            setattr(alone, name, [ast.Pass()] if name == "body" else [])
    return " ".join(ast.unparse(ast.fix_missing_locations(alone)).removesuffix("\n    pass").split())[:160]


Change = Callable[[], None]


def _sites(tree: ast.Module) -> Iterator[tuple[ast.stmt, str, Change]]:
    """Yield statement, operator and change of every site.

    All sites are listed before any change is made, so that a site's number is the same in every parsed copy.
    """
    found: list[tuple[ast.stmt, str, Change]] = []
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            found += _of_body(function.body)
    yield from found


def _of_body(body: list[ast.stmt]) -> list[tuple[ast.stmt, str, Change]]:
    found: list[tuple[ast.stmt, str, Change]] = []
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue  # walked by itself
        blocks = _inner_blocks(statement)
        excluded = _EXCLUDED.search(_head(statement)) is not None
        if not excluded:
            found += _of_statement(statement)
        if excluded and isinstance(statement, ast.If):
            continue  # such as `if self.debug:`
        for block in blocks:
            found += _of_body(block)
    return found


def _inner_blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    blocks = [getattr(statement, name) for name in ("body", "orelse", "finalbody") if getattr(statement, name, None)]
    return blocks + [handler.body for handler in getattr(statement, "handlers", [])]


def _of_statement(statement: ast.stmt) -> list[tuple[ast.stmt, str, Change]]:
    found: list[tuple[ast.stmt, str, Change]] = []
    for node in _expressions(statement):
        found += [(statement, operator, change) for operator, change in _of_expression(node)]
    if isinstance(statement, ast.If | ast.While):

        def negate(of: ast.If | ast.While = statement) -> None:
            of.test = ast.UnaryOp(op=ast.Not(), operand=of.test)

        found.append((statement, "condition", negate))
    deletable = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    deletable = deletable or isinstance(statement, ast.AugAssign)
    deletable = deletable or any(isinstance(target, ast.Attribute | ast.Subscript) for target in targets)
    if deletable:

        def delete(of: ast.stmt = statement) -> None:
            # In place, so that whoever holds the statement sees it: an expression without an effect.
            of.__class__ = ast.Expr  # type: ignore[assignment]
            of.value = ast.Constant(value=...)  # type: ignore[attr-defined]

        found.append((statement, "deleted", delete))
    return found


def _expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the nodes of a statement that belong to no statement in it, nor to a text."""
    inside = {"body", "orelse", "finalbody", "handlers"} if _inner_blocks(statement) else set()
    queue: list[ast.AST] = []
    for name, value in ast.iter_fields(statement):
        if name in inside or name in ("annotation", "returns", "type_comment"):
            continue
        queue += [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, ast.AST)]
    while queue:
        node = queue.pop(0)
        if isinstance(node, ast.JoinedStr | ast.Lambda):
            continue
        yield node
        queue += [child for child in ast.iter_child_nodes(node)]


def _of_expression(node: ast.AST) -> Iterator[tuple[str, Change]]:
    if isinstance(node, ast.Compare) and (other := _COMPARISONS.get(type(node.ops[0]))):

        def compare(of: ast.Compare = node, to: type[ast.cmpop] = other) -> None:
            of.ops[0] = to()

        yield "comparison", compare
    if isinstance(node, ast.BinOp) and (swapped := _ARITHMETIC.get(type(node.op))):

        def calculate(of: ast.BinOp = node, to: type[ast.operator] = swapped) -> None:
            of.op = to()

        yield "arithmetic", calculate
    if isinstance(node, ast.BoolOp):

        def combine(of: ast.BoolOp = node) -> None:
            of.op = ast.Or() if isinstance(of.op, ast.And) else ast.And()

        yield "boolean", combine
    if isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):

        def replace(of: ast.Constant = node) -> None:
            value = of.value
            if isinstance(value, bool):
                of.value = not value
            elif isinstance(value, int | float):
                of.value = value + 1

        yield "constant", replace
    if isinstance(node, ast.Call) and len(node.args) >= 2 and not any(isinstance(a, ast.Starred) for a in node.args):

        def swap(of: ast.Call = node) -> None:
            of.args[0], of.args[1] = of.args[1], of.args[0]

        yield "swapped", swap


# --- In the process that runs a mutant.


def install(mutation: Mutation) -> int:
    """Have this process run the mutation. Returns how many functions were changed; 0 where the module comes later."""
    tree = mutated(mutation)
    path = str(SITE / mutation.file)
    code = compile(tree, path, "exec")
    module = next((each for each in list(sys.modules.values()) if _file_of(each) == path), None)
    if module is None:
        sys.meta_path.insert(0, _Finder(path, code))
        return 0
    return _exchange(path, {(inner.co_qualname, inner.co_firstlineno): inner for inner in _functions(code)})


def _file_of(module: ModuleType | None) -> str:
    return str(getattr(module, "__file__", "") or "")


def _functions(code: CodeType) -> Iterator[CodeType]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner
            yield from _functions(inner)


def _exchange(path: str, new: dict[tuple[str, int], CodeType]) -> int:
    """Give every function of the file its new code, whoever holds it: a class, a closure or another module."""
    gc.unfreeze()  # the server froze its objects, which hides them
    changed = 0
    for found in gc.get_objects():
        if type(found) is not FunctionType or found.__code__.co_filename != path:
            continue
        other = new.get((found.__code__.co_qualname, found.__code__.co_firstlineno))
        if other is None or other == found.__code__ or len(other.co_freevars) != len(found.__code__.co_freevars):
            continue
        found.__code__ = other
        changed += 1
    gc.freeze()
    return changed


class _Finder(importlib.abc.MetaPathFinder):
    """Import hook for the one module that is mutated."""

    def __init__(self, path: str, code: CodeType) -> None:
        self._path, self._code = path, code

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if Path(self._path).stem not in (name.rpartition(".")[2], "__init__"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.origin != self._path:
            return None
        spec.loader = _Loader(name, self._path, self._code)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, code: CodeType) -> None:
        super().__init__(name, path)
        self._mutated = code

    def get_code(self, fullname: str) -> CodeType:
        return self._mutated
