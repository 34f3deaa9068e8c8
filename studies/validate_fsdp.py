"""The planner against FSDP runs of GELU models at micro-batches that ran: llm-foundry's benchmark tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshmark.plan.layout_table import batches
from meshmark.plan.prediction import predict_grid
from meshmark.plan.rates import Rates
from meshmark.plan.rows import Row, number
from meshmark.plan.stacks import rates_for, stack_of
from meshmark.spec.hardware import gpu
from meshmark.theory.grid import Column
from meshmark.theory.recipe import recipe
from studies.papers import paper

FITTED_MODELS = frozenset({"MPT-1b", "MPT-7b"})
"""Whose rows composer's rates are fitted to."""


@dataclass(frozen=True, kw_only=True)
class Fits:
    """Columns over the table's rows."""

    fits: Column
    twice: Column
    """Whether twice the micro-batch would fit."""
    share: Column
    """Memory that is needed, as a share of what the allocator can have."""
    time_error: Column
    """Predicted over measured step time, less one."""


def mpt_rows() -> list[Row]:
    """The runs in bf16; fp8's products have no rate."""
    return [row for row in paper("mpt_fsdp_benchmarks") if "fp8" not in row["precision"]]


def mpt_fits(table: Sequence[Row], recipe_name: str) -> Fits:
    """Return the planner's predictions for `table`, with the rates that `meshmark plan` takes."""
    using = recipe(recipe_name)
    found = {field.name: np.zeros(len(table)) for field in dataclasses.fields(Fits)}
    for batch in batches(table):
        machine, grid = gpu(batch.gpu_name), batch.grid
        larger = dataclasses.replace(grid, micro_batch=2 * grid.micro_batch)
        given = rates_for(machine, stack_of(recipe_name))
        one, two = (predict_grid(batch.model, g, machine, using, given) for g in (grid, larger))
        rate = np.array([number(table[i], "tokens_per_s_per_gpu") for i in batch.rows])
        found["fits"][batch.rows] = one.fits
        found["twice"][batch.rows] = two.fits
        found["share"][batch.rows] = one.needed_bytes / one.available_bytes
        found["time_error"][batch.rows] = rate / one.tokens_per_second_per_gpu - 1.0
    return Fits(**found)


def mpt_time_ratios(table: Sequence[Row], given: Rates) -> Column:
    """Measured over predicted step time."""
    ratios = np.zeros(len(table))
    for batch in batches(table):
        found = predict_grid(batch.model, batch.grid, gpu(batch.gpu_name), recipe("fsdp-fused-loss"), given)
        rate = np.array([number(table[i], "tokens_per_s_per_gpu") for i in batch.rows])
        ratios[batch.rows] = found.tokens_per_second_per_gpu / rate
    return ratios


def fsdp_lines() -> list[str]:
    """One line a kind of GPU and recomputation."""
    table = mpt_rows()
    fused, plain = mpt_fits(table, "fsdp-fused-loss"), mpt_fits(table, "fsdp2")
    keys = [(row["gpu"], row["recompute"], _role(row)) for row in table]
    lines = ["## FSDP at micro-batches that ran (llm-foundry)", "", *_TEXT, ""]
    lines += [
        "| GPU | recomputation | role | rows | predicted to fit % | loss not fused % | twice as large % | "
        "of the memory, median % | time mean % | median % | bias % |",
        "|---" * 11 + "|",
    ]
    for key in sorted(set(keys)):
        rows = np.array([k == key for k in keys])
        fit, unfused, twice = (100 * float(c[rows].mean()) for c in (fused.fits, plain.fits, fused.twice))
        share, error = 100 * float(np.median(fused.share[rows])), 100 * fused.time_error[rows]
        lines.append(
            f"| {' | '.join(key)} | {rows.sum()} | {fit:.0f} | {unfused:.0f} | {twice:.0f} | {share:.0f} | "
            f"{np.abs(error).mean():.1f} | {np.median(np.abs(error)):.1f} | {error.mean():+.1f} |"
        )
    return lines


def _role(row: Row) -> str:
    return "fitted" if row["model"] in FITTED_MODELS else "held out"


_TEXT = [
    "Two numbers a GPU, the efficiency of matrix products and of attention (the first FlashAttention, in Triton), are",
    "fitted to the rows of MPT-1b and MPT-7b; the other sizes are held out, and all memory is. Each ran at its",
    "micro-batch, without recomputation mostly the largest that does; so all should be predicted to fit, and few with",
    "twice as much. Their loss is flash-attn's fused cross-entropy (`loss_fn` of llm-foundry's MPT): a logit is held",
    "in bf16 with its gradient, 4 bytes, where torch's own loss holds 14 (bf16, fp32, log-softmax, gradient). Planned",
    "so until it was a recipe of its own (`--framework composer`), a fifth of the rows on 40 GB were predicted to fit.",
]
