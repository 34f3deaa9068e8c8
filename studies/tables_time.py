"""Published tables of time and throughput."""

from __future__ import annotations

from collections.abc import Callable

from meshmark.models.transformer import gpt
from meshmark.plan.rates import rates
from meshmark.plan.rows import number
from meshmark.plan.simulator import simulate
from meshmark.spec.hardware import gpu
from meshmark.spec.layout import Layout, Schedule
from meshmark.theory.model_theory import hardware_flops_per_token, model_flops_per_token
from studies.papers import paper
from studies.published import TERA, korthikanti_table4, korthikanti_table5, megatron_flops, megatron_table1
from studies.table import Cell, Table
from studies.twins import gpipe_twin, megatron_twin
from studies.twins_calibrated import calibrated_twin


def gpipe_throughput() -> Table:
    """GPipe table 2: normalised throughput, simulated with equal stages."""
    rows = []
    for row in paper("gpipe_table2_normalized_throughput"):
        k, m = int(row["partitions_K"]), int(row["micro_batches_M"])
        base = _gpipe_seconds(2, 1)
        computed = base / _gpipe_seconds(k, m)
        rows.append(
            ((row["model"], str(k), str(m)), (Cell(published=number(row, "normalized_throughput"), computed=computed),))
        )
    return Table(
        title="GPipe table 2: normalised throughput",
        source="arXiv:1811.06965 table 2; Rostami's deck",
        formula="GPipe's schedule simulated with equal stages, one mini-batch in M parts: K M / (M + K - 1) over its "
        "value at K = 2, M = 1",
        labels=("model", "K", "M"),
        columns=("throughput",),
        rows=rows,
        notes=[
            "The planner's stages are equal and its batch is fixed. AmoebaNet's are not (the paper says so), and the",
            "paper adapts the batch to memory for each column, which it does not state: at K > 2 and M = 1 its",
            "throughput rises although nothing runs at the same time. These cells are reported, not explained away.",
        ],
        measured="the next table",
    )


def _gpipe_seconds(k: int, m: int) -> float:
    """Simulated time of one mini-batch of fixed size on a model of fixed size."""
    layout = Layout(pp=k, num_micro_batches=m, schedule=Schedule.GPIPE)
    return simulate(layout, [1.0 / k / m] * k).seconds


def megatron_weak_scaling() -> Table:
    """Megatron SC21 table 1."""
    given, rows = rates("a100"), []
    for row, run in zip(paper("megatron_sc21_table1_weak_scaling"), megatron_table1(), strict=True):
        spec = run.model
        flops = megatron_flops(int(row["global_batch"]), spec.seq_len, spec.num_layers, spec.hidden, spec.vocab_size)
        seconds = float(run.predict(given).step_seconds[0])
        tflops = flops / seconds / int(row["gpus"]) / TERA
        aggregate = number(row, "achieved_tflops_per_gpu") * int(row["gpus"]) / 1000.0
        cells = (
            Cell(published=number(row, "params_billion"), computed=spec.num_parameters / 1e9),
            Cell(published=number(row, "achieved_tflops_per_gpu"), computed=tflops),
            Cell(published=number(row, "percent_peak"), computed=100.0 * tflops / 312.0),
            Cell(published=number(row, "aggregate_pflops"), computed=aggregate),
        )
        rows.append(((row["gpus"], row["tp"], row["pp"]), cells))
    return Table(
        title="Megatron SC21 table 1: weak scaling",
        source="arXiv:2104.04473 table 1; Yuan's and the IDRIS decks",
        formula="the planner's step time with rates fitted to these rows (3 numbers); hardware FLOPs 96 B s L h^2 "
        "(1 + s/6h + V/16Lh) (eq. 3); the aggregate is the printed rate times the GPUs",
        labels=("gpus", "tp", "pp"),
        columns=("parameters 1e9", "TFLOP/s/gpu", "% of peak", "aggregate PFLOP/s"),
        rows=rows,
        measured="the next table",
    )


