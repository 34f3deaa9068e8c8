"""All correct engines by other hands, by the names that a launcher is given."""

from __future__ import annotations

import importlib
import inspect

from meshmark.adapter.contract import Adapter
from meshmark.adapter.registry import load_adapter
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.precision import Precision
from meshmark.spec.workload import workload

LAYOUT = Layout(dp=2, num_micro_batches=2)
"""Micro-batches of two rows, whose order can be another."""
PRECISIONS = (Precision.FP32, Precision.BF16, Precision.FP16)
_MODULES = ("ddp", "forward", "reduction", "update", "sharded")
_ENDS = ("DDP", "Hand")
"""Ends of the names of adapters; `ByHand` is the base of some."""


def _engines() -> dict[str, str]:
    found: dict[str, str] = {}
    for module in (importlib.import_module(f"tests.correct.{name}") for name in _MODULES):
        for name, kind in vars(module).items():
            own = inspect.isclass(kind) and issubclass(kind, Adapter) and kind.__module__ == module.__name__
            if own and name.endswith(_ENDS) and name != "ByHand":
                stem = next(name.removesuffix(end) for end in _ENDS if name.endswith(end)).lower()
                assert stem not in found, f"two engines are called {stem}"
                found[stem] = f"{module.__name__}:{name}"
    return found


ENGINES = _engines()


def cases() -> list[Case]:
    """Return every engine in every precision, on two ranks."""
    mini = workload("gpt-mini")
    layouts = {name: getattr(load_adapter(target), "layout", LAYOUT) for name, target in ENGINES.items()}
    return [
        Case(adapter=name, workload=mini, layout=layout, precision=precision)
        for precision in PRECISIONS
        for name, layout in layouts.items()
    ]
