"""The planner against the 1B and 8B sweep: fitted to one model, reported on the other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshmark.plan.layout_table import batches
from meshmark.plan.rates import Rates
from meshmark.theory.grid import Column
from studies.errors_of import Errors, errors_of
from studies.fit_sweep import Measured, fit_sweep, measured, measured_sweep, predict_measured
from studies.papers import paper

MEMORY_GOAL, TIME_GOAL, REGRET_MEDIAN_GOAL, REGRET_WORST_GOAL = 0.05, 0.08, 0.03, 0.10
SLOW = 0.6
"""A row is slow when its prediction is less than this share of what it took."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The layout that the planner would have chosen among those measured on one number of nodes."""

    model: str
    num_nodes: int
    chosen: str
    best: str
    regret: float
    """Share of the best measured throughput lost by the planner's choice among the rows that ran."""
    rule_regret: float
    """The same for the rule of thumb: the smallest tp x pp that ran, then the largest micro-batch."""
    chosen_stalled: bool
    slowdown: float
    """Measured over predicted step time of the choice."""
    first_choice_crashed: bool
    """The planner's choice among all rows, those that did not run included, is one that did not."""


@dataclass(frozen=True, kw_only=True)
class SweepReport:
    """One model's rows, predicted with rates fitted to the other."""

    fitted_to: str
    model: str
    rates: Rates
    time: Errors
    memory: Errors
    time_unstalled: Errors
    memory_unstalled: Errors
    num_stalled: int
    num_slow: int
    slow_time_share: float
    """Part of the mean error of time that slow rows add; the rest is that mean with theirs at zero."""
    slow_memory_share: float
    fits_table: dict[str, int]
    """Rows by whether they ran and whether they were predicted to fit."""
    choices: list[Choice]
    points: dict[str, tuple[Column, Column]]
    """Measured and predicted step seconds and memory bytes of the rows that ran, for the figure."""


def sweep_report(fitted_to: str, model: str) -> SweepReport:
    """Fit to one model's rows and report on another's."""
    rates = fit_sweep(measured_sweep(fitted_to), f"ultrascale_sweep_1b_8b, {fitted_to} rows that ran")
    table = [row for row in paper("ultrascale_sweep_1b_8b") if not row["flag"] and row["model"] == model]
    (batch,) = batches(table)
    rows = measured(batch, table)
    found = predict_measured(rows, rates)
    ran = np.array([row["status"] == "ok" for row in rows.rows])
    stalled = stalled_rows(rows, ran)
    time, memory, clear = found.step_seconds, found.memory.first_stage_bytes, ran & ~stalled
    slow = ran & (time < SLOW * np.nan_to_num(rows.step_seconds))
    return SweepReport(
        fitted_to=fitted_to,
        model=model,
        rates=rates,
        time=errors_of(time[ran], rows.step_seconds[ran], TIME_GOAL),
        memory=errors_of(memory[ran], rows.memory_bytes[ran], MEMORY_GOAL),
        time_unstalled=errors_of(time[clear], rows.step_seconds[clear], TIME_GOAL),
        memory_unstalled=errors_of(memory[clear], rows.memory_bytes[clear], MEMORY_GOAL),
        num_stalled=int(stalled.sum()),
        num_slow=int(slow.sum()),
        slow_time_share=_share(time, rows.step_seconds, slow, ran),
        slow_memory_share=_share(memory, rows.memory_bytes, slow, ran),
        fits_table={
            "ran, predicted to fit": int((ran & found.fits).sum()),
            "ran, predicted not to fit": int((ran & ~found.fits).sum()),
            "did not run, predicted to fit": int((~ran & found.fits).sum()),
            "did not run, predicted not to fit": int((~ran & ~found.fits).sum()),
        },
        points={
            "step seconds": (rows.step_seconds[ran], time[ran]),
            "memory bytes": (rows.memory_bytes[ran], memory[ran]),
        },
        choices=_choices(model, rows, ran, stalled, found.fits, found.tokens_per_second_per_gpu),
    )


def _share(predicted: Column, measured: Column, some: Column, known: Column) -> float:
    """Return the part that some rows add to the mean relative error of all known ones."""
    return float(np.abs(predicted[some] / measured[some] - 1.0).sum() / known.sum())


def stalled_rows(rows: Measured, ran: Column) -> Column:
    """Rows that another row of the same model, tp, pp and micro-batch proves to have stalled: at least four
    micro-batches, each of which took twice as long. Data parallelism and the ZeRO stage act once a step, so neither
    explains it. The planner has no part in this."""
    grid = rows.batch.grid
    per_batch = np.where(ran & (grid.num_micro_batches >= 4), rows.step_seconds / grid.num_micro_batches, np.nan)
    out = np.zeros(len(grid), dtype=bool)
    keys = np.stack([grid.tp, grid.pp, grid.micro_batch], axis=1)
    for key in np.unique(keys, axis=0):
        same = (keys == key).all(axis=1)
        known = per_batch[same & np.isfinite(per_batch)]
        if len(known):
            out |= same & (np.nan_to_num(per_batch) > 2.0 * known.min())
    return out


def _choices(model: str, rows: Measured, ran: Column, stalled: Column, fits: Column, predicted: Column) -> list[Choice]:
    """One choice a number of nodes; the global batch is the same in all rows."""
    grid = rows.batch.grid
    nodes = grid.num_gpus // 8
    rate = np.where(ran, 1.0 / rows.step_seconds, np.nan)
    measured_rate = rate * grid.global_batch * rows.batch.model.seq_len / grid.num_gpus
    out = []
    for count in np.unique(nodes):
        here = nodes == count
        allowed = here & fits & ran
        if not allowed.any():
            continue
        best = int(np.nanargmax(np.where(here, rate, np.nan)))
        chosen = int(np.argmax(np.where(allowed, predicted, -1.0)))
        freely = int(np.argmax(np.where(here & fits, predicted, -1.0)))
        model_parallel = grid.tp * grid.pp
        least = model_parallel[here & ran].min()
        thumb = int(np.argmax(np.where(here & ran & (model_parallel == least), grid.micro_batch, -1)))
        out.append(
            Choice(
                model=model,
                num_nodes=int(count),
                chosen=grid.layout(chosen).id,
                best=grid.layout(best).id,
                regret=float(1.0 - rate[chosen] / rate[best]),
                rule_regret=float(1.0 - rate[thumb] / rate[best]),
                chosen_stalled=bool(stalled[chosen]),
                slowdown=float(predicted[chosen] / measured_rate[chosen]),
                first_choice_crashed=not ran[freely],
            )
        )
    return out
