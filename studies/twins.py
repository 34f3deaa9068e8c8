"""Scaled-down twins of published tables: what `make twins` measured with real processes on CPU cores, beside the paper
and beside what the planner computes for the twin itself. Here the first number of a pair is the measured one.
"""

from __future__ import annotations

from pathlib import Path

from meshmark.models.transformer import ModelSpec, gpt
from meshmark.plan.prediction import Prediction, predict_grid
from meshmark.plan.rates import HostRates, KernelRates, NetworkRates, Rates
from meshmark.plan.rows import Row, number, read_rows
from meshmark.spec.hardware import gpu
from meshmark.spec.layout import Layout
from meshmark.theory.grid import make_grid
from meshmark.theory.memory import Overheads
from meshmark.theory.model_theory import model_flops_per_token
from meshmark.theory.recipe import recipe
from studies.papers import paper
from studies.table import Cell, Table

TWINS_DIR = Path(__file__).parents[1] / "baselines" / "twins"


def twin(name: str) -> list[Row]:
    """The measured rows of one twin. Raises `InputError` when they were not measured."""
    return read_rows(TWINS_DIR / f"{name}.csv")


def origin(rows: list[Row]) -> str:
    """Where and when the rows were measured."""
    row = rows[0]
    return (
        f"measured on {row['cores']} cores of {row['machine']}, torch {row['torch']}, commit {row['commit']}, "
        f"{row['date']}, by `{row['command']}`"
    )


def model_of(row: Row, hidden: int | None = None) -> ModelSpec:
    """The model of a row, or the same with another width."""
    return gpt(
        "twin",
        int(row["layers"]),
        hidden or int(row["hidden"]),
        int(row["heads"]),
        vocab_size=int(row["vocab"]),
        seq_len=int(row["seq_len"]),
        tied_embeddings=row.get("tied_embeddings") == "True",
    )


def shared_pipeline_seconds(stages: int, micro_batches: int, cores: int) -> float:
    """One mini-batch that takes one core one second, through GPipe's schedule of equal stages on `cores` cores.

    Forward and backward pass both cross the K x M grid of tasks diagonal by diagonal; a diagonal of w tasks takes one
    task's time, or w / cores of it where w stages share fewer cores. With a core a stage this is
    (M + K - 1) / (K M) (arXiv:1811.06965 sec. 2.3).
    """
    widths = (
        min(d + 1, stages, micro_batches, stages + micro_batches - 1 - d) for d in range(stages + micro_batches - 1)
    )
    return sum(max(1.0, width / cores) for width in widths) / (stages * micro_batches)


def gpipe_twin() -> Table:
    """GPipe table 2."""
    rows, published = twin("gpipe"), _published_throughput()
    found = {(int(r["partitions_K"]), int(r["micro_batches_M"])): r for r in rows}
    alone = {m: number(r, "step_seconds") for (k, m), r in found.items() if k == 1}
    base, out = number(found[2, 1], "step_seconds"), []
    for (k, m), row in found.items():
        seconds, cores = number(row, "step_seconds"), int(row["cores"])
        share = shared_pipeline_seconds(k, m, cores)
        plain = Cell(published=base / seconds, computed=shared_pipeline_seconds(2, 1, cores) / share)
        by_part = Cell(published=base / seconds, computed=alone[1] / (alone[m] * share)) if k > 1 else None
        label = (
            str(k),
            str(m),
            published.get((k, m), ""),
            _seconds_text(row),
            f"{k} stages on {cores} cores" if k > cores else "",
        )
        out.append((label, (plain, by_part)))
    first = rows[0]
    return Table(
        title="GPipe table 2, twin",
        source=f"arXiv:1811.06965 table 2 (Transformer-48); {origin(rows)}",
        formula="GPipe's schedule with equal stages, where more stages than cores share them; the second column takes "
        "what the model costs in one process that accumulates over as many micro-batches (K = 1, measured) in place of "
        "equal work",
        labels=("K", "M", "paper", "seconds, median (range)", "note"),
        columns=("throughput over K=2 M=1", "the same, micro-batches as measured at K=1"),
        rows=out,
        notes=[
            f"A GPT of {first['layers']} layers, {first['hidden']} wide, {first['seq_len']} tokens, one mini-batch of "
            f"{first['global_batch']} sequences, fp32, gloo; {first['samples']} steps each, configurations in turn.",
            f"Only K = 1 and 2 have a core each: K = 4 on {first['cores']} cores cannot be faster than "
            f"{first['cores']} stages are,",
            "and says what sharing costs, not what pipelining brings. At K = 2, M = 32 the closed form leaves out the",
            "hand-over: in a profile of such a step, a stage waited 0.23 of 0.98 s in gloo, of which the bubble is",
            "0.03: about 3 ms for each of 64 tasks, which take 4 ms (forward) and 14 ms (backward) themselves.",
        ],
    )


