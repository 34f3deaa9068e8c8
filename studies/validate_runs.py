"""The planner against published runs that no rate is fitted to, as `meshmark predict` answers for their rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from meshmark.plan.predict_file import Setting, predict_rows
from meshmark.plan.rows import Row, number
from meshmark.spec.hardware import GIGA, gpu
from meshmark.theory.grid import Column
from studies.errors_of import errors_of
from studies.papers import paper

TABLES = ("published_runs_bf16", "published_runs")
"""The runs of the first look, and those that were gathered after it."""
EXPERTS = "published_runs_experts"
"""Runs of mixtures of experts."""
_NAMES = ("step_seconds", "fits", "step_seconds_low", "step_seconds_high", "memory_gib")
_BESIDE = ("recompute_method", "recompute_num_layers", "recompute_modules", "offload_layers")
_LAYOUT = ("dp", "tp", "pp", "cp", "zero_stage", "replicas", "virtual_stages", "micro_batch", "recompute", *_BESIDE)


@dataclass(frozen=True)
class Blind:
    """Predictions of published runs, a row each."""

    rows: list[Row]
    seconds: Column
    fits: Column
    low: Column
    high: Column
    """End of the interval for nine runs in ten, in seconds, as `low` is its start."""
    memory: Column
    """GiB."""

    @property
    def holds(self) -> Column:
        """Whether the interval holds the run."""
        found: Column = (self.low <= self.measured) & (self.measured <= self.high)
        return found

    @property
    def measured(self) -> Column:
        return np.array([number(row, "measured_step_seconds") for row in self.rows])

    @property
    def rate(self) -> Column:
        """Measured tokens per second and GPU."""
        return np.array([number(row, "measured_tokens_per_s_per_gpu") for row in self.rows])

    @property
    def errors(self) -> Column:
        """Predicted over measured step time, less one."""
        found: Column = self.seconds / self.measured - 1.0
        return found

    @property
    def memory_errors(self) -> Column:
        """Predicted over measured memory, less one. NaN for runs that publish none."""
        known = [float(row.get("measured_memory_gib") or "nan") for row in self.rows]
        found: Column = self.memory / np.array(known) - 1.0
        return found

    def take(self, chosen: Column) -> Blind:
        rows = [row for row, mine in zip(self.rows, chosen, strict=True) if mine]
        columns = (self.seconds[chosen], self.fits[chosen], self.low[chosen], self.high[chosen], self.memory[chosen])
        return Blind(rows, *columns)

    def by(self, key: Callable[[Row], str]) -> Iterator[tuple[str, Blind]]:
        """Yield the runs of every value of `key`, in the order of the table."""
        keys = [key(row) for row in self.rows]
        for value in dict.fromkeys(keys):
            yield value, self.take(np.array([one == value for one in keys]))


def blind(tables: Sequence[str] = TABLES) -> Blind:
    """Predict all rows, with the network of a source's nodes where it is known and not the GPU's usual one."""
    table = [row for name in tables for row in paper(name)]
    columns = {name: np.zeros(len(table)) for name in _NAMES}
    for node in sorted({row["note_node_gb_per_s"] for row in table}):
        chosen = [i for i, row in enumerate(table) if row["note_node_gb_per_s"] == node]
        for name in sorted({table[i]["gpu"] for i in chosen}):
            mine = [i for i in chosen if table[i]["gpu"] == name]
            machine = gpu(name)
            if node:
                share = float(node) * GIGA / machine.gpus_per_node
                machine = dataclasses.replace(machine, network_bandwidth=share)
            found = predict_rows([table[i] for i in mine], Setting(machine=machine))
            for column, values in columns.items():
                values[mine] = found[f"predicted_{column}"]
    return Blind(table, *columns.values())


@dataclass(frozen=True, kw_only=True)
class Alternatives:
    """Layouts of one model on as many GPUs, with one batch, that a source measured."""

    name: str
    layouts: int
    regret: float
    """Throughput lost by taking the layout that the planner ranks first, as a share of the best."""


def alternatives(found: Blind) -> list[Alternatives]:
    """Return every choice between layouts that a source measured."""

    def problem(row: Row) -> str:
        names = ("note_system", "model", "layers", "gpu", "gpus", "global_batch")
        return ", ".join([*(row[name] for name in names), _precision(row)])

    out = []
    for name, part in found.by(problem):
        layouts = [" ".join(row.get(field) or "" for field in _LAYOUT) for row in part.rows]
        if len(set(layouts)) < 2:
            continue
        chosen = layouts[int(part.seconds.argmin())]
        taken = min(seconds for seconds, layout in zip(part.measured, layouts, strict=True) if layout == chosen)
        out.append(Alternatives(name=name, layouts=len(set(layouts)), regret=float(1.0 - part.measured.min() / taken)))
    return out


def is_complete(row: Row) -> bool:
    """Return whether a row's source states its layout, micro-batch and recomputation."""
    return not row.get("note_unstated")


