"""Published measurements as models, grids and recipes, for validation beside the sweep."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from meshmark.models.transformer import ModelSpec, gpt, llama
from meshmark.plan.layout_table import batches
from meshmark.plan.prediction import Prediction, predict_grid
from meshmark.plan.rates import Rates
from meshmark.plan.rows import Row, number
from meshmark.plan.stacks import contended, scaled, stack_of
from meshmark.plan.step_time import step_time
from meshmark.spec.hardware import GIB, Gpu, gpu
from meshmark.spec.layout import Recompute, Schedule
from meshmark.theory.grid import RECOMPUTES, SCHEDULES, Grid, make_grid
from meshmark.theory.recipe import TrainingRecipe, recipe
from studies.papers import paper

TERA = 1e12

_FULL = RECOMPUTES.index(Recompute.FULL)


@dataclass(frozen=True, kw_only=True)
class Published:
    """One published run."""

    label: str
    model: ModelSpec
    grid: Grid
    gpu: Gpu
    recipe: TrainingRecipe
    step_seconds: float
    """NaN where it is not published."""
    memory_bytes: float
    """NaN where it is not published."""
    ran_out_of_memory: bool
    source: str
    network_share: float = 1.0
    """Its nodes' network bandwidth over that of the machine that the rates were fitted to."""

    def predict(self, rates: Rates) -> Prediction:
        """The planner's view of it."""
        there = dataclasses.replace(self.gpu, network_bandwidth=self.gpu.network_bandwidth * self.network_share)
        given = contended(rates, stack_of(self.recipe.name), self.gpu)
        return predict_grid(self.model, self.grid, there, self.recipe, scaled(given, self.gpu, there))


def megatron_flops(batch: float, s: float, layers: float, h: float, vocab: float) -> float:
    """arXiv:2104.04473 eq. (3): 96 B s L h^2 (1 + s/6h + V/16Lh), full recomputation counted."""
    return 96.0 * batch * s * layers * h**2 * (1.0 + s / (6.0 * h) + vocab / (16.0 * layers * h))


def _gpt_of(row: Row, label: str) -> ModelSpec:
    return gpt(
        label,
        int(row["layers"]),
        int(row["hidden"]),
        int(row["heads"]),
        vocab_size=int(row["vocab"]),
        seq_len=int(row["seq_len"]),
        tied_embeddings=True,
    )