def _seconds_text(row: Row) -> str:
    median, low, high = (number(row, f"{name}_seconds") for name in ("step", "fastest", "slowest"))
    return f"{median:.3f} ({low:.3f} to {high:.3f})"


def _published_throughput() -> dict[tuple[int, int], str]:
    return {
        (int(row["partitions_K"]), int(row["micro_batches_M"])): row["normalized_throughput"]
        for row in paper("gpipe_table2_normalized_throughput")
        if row["model"].startswith("Transformer")
    }


def megatron_twin() -> Table:
    """Megatron SC21 table 1, rows without a pipeline."""
    rows, out = twin("megatron"), []
    base = rows[0]
    efficiency = _fitted_efficiency(base)
    sc21 = [number(row, "achieved_tflops_per_gpu") for row in paper("megatron_sc21_table1_weak_scaling")]
    fig5 = [row["weak_scaling_eff_mp_percent"] for row in paper("megatron2019_table1_config")]
    for i, row in enumerate(rows):
        measured = _rate_per_core(row, number(row, "step_seconds")) / _rate_per_core(base, number(base, "step_seconds"))
        planned = _rate_per_core(row, _planned_seconds(row, efficiency))
        planned /= _rate_per_core(base, _planned_seconds(base, efficiency))
        tp, cores = int(row["tp"]), int(row["cores"])
        label = (
            row["tp"],
            row["hidden"],
            row["layers"],
            f"{number(row, 'parameters') / 1e6:.1f}",
            f"{100 * sc21[i] / sc21[0]:.0f}",
            fig5[i],
            _seconds_text(row),
            f"{1e3 * number(row, 'all_reduce_seconds'):.2f}",
            f"{tp} ranks on {cores} cores" if tp > cores else "",
        )
        out.append((label, (Cell(published=100 * measured, computed=100 * planned) if tp > 1 else None,)))
    return Table(
        title="Megatron SC21 table 1, twin",
        source=f"arXiv:2104.04473 table 1, arXiv:1909.08053 fig. 5; {origin(rows)}",
        formula="the planner's step time with the rate of matrix products fitted to tp = 1 (1 number) and all-reduces "
        "as timed by themselves; where ranks share cores, its computation takes as many times longer",
        labels=(
            "tp",
            "hidden",
            "layers",
            "1e6",
            "paper SC21 %",
            "paper 2019 %",
            "seconds, median (range)",
            "one all-reduce ms",
            "note",
        ),
        columns=("weak scaling efficiency %",),
        rows=out,
        notes=[
            f"Hidden over 8 and layers over 6 of the paper's first rows, {base['global_batch']} sequences of "
            f"{base['seq_len']} tokens, fp32, megatron-core's layers over gloo. Efficiency is FLOP/s a core in use, "
            "over that of tp = 1.",
            "SC21's is per GPU, with full recomputation and 32 times the tokens a replica; its larger models reach",
            "more FLOP/s, hence more than 100. Only tp = 1 and 2 have a core a rank. The planner's all-reduce is one",
            "whose ranks arrive together; what waiting for the slower costs at each of four a layer is not measured.",
        ],
    )


def _rate_per_core(row: Row, seconds: float) -> float:
    """FLOP/s of a core in use."""
    model = model_of(row)
    flops = model_flops_per_token(model) * int(row["global_batch"]) * model.seq_len
    return flops / seconds / min(int(row["tp"]), int(row["cores"]))


def _predict(row: Row, efficiency: float) -> Prediction:
    layout = Layout(tp=int(row["tp"]))
    whole = int(row["global_batch"]) * int(row["seq_len"]) * int(row["hidden"]) * 4.0
    tp, one = layout.tp, number(row, "all_reduce_seconds") / 2.0  # an all-reduce is two collectives to the planner
    bandwidth = whole * (tp - 1) / tp / one if tp > 1 else 1.0
    given = Rates(
        name="bare",
        kernels=KernelRates(gemm_efficiency=efficiency, attention_efficiency=efficiency),
        network=NetworkRates(
            tp_latency_seconds=0.0, tp_bandwidth=bandwidth, tp_network_bandwidth=bandwidth, hop_seconds=0.0
        ),
        host=HostRates(step_seconds=0.0),
        memory=Overheads(),
    )
    return predict_grid(
        model_of(row), make_grid(tp=[tp], micro_batch=[int(row["global_batch"])]), gpu("cpu"), recipe("eager"), given
    )


def _planned_seconds(row: Row, efficiency: float) -> float:
    found = _predict(row, efficiency)
    exchanged = float(found.time.tensor_communication[0])
    shared = max(1.0, int(row["tp"]) / int(row["cores"]))
    return (float(found.step_seconds[0]) - exchanged) * shared + exchanged


def _fitted_efficiency(base: Row) -> float:
    """Share of the peak that makes the planner's tp = 1 take as long as was measured: a + c / efficiency."""
    whole, half = _planned_seconds(base, 1.0), _planned_seconds(base, 0.5)
    products = half - whole
    return products / (number(base, "step_seconds") - (whole - products))
