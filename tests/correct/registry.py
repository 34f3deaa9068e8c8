"""All correct engines by other hands, by the names that a launcher is given."""

from __future__ import annotations

import inspect

from meshmark.adapter.contract import Adapter
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.precision import Precision
from meshmark.spec.workload import workload
from tests.correct import ddp, forward, reduction, update

LAYOUT = Layout(dp=2, num_micro_batches=2)
"""Micro-batches of two rows, whose order can be another."""
PRECISIONS = (Precision.FP32, Precision.BF16, Precision.FP16)
_ENDS = ("DDP", "Hand")


def _engines() -> dict[str, str]:
    found = {}
    for module in (ddp, forward, reduction, update):
        for name, kind in vars(module).items():
            own = inspect.isclass(kind) and issubclass(kind, Adapter) and kind.__module__ == module.__name__
            if own and name.endswith(_ENDS) and name not in ("ByHand",):
                stem = next(name.removesuffix(end) for end in _ENDS if name.endswith(end))
                assert stem.lower() not in found, f"two engines are called {stem}"
                found[stem.lower()] = f"{module.__name__}:{name}"
    return found


ENGINES = _engines()


def cases() -> list[Case]:
    """Return every engine in every precision, on two ranks."""
    mini = workload("gpt-mini")
    return [Case(adapter=n, workload=mini, layout=LAYOUT, precision=p) for p in PRECISIONS for n in ENGINES]