def _precision(row: Row) -> str:
    return row.get("precision") or "bf16"


def run_lines() -> list[str]:
    """Return the section: the answer, and its parts."""
    found = blind()
    lines = [*_answer(found), "", *_goals(found), "", *_TEXT, ""]
    keys: list[tuple[str, Callable[[Row], str]]] = [
        ("source | GPU", lambda row: f"{row['note_system']} | {row['gpu']}"),
        ("framework it is planned as", lambda row: row["framework"]),
        ("GPU", lambda row: row["gpu"]),
        ("precision", _precision),
        ("the source states", lambda row: _stated(row)),
    ]
    for title, key in keys:
        lines += [_head(title), "|---" * (9 + title.count("|") + 1) + "|"]
        lines += [f"| {name} | {_cells(part)} |" for name, part in found.by(key)]
        lines += [f"| all{' |' * title.count('|')} | {_cells(found)} |", ""]
    lines += [*_beside_rivals(found), "", *_choices(found), "", *_experts(), ""]
    return [*lines, "Every run, with what is assumed of it: [validation-runs.md](validation-runs.md)."]


def _stated(row: Row) -> str:
    unsaid = row.get("note_unstated") or ""
    if "no recomputation" in row["note_assumed"] and not unsaid:
        unsaid = "recomputation"
    return "everything" if not unsaid else "all but recomputation" if unsaid == "recomputation" else "less than that"


def _answer(found: Blind) -> list[str]:
    off, memory = 100 * np.abs(found.errors), 100 * np.abs(found.memory_errors)
    known = np.isfinite(memory)
    systems, gpus = ({row[name] for row in found.rows} for name in ("note_system", "gpu"))
    return [
        "## Runs that nothing is fitted to",
        "",
        f"Of {len(off)} published runs of {len(systems)} sources on {len(gpus)} accelerators, step time is off by",
        f"**{off.mean():.1f} % in the mean and {np.median(off):.1f} % in the median**. "
        f"{100 * found.fits.mean():.0f} % of these layouts, which all ran, are predicted",
        f"to fit. Of the {known.sum()} runs that publish their memory it is off by {memory[known].mean():.1f} % in the "
        "mean. The interval for nine runs in",
        f"ten holds {100 * found.holds.mean():.0f} %.",
    ]


def rank_correlations(found: Blind) -> list[float]:
    """Return the correlation of the order of throughputs within each source and GPU that has three runs or more."""
    values = []
    for _, part in found.by(lambda row: f"{row['note_system']} {row['gpu']}"):
        values.append(errors_of(part.rate * part.measured / part.seconds, part.rate, 0.05).rank_correlation)
    return [value for value in values if np.isfinite(value)]