def _megatron_grid(
    row: Row, chunks: int, *, recompute: int, zero_stage: int = 0, sequence_parallel: bool = False
) -> Grid:
    """A row's layout under 1F1B, interleaved where a stage has several chunks."""
    batch, dp, micro = int(row["global_batch"]), int(row["dp"]), int(row["micro_batch"])
    schedule = Schedule.INTERLEAVED if chunks > 1 else Schedule.ONE_F_ONE_B
    return make_grid(
        dp=dp,
        tp=int(row["tp"]),
        pp=int(row["pp"]),
        micro_batch=micro,
        num_micro_batches=max(1, batch // dp // micro),
        virtual_stages=chunks,
        schedule=SCHEDULES.index(schedule),
        recompute=recompute,
        zero_stage=zero_stage,
        sequence_parallel=sequence_parallel,
    )


def _achieved_seconds(row: Row, spec: ModelSpec) -> float:
    """Return the seconds of a step, from the FLOP/s in a table."""
    flops = megatron_flops(int(row["global_batch"]), spec.seq_len, spec.num_layers, spec.hidden, spec.vocab_size)
    return flops / (float(row["achieved_tflops_per_gpu"]) * TERA * int(row["gpus"]))


def megatron_table1() -> list[Published]:
    """Megatron SC21 table 1: weak scaling to a trillion parameters, full recomputation."""
    out = []
    for row in paper("megatron_sc21_table1_weak_scaling"):
        label = f"{row['params_billion']}B on {row['gpus']}"
        spec = _gpt_of(row, label)
        grid = _megatron_grid(row, int(number(row, "virtual_pipeline_chunks")), recompute=_FULL)
        out.append(_published(label, spec, grid, _MEGATRON, _achieved_seconds(row, spec), row))
    return out


def megatron_table2() -> list[Published]:
    """Megatron SC21 table 2: ZeRO-3 against tensor and pipeline parallelism."""
    out = []
    for row in paper("megatron_sc21_table2_zero3_vs_ptdp"):
        label = f"{row['scheme']} {row['params_billion']}B on {row['gpus']}"
        spec = _gpt_of(row, label)
        # Interleaved: one layer a chunk for 530B (3 on 35 stages); two for 175B (96 layers on 12 stages, figure 12).
        chunks = (3 if row["layers"] == "105" else 4) if row["pp"] != "1" else 1
        grid = _megatron_grid(row, chunks, zero_stage=int(row["zero_stage"]), recompute=_FULL)
        out.append(_published(label, spec, grid, _MEGATRON, _achieved_seconds(row, spec), row))
    return out


def korthikanti_table5() -> list[Published]:
    """Korthikanti et al. table 5: full recomputation against selective with sequence parallelism."""
    out = []
    for row in paper("korthikanti_table5_iteration_time"):
        label = f"{row['model']} {row['recompute']} on {row['gpus']}"
        grid = _megatron_grid(
            row,
            int(row["interleave_m"]),
            sequence_parallel=row["sequence_parallel"] == "1",
            recompute=RECOMPUTES.index(Recompute(row["recompute"])),
        )
        spec, seconds = _gpt_of(row, label), number(row, "iteration_time_s")
        out.append(_published(label, spec, grid, _MEGATRON, seconds, row))
    return out


def bloom_sweep() -> list[Published]:
    """BLOOM's topology sweep: DeepSpeed ZeRO-1 with Megatron, full recomputation, on Jean Zay, whose nodes have four
    Omni-Path links of 100 Gb/s (bigscience/bloom's model card) where Selene's have eight of 200."""
    out = []
    for row in paper("bloom_topology_sweep"):
        batch, dp, micro = int(row["global_batch"]), int(row["dp"]), int(row["micro_batch"])
        if _bloom_gap(row):
            continue
        spec = _gpt_of(row, f"BLOOM {row['size_billion']}B")
        grid = make_grid(
            dp=dp,
            tp=int(row["tp"]),
            pp=int(row["pp"]),
            micro_batch=micro,
            num_micro_batches=batch // dp // micro,
            zero_stage=int(row["zero_stage"]),
            recompute=_FULL,
        )
        using = recipe("megatron-deepspeed-bf16" if "fp32 grad" in row["precision"] else "megatron-deepspeed")
        label = f"line {row['line']}: {row['size_billion']}B {grid.layout(0).id}"
        one = _published(label, spec, grid, (gpu("a100-80"), using), _bloom_seconds(row), row)
        memory = number(row, "max_mem_gb") * GIB
        out.append(
            dataclasses.replace(
                one,
                memory_bytes=memory,
                ran_out_of_memory=row["max_mem_gb"] == "OOM",
                network_share=4 * 100 / (8 * 200),
            )
        )
    return out


def _bloom_gap(row: Row) -> str:
    """Why a row of BLOOM's sweep is left out; empty when it is not."""
    dp, micro = int(row["dp"]), int(row["micro_batch"])
    if row["heads"] == "n/s":
        return "number of heads not stated"
    if int(row["global_batch"]) % (dp * micro) or int(row["hidden"]) % int(row["heads"]):
        return "sizes that do not divide"
    return "" if int(row["gpus"]) == dp * int(row["tp"]) * int(row["pp"]) else "gpus other than dp x tp x pp"


def _bloom_seconds(row: Row) -> float:
    """The iteration time, or where only the older, about 3 % too low TFLOP/s is printed, NaN."""
    return number(row, "iteration_time_s")


def torchtitan_rows() -> list[Published]:
    """torchtitan's bf16 rows: FSDP2, with tensor parallelism in some; `left_out` counts the others."""
    kinds = {"H100 SXM 96GB": "h100-96", "H100 94": "h100-96", "H200": "h200", "A100": "a100-80"}
    out = []
    for row in paper("torchtitan_performance"):
        if _torchtitan_gap(row):
            continue
        kind = next(name for prefix, name in kinds.items() if row["gpu"].startswith(prefix))
        spec = llama(
            row["model"],
            int(row["layers"]),
            int(row["hidden"]),
            int(row["heads"]),
            int(row["ffn_hidden"]),
            num_kv_heads=int(row["kv_heads"]),
            vocab_size=int(row["vocab"]),
            seq_len=int(row["seq_len"]),
        )
        again = {"full": Recompute.FULL, "none": Recompute.NONE}.get(row["recompute"], Recompute.SELECTIVE)
        grid = make_grid(
            dp=int(row["fsdp"]),
            tp=int(row["tp"]),
            cp=int(row["cp"]),
            micro_batch=int(row["local_batch"]),
            zero_stage=3,
            sequence_parallel=True,
            recompute=RECOMPUTES.index(again),
        )
        tokens = int(row["fsdp"]) * int(row["local_batch"]) * spec.seq_len
        seconds = tokens / number(row, "tokens_per_s_per_gpu") / int(row["gpus"])
        detail = "" if row["torch_compile"] == "1" else f", compile {row['torch_compile']}"
        detail += ", async TP" if row["async_tp"] == "1" else ""
        label = f"{row['table']}: {spec.name} {grid.layout(0).id}, {row['recompute']}{detail}"
        one = _published(label, spec, grid, (gpu(kind), recipe("fsdp2")), seconds, row)
        out.append(dataclasses.replace(one, memory_bytes=number(row, "peak_memory_gib") * GIB))
    return out


def _torchtitan_gap(row: Row) -> str:
    """Why a row of torchtitan's is left out; empty when it is not."""
    if "float8" in row["precision"]:
        return "float8 products, which the planner has no rate of"
    return "every second layer recomputed, which no layout says" if "2nd layer" in row["recompute"] else ""


def nemo_rows() -> list[Published]:
    """Three models under NeMo on H100, as `meshmark predict` reads them."""
    table, out = paper("nemo_h100_bf16"), []
    for batch in batches(table):
        for position, i in enumerate(batch.rows):
            row, grid = table[i], batch.grid.take(np.array([position]))
            tokens = float(grid.global_batch[0]) * batch.model.seq_len
            seconds = tokens / number(row, "measured_tokens_per_s_per_gpu") / float(grid.num_gpus[0])
            label = f"{row['model']} {grid.layout(0).id}"
            out.append(_published(label, batch.model, grid, (gpu(row["gpu"]), recipe("megatron-core")), seconds, row))
    return out


def left_out(name: str) -> dict[str, int]:
    """Rows of a published table that are not validated on, by reason."""
    gap = {"bloom_topology_sweep": _bloom_gap, "torchtitan_performance": _torchtitan_gap}[name]
    return dict(Counter(reason for row in paper(name) if (reason := gap(row))))


def korthikanti_table4(given: Rates) -> list[tuple[Row, float]]:
    """Korthikanti et al. table 4, each row with the predicted seconds of one layer's forward and backward pass: what a
    second layer adds to a step of one micro-batch (the optimizer's and the head's share taken off with the first's)."""
    out = []
    for row in paper("korthikanti_table4_layer_time"):
        grid = make_grid(
            tp=int(row["tp"]),
            micro_batch=int(row["micro_batch"]),
            sequence_parallel=row["sequence_parallel"] == "1",
            recompute=RECOMPUTES.index(Recompute(row["recompute"])),
        )
        specs = [_gpt_of({**row, "layers": layers, "vocab": "51200"}, "22B") for layers in ("1", "2")]
        times = [step_time(spec, grid, gpu("a100-80"), recipe("megatron"), given) for spec in specs]
        layers = [float((time.total_seconds - time.optimizer)[0]) for time in times]
        out.append((row, layers[1] - layers[0]))
    return out


_MEGATRON = gpu("a100-80"), recipe("megatron")


def _published(
    label: str, spec: ModelSpec, grid: Grid, setup: tuple[Gpu, TrainingRecipe], seconds: float, row: Row
) -> Published:
    there, using = setup
    return Published(
        label=label,
        model=spec,
        grid=grid,
        gpu=there,
        recipe=using,
        step_seconds=seconds,
        memory_bytes=float("nan"),
        ran_out_of_memory=False,
        source=row["source"],
    )


def log_time_errors(runs: Iterable[Published]) -> Callable[[Rates], np.ndarray]:
    """A residual for fitting: the logarithm of predicted over measured step time."""
    known = [run for run in runs if np.isfinite(run.step_seconds)]

    def residual(given: Rates) -> np.ndarray:
        return np.array([np.log(run.predict(given).step_seconds[0] / run.step_seconds) for run in known])

    return residual
