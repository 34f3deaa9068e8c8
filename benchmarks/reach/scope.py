"""The modules of each framework whose lines are counted, and how their statements are told apart.

Only statements in functions count. Statements that run at import would be executed by anyone who imports the framework.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

SITE = Path(sysconfig.get_paths()["purelib"])

MODULES: dict[str, tuple[str, ...]] = {
    "PyTorch": (
        "torch/nn/parallel/distributed.py",
        "torch/distributed/fsdp/_fully_shard",
        "torch/distributed/fsdp",
        "torch/distributed/pipelining",
        "torch/distributed/tensor/parallel",
        "torch/distributed/checkpoint",
        "torch/distributed/optim/zero_redundancy_optimizer.py",
    ),
    "DeepSpeed": (
        "deepspeed/runtime/engine.py",
        "deepspeed/runtime/bf16_optimizer.py",
        "deepspeed/runtime/lr_schedules.py",
        "deepspeed/runtime/torch_autocast.py",
        "deepspeed/runtime/zero",
        "deepspeed/runtime/pipe",
        "deepspeed/runtime/fp16",
        "deepspeed/runtime/activation_checkpointing",
        "deepspeed/sequence",
    ),
    "Megatron": (
        "megatron/core/distributed",
        "megatron/core/optimizer",
        "megatron/core/pipeline_parallel",
        "megatron/core/tensor_parallel",
        "megatron/core/dist_checkpointing",
    ),
    "Accelerate": (
        "accelerate/accelerator.py",
        "accelerate/optimizer.py",
        "accelerate/scheduler.py",
        "accelerate/data_loader.py",
        "accelerate/utils/fsdp_utils.py",
        "accelerate/utils/deepspeed.py",
    ),
    "FairScale": ("fairscale/nn/data_parallel", "fairscale/optim"),
    "Fabric": ("lightning_fabric/strategies", "lightning_fabric/plugins/precision"),
}
"""Files and folders below site-packages. A file belongs to the first entry that holds it."""

DISTRIBUTIONS = {
    "PyTorch": "torch",
    "DeepSpeed": "deepspeed",
    "Megatron": "megatron-core",
    "Accelerate": "accelerate",
    "FairScale": "fairscale",
    "Fabric": "lightning-fabric",
}
"""Names under which the frameworks are installed."""

_ACCELERATOR = re.compile(
    r"cuda|nccl|\bxla|xla_|_xla|\bxpu|\bhpu|\bnpu\b|\bmps\b|\bmlu\b|musa|tpu|\bhip\b|triton|transformer_engine|"
    r"\bte_|\bTE[A-Z]|\bHAVE_TE|is_te_|apex|bitsandbytes|\bbnb\b|multi_tensor_appl|nvtx|fp8|mxfp|symm_mem",
    re.IGNORECASE,
)
"""Names of hardware, and of packages that need it. A statement that is not executed and that has one of them in its
condition, its function's name, its file's name or its own call counts as CUDA-only."""


@dataclass(frozen=True, kw_only=True)
class Statements:
    """The statements in functions of one file, each named by its first line."""

    lines: frozenset[int]
    """All of them."""
    accelerator: frozenset[int]
    """Those that need an accelerator, by the rule of `_ACCELERATOR`."""
    first_line: dict[int, int]
    """First line of the statement that a line belongs to."""

    def executed(self, lines: frozenset[int] | set[int]) -> set[int]:
        """Return the statements that `lines`, as a tracer reports them, belong to."""
        return {self.first_line.get(line, line) for line in lines} & self.lines


def files(entry: str) -> list[str]:
    """Return the Python files of an entry of `MODULES`, relative to site-packages, without those of entries before."""
    before: list[str] = []
    for entries in MODULES.values():
        for other in entries:
            if other == entry:
                return [
                    str(file.relative_to(SITE))
                    for file in _python_files(SITE / entry)
                    if not any(file.is_relative_to(SITE / earlier) for earlier in before)
                    and not file.name.startswith("test")
                ]
            before.append(other)
    raise KeyError(entry)


def _python_files(path: Path) -> list[Path]:
    return [path] if path.suffix == ".py" else sorted(path.rglob("*.py"))


def framework_of(file: str) -> str:
    """Return the framework that a file below site-packages belongs to."""
    return next(name for name, entries in MODULES.items() if any(file.startswith(entry) for entry in entries))


@functools.cache
def statements(file: str) -> Statements:
    """Return the statements of a file below site-packages."""
    return statements_of((SITE / file).read_text(), file)


def statements_of(source: str, file: str) -> Statements:
    """Return the statements of `source`. `file`: its path, whose name can say that it needs an accelerator."""
    tree = ast.parse(source)
    first_line = dict(_first_lines(tree))
    lines = {first_line.get(line, line) for line in _function_lines(compile(source, file, "exec"))}
    needs = set(_accelerator_lines(tree.body, bool(_ACCELERATOR.search(Path(file).name))))
    return Statements(lines=frozenset(lines), accelerator=frozenset(needs & lines), first_line=first_line)


def _first_lines(tree: ast.AST) -> Iterator[tuple[int, int]]:
    """Map every line of a statement, or of a compound statement's head, to the first. Inner statements come later."""
    for node in ast.walk(tree):  # breadth first, so that an inner statement overwrites what an outer one says
        if isinstance(node, ast.stmt):
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                yield line, node.lineno


