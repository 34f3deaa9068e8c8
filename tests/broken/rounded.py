"""Every adapter with an allocator that hands out blocks of 512 bytes, as CUDA's does: `tests.broken.rounded:ddp`."""

from __future__ import annotations

import dataclasses

from meshmark.adapter.contract import Adapter
from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.measure.allocations import Change
from meshmark.measure.meters import Watch
from meshmark.spec.case import Case

BLOCK = 512


def rounded(changes: list[Change]) -> list[Change]:
    """Each allocation as large as its blocks, and counts that add up to them."""
    found, more = list[Change](), 0
    for change in changes:
        size = -(-abs(change.num_bytes) // BLOCK) * BLOCK
        more += (size - abs(change.num_bytes)) * (1 if change.num_bytes > 0 else -1)
        sign = 1 if change.num_bytes > 0 else -1
        found.append(dataclasses.replace(change, num_bytes=sign * size, total_bytes=change.total_bytes + more))
    return found


def __getattr__(name: str) -> type[Adapter]:
    """The adapter of this name (with _ for -), in blocks."""
    known = builtin_adapters()
    adapter = load_adapter(known[name.replace("_", "-")]) if name.replace("_", "-") in known else None
    if adapter is None:
        raise AttributeError(name)

    def build(self: Adapter, case: Case, context: RankContext) -> Engine:
        exact = Watch.changes
        Watch.changes = lambda watch: rounded(exact(watch))  # type: ignore[method-assign]
        engine: Engine = adapter.build(self, case, context)
        return engine

    return type(adapter.__name__, (adapter,), {"build": build, "__module__": __name__, "__qualname__": name})
