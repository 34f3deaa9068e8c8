"""Published tables of sizes and memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from meshmark.models.transformer import gpt
from meshmark.plan.rows import Row, number
from meshmark.spec.hardware import GIB
from meshmark.spec.layout import Recompute
from meshmark.theory.activations import layer_activation_bytes
from meshmark.theory.grid import RECOMPUTES, make_grid
from meshmark.theory.memory import state_bytes
from meshmark.theory.recipe import recipe
from studies.papers import paper
from studies.table import Cell, Table
from studies.tables_models import (
    GB,
    gpt3_models,
    llama_models,
    llama_parameters,
    megatron2019,
    transformer_parameters,
)
from studies.twins_memory import activations_twin, zero_twin


def zero_states() -> Table:
    """ZeRO table 1."""
    rows = []
    for row in paper("zero_table1_mem_per_device"):
        grid = make_grid(dp=[int(row["dp"])], zero_stage=[int(row["zero_stage"])])
        states = state_bytes(np.array([float(row["params"])]), grid, recipe("zero"))
        total = sum(float(states[name][0]) for name in ("parameters", "gradients", "optimizer"))
        label = (row["model"], row["stage"], row["dp"])
        rows.append((label, (Cell(published=number(row, "mem_per_device_gb"), computed=total / GB),)))
    return Table(
        title="ZeRO table 1: model states per device",
        source="arXiv:1910.02054 table 1",
        formula="2P + 2P + 12P bytes, divided by stage (sec. 5.1 to 5.3)",
        labels=("model", "stage", "dp"),
        columns=("GB",),
        rows=rows,
    )


def zero_maximum() -> Table:
    """ZeRO table 2: the largest model whose states fill 32 GB."""
    rows = []
    stages = {"baseline": 0, "Pos": 1, "Pos_g": 2, "Pos_g_p": 3}
    for row in paper("zero_table2_max_model_size"):
        cells: list[Cell | None] = []
        for name, stage in stages.items():
            grid = make_grid(dp=[int(row["dp"])], zero_stage=[stage], tp=[int(row["mp"])])
            one = state_bytes(np.array([1.0 / int(row["mp"])]), grid, recipe("zero"))
            each = sum(float(one[c][0]) for c in ("parameters", "gradients", "optimizer"))
            size = number(row, "gpu_mem_gb") * GB / each / GB
            cells.append(Cell(published=number(row, f"theory_{name}_billion"), computed=size))
        for name in ("measured_baseline_billion", "measured_ZeRO_DP_Pos_billion"):
            cells.append(Cell(published=number(row, name), computed=cells[0 if "baseline" in name else 1].computed))  # type: ignore[union-attr]
        rows.append(((row["mp"], row["gpus"]), tuple(cells)))
    return Table(
        title="ZeRO table 2: largest model",
        source="arXiv:1910.02054 table 2; Rostami's deck",
        formula="32 GB x MP over the bytes a parameter of each stage; the two measured columns hold activations and "
        "buffers too, which the source does not size, so theory exceeds them",
        labels=("MP", "gpus"),
        columns=("baseline", "os", "os+g", "os+g+p", "measured baseline", "measured os"),
        rows=rows,
        measured="the next table",
    )


def gpipe_maximum() -> Table:
    """GPipe table 1: parameters and their memory."""
    rows = []
    for row in paper("gpipe_table1_max_model_size"):
        published, held = number(row, "param_memory_gb"), number(row, "peak_activation_memory_gb")
        computed = 12.0 * number(row, "params") / GIB
        swapped = row["model"] == "Transformer-L" and row["scheme"] == "Naive-1"
        flag = ""
        if swapped:
            flag = f"parameter and activation cells are swapped: 12 B x 282.2M is {computed:.2f} GiB, printed as "
            flag += f"activations ({held})"
        elif abs(computed / published - 1.0) > 0.1:
            flag = f"12 B x {row['params']} parameters are {computed:.2f} GiB: more than rounding apart"
        rough = "" if row["model"] == "Transformer-L" else "rounded parameters"
        cells: tuple[Cell | None, ...] = (
            Cell(published=published, computed=computed, flagged=flag),
            transformer_parameters(row),
        )
        rows.append(((row["model"], row["scheme"], row["layers_L"], rough), cells))
    return Table(
        title="GPipe table 1: largest model",
        source="arXiv:1811.06965 table 1; Rostami's deck",
        formula="12 bytes a parameter (RMSProp, the paper's caption), in GiB; parameters of Transformer-L as "
        "(4 d^2 + 2 d d_ff) L + 2 V d, head and embedding apart",
        labels=("model", "scheme", "L", "note"),
        columns=("parameter memory GiB", "parameters (1e6)"),
        rows=rows,
        notes=["Peak activations depend on the micro-batches, which the source does not state: not computed."],
    )


def activations_10b() -> Table:
    """Krishnamurthy's activation memory."""
    spec = gpt("deck-10b", 48, 4096, 32, seq_len=1024)
    rows = []
    for row in paper("activation_10b_vs_batch"):
        grid = make_grid(micro_batch=[int(row["batch_size"])])
        held = spec.num_layers * layer_activation_bytes(spec, grid, recipe("mixed20"))
        cell = Cell(published=number(row, "activation_memory_gb"), computed=float(np.floor(held[0] / GB)))
        rows.append(((row["batch_size"],), (cell,)))
    return Table(
        title="Activations of a 10B model by batch",
        source="Krishnamurthy's deck, citing arXiv:2205.05198",
        formula="s b h L (34 + 5as/h) (arXiv:2205.05198 eq. 2), floor to GB; 48 layers of 4096 with 32 heads and 1024 "
        "tokens are inferred",
        labels=("batch",),
        columns=("GB",),
        rows=rows,
        measured="the next table",
    )


