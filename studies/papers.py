"""The published tables under baselines/papers/, as columns of text; a row's `source` says where it comes from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from meshmark.errors import UnknownNameError
from meshmark.plan.rows import Row, read_rows

PAPERS_DIR = Path(__file__).parents[1] / "baselines" / "papers"

FITTED = frozenset(
    {"megatron_sc21_table1_weak_scaling", "mpt_fsdp_benchmarks", "nemo_h100_bf16", "ultrascale_sweep_1b_8b"}
)
"""Tables that rates are fitted to; the others are for validation."""
SPREAD = FITTED | {
    "bloom_topology_sweep",
    "korthikanti_table5_iteration_time",
    "megatron_sc21_table2_zero3_vs_ptdp",
    "torchtitan_performance",
}
"""Tables that the width of intervals is taken from, and no rate."""
_FITTING: list[frozenset[str]] = []


@contextlib.contextmanager
def fitting(tables: frozenset[str] = FITTED) -> Iterator[None]:
    """Within this, no other tables can be read."""
    _FITTING.append(tables)
    try:
        yield
    finally:
        _FITTING.pop()


def paper(name: str) -> list[Row]:
    """The rows of one published table. Raises `UnknownNameError` when there is none of that name."""
    if _FITTING and name not in _FITTING[-1]:
        others = ", ".join(sorted(_FITTING[-1]))
        raise ValueError(f"{name} is for validation: nothing is fitted to it, only to {others}")
    known = {path.stem: path for path in PAPERS_DIR.glob("*.csv")}
    if name not in known:
        raise UnknownNameError("published table", name, known)
    return read_rows(known[name])