def _function_lines(code: CodeType) -> Iterator[int]:
    """Yield the lines of all functions in `code` that a tracer can report."""
    for inner in code.co_consts:
        if not isinstance(inner, CodeType):
            continue
        if inner.co_flags & inspect.CO_NEWLOCALS and inner.co_flags & inspect.CO_OPTIMIZED:
            lines = {line for _, line in dis.findlinestarts(inner) if line}
            # A function's first instruction is on the line of its `def`, and is reported as a call.
            yield from lines - {inner.co_firstlineno} or (lines if inner.co_name.startswith("<") else ())
        yield from _function_lines(inner)


def _accelerator_lines(body: list[ast.stmt], needs: bool) -> Iterator[int]:
    """Yield first lines of statements that need an accelerator. `needs`: whether what holds `body` does."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _accelerator_lines(node.body, needs or bool(_ACCELERATOR.search(node.name)))
            continue
        if needs or (not _blocks(node) and _ACCELERATOR.search(_code_of(node))):
            yield node.lineno
        positive, negative = needs, needs
        if isinstance(node, ast.If | ast.While):
            test = _code_of(node.test)
            if _ACCELERATOR.search(test):
                on_cpu = bool(re.search(r"\bnot\b|!=|is None|\bcpu\b", test))
                positive, negative = needs or not on_cpu, needs or on_cpu
        for name, block in _blocks(node):
            yield from _accelerator_lines(block, negative if name == "orelse" else positive)


def _blocks(node: ast.stmt) -> list[tuple[str, list[ast.stmt]]]:
    blocks = [(name, getattr(node, name)) for name in ("body", "orelse", "finalbody") if getattr(node, name, None)]
    blocks += [("body", handler.body) for handler in getattr(node, "handlers", [])]
    return blocks + [("body", case.body) for case in getattr(node, "cases", [])]


def _code_of(node: ast.AST) -> str:
    """Return the source of `node` without its texts, which may only mention an accelerator."""

    class Textless(ast.NodeTransformer):
        def visit_JoinedStr(self, found: ast.JoinedStr) -> ast.AST:  # noqa: N802
            return ast.copy_location(ast.Constant(""), found)

        def visit_Constant(self, found: ast.Constant) -> ast.AST:  # noqa: N802
            long = isinstance(found.value, str) and len(found.value) > 12
            return ast.copy_location(ast.Constant(""), found) if long else found

    if not isinstance(node, ast.stmt):
        return ast.unparse(node)
    return ast.unparse(Textless().visit(ast.parse(ast.unparse(node))))


def as_ranges(lines: set[int] | frozenset[int]) -> str:
    """Return lines as text: `3-7,9`."""
    found: list[list[int]] = []
    for line in sorted(lines):
        if found and line == found[-1][1] + 1:
            found[-1][1] = line
        else:
            found.append([line, line])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def of_ranges(text: str) -> set[int]:
    """Return the lines that `as_ranges` wrote."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