def _goals(found: Blind) -> list[str]:
    off, memory = np.abs(found.errors), np.abs(found.memory_errors)
    kin = np.abs(found.take(np.array([(r["note_system"], r["gpu"]) == ("NeMo", "h100") for r in found.rows])).errors)
    regrets = np.array([choice.regret for choice in alternatives(found)])
    rows = [
        ("step time, median", 100 * np.median(off), "at most 5 %", np.median(off) <= 0.05),
        ("step time, mean", 100 * off.mean(), "at most 10 %", off.mean() <= 0.10),
        ("step time of NeMo on H100, mean", 100 * kin.mean(), "at most 5 %", kin.mean() <= 0.05),
        ("layouts that ran, predicted to fit", 100 * found.fits.mean(), "at least 95 %", found.fits.mean() >= 0.95),
        ("memory, mean", 100 * np.nanmean(memory), "at most 8 %", np.nanmean(memory) <= 0.08),
        ("runs within their interval", 100 * found.holds.mean(), "85 to 95 %", 0.85 <= found.holds.mean() <= 0.95),
        ("throughput lost by a choice, median", 100 * np.median(regrets), "at most 3 %", np.median(regrets) <= 0.03),
        ("throughput lost by a choice, worst", 100 * regrets.max(), "at most 10 %", regrets.max() <= 0.10),
    ]
    order = float(np.median(rank_correlations(found)))
    lines = ["| figure | found | goal | |", "|---|---|---|---|"]
    lines += [f"| {name} | {value:.1f} % | {goal} | {'met' if met else 'missed'} |" for name, value, goal, met in rows]
    met = "met" if order >= 0.8 else "missed"
    return [
        *lines,
        f"| order of throughputs within a source, median correlation | {order:.2f} | at least 0.8 | {met} |",
    ]


def _head(title: str) -> str:
    what = "time mean % | median % | worst % | bias % | rank correlation | memory % | predicted to fit % | "
    return f"| {title} | runs | {what}within the interval % |"


def _cells(part: Blind) -> str:
    off, bias = 100 * np.abs(part.errors), 100 * part.errors.mean()
    order = errors_of(part.rate * part.measured / part.seconds, part.rate, 0.05).rank_correlation
    memory = 100 * np.abs(part.memory_errors)
    held = f"{np.nanmean(memory):.1f}" if np.isfinite(memory).any() else "-"
    return (
        f"{len(part.rows)} | {off.mean():.1f} | {np.median(off):.1f} | {off.max():.1f} | {bias:+.1f} | "
        f"{'-' if np.isnan(order) else f'{order:.3f}'} | {held} | "
        f"{100 * part.fits.mean():.0f} | {100 * part.holds.mean():.0f}"
    )