def megatron_days() -> Table:
    """Megatron SC21 table 2: days for 300B tokens from the printed rate."""
    rows = []
    for row in paper("megatron_sc21_table2_zero3_vs_ptdp"):
        per_batch = megatron_flops(1.0, *(number(row, c) for c in ("seq_len", "layers", "hidden", "vocab")))
        total = 300e9 / number(row, "seq_len") * per_batch
        days = total / (number(row, "achieved_tflops_per_gpu") * TERA * number(row, "gpus")) / 86400
        label = (row["scheme"], row["params_billion"], row["gpus"])
        rows.append((label, (Cell(published=number(row, "days_for_300B_tokens"), computed=days),)))
    return Table(
        title="Megatron SC21 table 2: days for 300B tokens",
        source="arXiv:2104.04473 table 2",
        formula="eq. 3's FLOPs of 300B tokens over the printed rate",
        labels=("scheme", "1e9", "gpus"),
        columns=("days",),
        rows=rows,
    )


def korthikanti_time() -> Table:
    """Korthikanti table 5."""
    given, rows = rates("a100"), []
    for row, run in zip(paper("korthikanti_table5_iteration_time"), korthikanti_table5(), strict=True):
        spec = gpt("k", int(row["layers"]), int(row["hidden"]), int(row["heads"]), vocab_size=int(row["vocab"]))
        tokens = int(row["global_batch"]) * int(row["seq_len"])
        rate = tokens / number(row, "iteration_time_s") / int(row["gpus"]) / gpu("a100").peak("fp16")
        model = 100.0 * rate * model_flops_per_token(spec, attention="full")
        hardware = 100.0 * rate * hardware_flops_per_token(spec, recompute=row["recompute"], attention="full")
        cells = (
            Cell(published=number(row, "iteration_time_s"), computed=float(run.predict(given).step_seconds[0])),
            _optional(number(row, "mfu_percent"), model),
            _optional(number(row, "hfu_percent"), hardware),
        )
        rows.append(((row["model"], row["recompute"], row["gpus"]), cells))
    return Table(
        title="Korthikanti table 5: iteration time",
        source="arXiv:2205.05198 table 5",
        formula="the planner's step time, rates fitted to Megatron SC21's table 1; MFU and HFU from the printed time "
        "by appendix A (full attention)",
        labels=("model", "recompute", "gpus"),
        columns=("seconds", "MFU %", "HFU %"),
        rows=rows,
    )


def korthikanti_layers() -> Table:
    """Korthikanti table 4."""
    found = korthikanti_table4(rates("a100"))
    base_real, base = number(found[0][0], "combined_ms"), 1e3 * found[0][1]
    rows: list[tuple[tuple[str, ...], tuple[Cell | None, ...]]] = []
    for row, seconds in found:
        real, computed = number(row, "combined_ms"), 1e3 * seconds
        times = Cell(published=real, computed=computed)
        over = Cell(published=100.0 * real / base_real, computed=100.0 * computed / base)
        rows.append(((row["experiment"], row["overhead_percent"]), (times, over if rows else None)))
    return Table(
        title="Korthikanti table 4: time of a layer",
        source="arXiv:2205.05198 table 4",
        formula="what a second layer adds to the planner's step time, rates fitted to Megatron SC21's table 1; the "
        "share of the baseline checks what recomputation and sequence parallelism cost apart from the rates",
        labels=("22B, one layer", "overhead as printed %"),
        columns=("forward + backward ms", "% of baseline"),
        rows=rows,
    )


def _optional(published: float, computed: float) -> Cell | None:
    return None if published != published else Cell(published=published, computed=computed)


def gossip_time() -> Table:
    """D-SGD communication time."""
    rows = []
    for row in paper("dsgd_comm_time"):
        n, size = number(row, "gpus"), number(row, "params_million") * 1e6 * 4.0
        bandwidth = 2.0 * size * (n - 1) / n / (number(row, "ring_allreduce_ms") / 1e3)
        exchange = size / bandwidth * 1e3
        rows.append(
            ((row["model"], row["gpus"]), (Cell(published=number(row, "partial_average_ms"), computed=exchange),))
        )
    return Table(
        title="Ring all-reduce against one-peer averaging",
        source="Chen et al., ICML 2021; Yuan's deck",
        formula="bandwidth from the printed ring all-reduce, 2 (n-1)/n of the gradients; a one-peer exchange moves "
        "them once. Bandwidth, topology and precision are not stated",
        labels=("model", "gpus"),
        columns=("partial averaging ms",),
        rows=rows,
    )


TIME_TABLES: list[Callable[[], Table]] = [
    gpipe_throughput,
    gpipe_twin,
    megatron_weak_scaling,
    megatron_twin,
    megatron_days,
    korthikanti_layers,
    korthikanti_time,
    gossip_time,
    calibrated_twin,
]
