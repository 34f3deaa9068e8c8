"""Formulas on the pages of frameworks: those of the papers, and none where numbers are of another form."""

from __future__ import annotations

import pytest

from meshmark.adapter.registry import builtin_adapters, load_adapter
from studies.docs_formulas import OTHER, formula_rows, ring, sharded


def test_formulas_are_those_of_the_papers() -> None:
    """DDP holds 4 + 4 + 8 bytes and sends 2 of gradients; ZeRO-3 shards all of it and sends 3 (arXiv:1910.02054)."""
    names = ("ddp", "fsdp2", "gpipe")
    rows = formula_rows({name: load_adapter(builtin_adapters()[name]) for name in names})
    states = ("adapter", "ZeRO", "parameters", "gradients", "optimizer states", "sent")
    assert [tuple(row[key] for key in states) for row in rows] == [
        ("ddp", 0, "4", "4", "8", "2 (d-1)/d"),
        ("fsdp2", 3, "4/d", "4/d", "8/d", "3 (d-1)/d"),
    ]


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({2: 6.0, 4: 5.0, 8: 4.5}, "4 + 4/d"),
        ({2: 0.0, 4: 0.0, 8: 0.0}, "0"),
        ({2: 6.0, 4: 5.0, 8: 4.0}, OTHER),
        ({2: 6.0, 4: 5.0}, OTHER),
        ({2: 2.8, 4: 1.8, 8: 1.3}, OTHER),
    ],
)
def test_a_formula_is_stated_only_if_it_gives_all_numbers(values: dict[int, float], found: str) -> None:
    assert sharded(values) == found


def test_traffic_that_is_no_ring_has_no_formula() -> None:
    assert ring({2: 1.0, 4: 1.5, 8: 1.75}) == "2 (d-1)/d"
    assert ring({2: 1.0, 4: 1.0, 8: 1.0}) == OTHER
    assert ring({2: 1.42, 4: 2.13, 8: 2.485}) == OTHER  # 2.84 times what an all-gather sends: of this model