def _experts() -> list[str]:
    found = blind([EXPERTS])
    off = 100 * np.abs(found.errors)
    lines = [
        "### Mixtures of experts",
        "",
        f"{len(off)} more runs, counted apart: no run of experts has been used for anything. Time is off by "
        f"{off.mean():.0f} % in the mean and",
        f"{np.median(off):.0f} % in the median, nearly always too fast: launches of small products, and routing, are",
        "not planned. Experts were made to get equally many tokens in Megatron-Bridge's runs. On H100, grouped",
        "products of experts 768 wide reach 130 to 242 TFLOP/s in others' micro-benchmarks",
        "(github:tgale96/grouped_gemm/pull/37, github:ByteDance-Seed/VeOmni/pull/460), and 490 are planned. No rate",
        "is taken from them: each is of one kernel and one shape, and none of Blackwell was found. No interval is",
        "given for mixtures. Sent tokens go to a node once (DeepEP, HybridEP).",
        "",
        "| model | GPU | precision | runs | time mean % | median % | worst % | bias % | predicted to fit % |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, part in found.by(lambda row: f"{row['model']} | {row['gpu']} | {_precision(row)}"):
        mine = 100 * np.abs(part.errors)
        lines.append(
            f"| {name} | {len(mine)} | {mine.mean():.1f} | {np.median(mine):.1f} | {mine.max():.1f} | "
            f"{100 * part.errors.mean():+.1f} | {100 * part.fits.mean():.0f} |"
        )
    return lines


def _beside_rivals(found: Blind) -> list[str]:
    off = 100 * np.abs(found.errors)
    return [
        "### What others claim",
        "",
        "Each on runs of its own, most of them used to calibrate it; nobody has published an error on runs of others.",
        "",
        "| planner | step time, mean % | on |",
        "|---|---|---|",
        "| Meshmark | "
        f"{off.mean():.1f} | these runs, of which none is fitted to; 1.5 on Megatron SC21's PTD-P runs, below |",
        "| Calculon | 3.65 | Megatron on A100, its own runs (baselines/papers/calculon_validation.csv) |",
        "| SimAI | 1.9 | a cluster of its authors |",
        "| Charon | 3.74 | runs of its authors |",
        "| vTrain | 8.4 and 14.7 | one node and several nodes of A100, its authors' |",
    ]


def _choices(found: Blind) -> list[str]:
    lines = [
        "### Choices between layouts that were measured",
        "",
        "The same model, batch, precision and GPUs in two layouts or more. Lost is what the layout that is predicted",
        "fastest gives less than the best that was measured.",
        "",
        "| problem | layouts | throughput lost % |",
        "|---|---|---|",
    ]
    return [*lines, *(f"| {one.name} | {one.layouts} | {100 * one.regret:.1f} |" for one in alternatives(found))]


def every_run_lines() -> list[str]:
    """Return the page of all runs, each with its prediction and what its source does not state."""
    found = blind([*TABLES, EXPERTS])
    notes = list(dict.fromkeys(_note(row) for row in found.rows))
    lines = [
        "# Every run that nothing is fitted to",
        "",
        "Made by `make validate`; not edited by hand. What they say together: [validation.md](validation.md).",
        "",
        "| run | measured s | predicted s | interval s | error % | fits | assumed |",
        "|---|---|---|---|---|---|---|",
    ]
    for i, (row, error) in enumerate(zip(found.rows, found.errors, strict=True)):
        degrees = {name: row[name] for name in ("dp", "tp", "pp", "cp")} | {"v": row["virtual_stages"]}
        layout = ".".join(f"{name}{value}" for name, value in degrees.items() if str(value) != "1") or "dp1"
        layout += f".zero{row['zero_stage']}" + (f".replicas{row['replicas']}" if row.get("replicas") else "")
        layout += f".ep{row['ep']}" if row.get("ep") else ""
        again = (row.get("recompute_modules") or row["recompute"]).replace(" ", "+")
        layout += f".recompute_{again}" if row["recompute"] != "none" else ""
        layout += "".join(f".{row[name]}" for name in _BESIDE[:2] if row.get(name))
        layout += f".offload_layers{row['offload_layers']}" if row.get("offload_layers") else ""
        depth = f", {row['layers']} layers" if row["layers"] else ""
        between = "-" if np.isnan(found.low[i]) else f"{found.low[i]:.4g} to {found.high[i]:.4g}"
        said = [
            f"{row['note_system']}: {row['model']}{depth}, {_precision(row)}, {layout} on {row['gpus']} {row['gpu']}",
            row["measured_step_seconds"],
            f"{found.seconds[i]:.4g}",
            between,
            f"{100 * error:+.1f}",
            "yes" if found.fits[i] else "no",
            f"({notes.index(_note(row)) + 1})",
        ]
        lines.append(f"| {' | '.join(said)} |")
    return [*lines, "", "Assumed, and not stated by the source:", "", *_numbered(notes)]


def _note(row: Row) -> str:
    unsaid = row.get("note_unstated")
    return (row["note_assumed"] or "nothing assumed") + (f"; not stated: {unsaid}" if unsaid else "")


def _numbered(notes: Sequence[str]) -> list[str]:
    return [f"- ({i}) {note}." for i, note in enumerate(notes, 1)]


_TEXT: Sequence[str] = [
    "No rate is chosen by these residuals, and no fit can read the two tables (a test holds it). Of the 58 runs of the",
    "first table the errors were known when InternEvo and MaxText got recipes of their own; the other 269 were read",
    "after all rates and recipes were fixed. At that first sight the mean was 9.6 %, the median 7.5 %, and 84 % were",
    "predicted to fit. Then five things changed, each for a reason in the source code that ran, none with a number to",
    "choose: a fused gate keeps three tensors, not four; products in 8 bits keep their inputs as they cast them;",
    "fms-fsdp reduces gradients in 16 bits; Pax shards within as many nodes as its script says; in InternEvo each",
    "weight's owner broadcasts it. GB200 has a factor since its first nine runs were seen: how much of the peak an",
    "independent program (MAMF) reaches there and on H100.",
    "",
    "Before the second change the mean was 9.3 %, the median 7.5 %, and 92 % were predicted to fit; errors were known",
    "from then on. What sources say of recomputation and offloading was entered for all runs of a source: layers in",
    "host memory, repeated layers and repeated modules of Megatron-Bridge's configurations, MaxText's and Pax's",
    "policies, and of Llama 3 (arXiv:2407.21783 sec. 3.3.2) sharded gradients, interleaved chunks of one layer and no",
    "recomputation. Memory follows source code in four more things: the fp32 copy of a shard's gradients exists in",
    "the update alone; attention keeps fewer keys where queries share them, and its latents where it has some; XLA has",
    "no caching allocator; and a TPU no CUDA context. None of these has a number to choose.",
    "",
    "Before the third change the mean was 8.7 %, the median 7.4 %, and 95 % were predicted to fit. It follows what",
    "others measured without training, and source code again. Computation takes 18.9 % longer beside collectives",
    "that it hides (arXiv:2507.03114). Attention and norms reach what cuDNN's benchmark reached on H200, GB200 and",
    "GB300, and attention less of short sequences. Inputs of 8-bit products are gathered in 8 bits, and the loss is",
    "Transformer Engine's. XLA, and PyTorch's checkpoints, do not repeat a layer's last product. Sends of an",
    "interleaved pipeline's warm-up are shown. Segments that expand give back what is unused. GB300 takes B300's",
    "share of the peak. MaxText's and Pax's rows say what their scripts keep, and A3's have the four adapters of",
    "that machine. One form was tried and not kept, as it made the fit to Megatron SC21 worse: reductions of",
    "Megatron of 2021 after the backward pass.",
    "",
    "Before the fourth change the mean was 8.0 %, the median 6.1 %, and 98 % were predicted to fit. Products in",
    "NVFP4 are as many times faster than in bf16 as two micro-benchmarks measured: Transformer Engine's of a layer",
    "on B300 (3.5) and torchao's on B200 (3.8); they had fp8's share of their own peak, which is 5.7 times bf16's on",
    "GB300. Those in MXFP8 take 5 % longer than in fp8 (the same benchmark). A cast to NVFP4 reads its input three",
    "times, as the source code of Transformer Engine's quantizer does; weights are not gathered in 4 bits. Gathers",
    "and reductions of shards take the steps of NCCL's ring, with the latencies of NCCL's own model (its tuning.cc);",
    "megatron-core's and composer's two numbers each were fitted again, to the same runs as before. NVFP4 on GB300",
    "was off by 20 % and is by 3 %, and nothing else moved by more than 3 %.",
    "",
    "What is known of the rest: the H100's rates are 12 to 20 % too fast on B200 and GB200, in every precision, and",
    "right on GB300, whose figures differ from GB200's in little but its power. Products alone explain a part: those",
    "of Transformer Engine's layer on B300 take 13.1 ms and are planned to take 13.2, but torchao's on B200, 8,192",
    "wide, reach 1.42 PFLOP/s where 1.49 are planned. The share of the peak that products reach (MAMF) is of each",
    "GPU's best shape in short runs; one program's times at a layer's shapes on H100 and on B200 or GB200 would",
    "replace it, and were not found. Megatron-Bridge's fp8 scales by each tensor's present largest value, which",
    "reads it once more than is planned. Mixtures are planned too fast too. Pax has no rates of its own and takes",
    "MaxText's. MaxText's runs on A3 combine their reductions into one or two, which hide behind nothing. The source",
    "of Llama 3 does not state its micro-batch, and its layouts are planned to need 12 to 21 GiB more than there is;",
    "Nemotron-4 340B on 128 H100 needs 3 GiB more, and one of MaxText's on TPU v5p 8 GiB. NeMo's tables do not state",
    "recomputation; none is assumed. Megatron-FSDP's buffers are not planned.",
]