def korthikanti_memory() -> Table:
    """Korthikanti figures 1 and 7 (analytic themselves)."""
    shapes = {r["model"]: r for r in paper("korthikanti_table3_configs")}
    rows = []
    for row in paper("korthikanti_fig1_fig7_memory"):
        shape = shapes[row["model"]]
        computed = _korthikanti(row["quantity"], shape)
        label = (row["figure"], row["model"], row["quantity"])
        rows.append((label, (Cell(published=number(row, "value"), computed=computed),)))
    return Table(
        title="Korthikanti figures 1 and 7",
        source="arXiv:2205.05198 as encoded in Calculon's validation",
        formula="table 2's bytes a layer x L (1 + (p-1)/(pm)); 18 bytes x 12 L h^2 / (tp). Figure 1 is this formula, "
        "so it checks the code and validates nothing",
        labels=("figure", "model", "quantity"),
        columns=("value",),
        rows=rows,
    )


def _korthikanti(quantity: str, shape: Row) -> float:
    tp, pp, m = int(shape["tp"]), int(shape["pp"]), int(shape["interleave_m"])
    layers, hidden = int(shape["layers"]), int(shape["hidden"])
    if "optimizer" in quantity:
        return 18.0 * 12.0 * layers * hidden**2 / (tp * pp) / GIB
    spec = gpt("k", layers, hidden, int(shape["heads"]), vocab_size=int(shape["vocab"]), seq_len=int(shape["seq_len"]))

    def layer(sequence_parallel: bool, recompute: Recompute) -> float:
        grid = make_grid(
            tp=[tp],
            micro_batch=[int(shape["micro_batch"])],
            sequence_parallel=[sequence_parallel],
            recompute=[RECOMPUTES.index(recompute)],
        )
        return float(layer_activation_bytes(spec, grid, recipe("megatron"))[0])

    baseline = layer(False, Recompute.NONE)
    if "%" in quantity:
        kind = quantity.split(": ")[1]
        recompute = Recompute.SELECTIVE if "sel" in kind else Recompute.FULL if kind == "full" else Recompute.NONE
        return 100.0 * layer("seq" in kind, recompute) / baseline
    each = baseline if "TP only" in quantity else layer(True, Recompute.SELECTIVE)
    stages = 1.0 + (pp - 1) / (pp * m) if m > 1 else 1.0
    return each * layers * stages / GIB


def deepspeed_estimates() -> Table:
    """DeepSpeed's memory estimator."""
    rows = []
    for row in paper("deepspeed_memory_estimates"):
        size, n = number(row, "params_million") * 1e6, int(row["nodes"]) * int(row["gpus_per_node"])
        largest = number(row, "largest_layer_params_million") * 1e6
        if row["zero_stage"] == "2":
            computed = 2.0 * size if row["offload_optimizer"] == "cpu" else 4.0 * size + 16.0 * size / n
        else:
            held = {"cpucpu": 0.0, "nonecpu": 2.0, "nonenone": 18.0}[row["offload_param"] + row["offload_optimizer"]]
            computed = 4.0 * largest + held * size / n
        label = (row["model"], row["zero_stage"], row["offload_param"], row["offload_optimizer"], row["mode"])
        rows.append((label, (Cell(published=number(row, "per_gpu_gib"), computed=computed / GIB),)))
    return Table(
        title="DeepSpeed's estimator",
        source="DeepSpeed docs/code-docs/source/memory.rst (an estimate itself)",
        formula="ZeRO-2 4P + 16P/n, 2P with the optimizer offloaded; ZeRO-3 4 x largest layer + 18P/n, 2P/n or nothing "
        "as more is offloaded",
        labels=("model", "stage", "parameters to", "optimizer to", "mode"),
        columns=("GiB per gpu",),
        rows=rows,
    )


def zero_models() -> Table:
    """ZeRO table 4, the configurations of its figures."""
    rows = []
    for row in paper("zero_table4_model_configs"):
        sizes = [float(part.strip("B")) for part in row["size_label"].split("-")]
        depths = [int(part) for part in row["layers"].split(",")]
        hidden = int(row["hidden"])
        found = [12.0 * depths[0] * hidden**2 / GB, 12.0 * depths[-1] * hidden**2 / GB][: len(sizes)]
        cells: list[Cell | None] = [
            Cell(published=size, computed=computed, flagged=row["note"] if abs(computed / size - 1.0) > 0.2 else "")
            for size, computed in zip(sizes, found, strict=True)
        ]
        cells += [None] * (2 - len(cells))
        rows.append(((row["figure"], row["size_label"], row["layers"], row["hidden"]), tuple(cells)))
    return Table(
        title="ZeRO table 4: model sizes",
        source="arXiv:1910.02054 table 4",
        formula="12 L h^2, of the shallowest and of the deepest (embeddings are not stated)",
        labels=("figure", "size", "layers", "hidden"),
        columns=("smallest 1e9", "largest 1e9"),
        rows=rows,
    )


MEMORY_TABLES: list[Callable[[], Table]] = [
    gpipe_maximum,
    zero_maximum,
    zero_twin,
    megatron2019,
    activations_10b,
    activations_twin,
    llama_parameters,
    gpt3_models,
    llama_models,
    zero_states,
    zero_models,
    korthikanti_memory,
    deepspeed_estimates,
]
