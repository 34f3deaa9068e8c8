"""Published tables that state facts: results of training runs, datasheets, claims; checked where that is possible."""

from __future__ import annotations

from collections.abc import Callable

from meshmark.models.transformer import model_spec
from meshmark.plan.rows import Row, number
from meshmark.spec.hardware import TERA, gpu
from meshmark.theory.recipe import recipe
from studies.papers import paper
from studies.table import Cell, Table

_DAY = 86400.0
_GPT3 = model_spec("gpt3-175b")
_GPT3_ACTIVATIONS = (
    4.0 * _GPT3.num_layers * (2.0 * _GPT3.seq_len**2 * _GPT3.num_heads + 14.0 * _GPT3.seq_len * _GPT3.hidden) / 1e9
)
_PEAK = gpu("a100").peak("bf16")
_COMPUTED: dict[str, float] = {
    "bytes per param, fp16 mixed Adam": recipe("zero").states.total,
    "1B params -> GB/GPU": recipe("zero").states.total,
    "GPT-3 activation, b=1, s=2048, 4-byte elements, L*b*(2 s^2 a + 14 s h)": _GPT3_ACTIVATIONS,
    "activation/model ratio b=1": 100.0 * _GPT3_ACTIVATIONS / (4.0 * 175.0),
    "activation/model ratio b=128": 128.0 * _GPT3_ACTIVATIONS / (4.0 * 175.0),
    "U for GPT-3 175B, 1024 A100, 300B tokens, 35 days, 8TP": 8.0 * 300e9 * 175e9 / (1024 * _PEAK * 35 * _DAY),
    "U for LLaMA-65B, 2048 A100, 1.4T tokens, 21 days": 8.0 * 1.4e12 * 65.2e9 / (2048 * _PEAK * 21 * _DAY),
    "BLOOM: A100-80GB count": 48.0 * gpu("a100").gpus_per_node,
}
"""Values that follow from sizes: bytes a parameter (arXiv:1910.02054 sec. 3.1), the deck's own activation formula, 8 T
P over time and peak (forward, backward and a recomputed forward), BLOOM's 48 nodes."""


def claims() -> Table:
    """Numbers from the decks, checked."""
    rows = []
    for row in paper("scalar_claims_checked"):
        value, computed = number(row, "deck_value"), _COMPUTED.get(row["claim"])
        verdict = (row["verdict"] or "").strip()
        cell = None
        if computed is not None:
            wrong = abs(computed / value - 1.0) > 0.02
            reason = f"{verdict} ({row['check_basis']})"
            cell = Cell(published=value, computed=computed, flagged=reason if wrong else "")
        label = (row["deck"], row["claim"], row["unit"], row["deck_value"], row["check_value"], verdict)
        rows.append((label, (cell,)))
    return Table(
        title="Scalar claims",
        source="the decks of Krishnamurthy, Yuan, Rostami and IDRIS DLO-JZ, each checked",
        formula="where a claim follows from sizes: 16 bytes a parameter; the deck's own activation formula; 8 T P over "
        "time and peak; the rest is text, with its check beside it",
        labels=("deck", "claim", "unit", "as shown", "check", "verdict"),
        columns=("value",),
        rows=rows,
    )


def a100_peaks() -> Table:
    """A100 peaks beside the planner's datasheet."""
    names = {"FP32": "fp32", "TF32 Tensor Core": "tf32", "BF16 Tensor Core": "bf16", "FP16 Tensor Core": "fp16"}
    rows = []
    for row in paper("a100_peak"):
        known = names.get(row["format"])
        cell = Cell(published=number(row, "peak_dense"), computed=gpu("a100").peak(known) / TERA) if known else None
        rows.append(((row["gpu"], row["format"], row["peak_dense"], row["peak_2_4_sparse"]), (cell,)))
    return Table(
        title="A100 peaks",
        source="NVIDIA A100 datasheet; IDRIS DLO-JZ's deck",
        formula="the planner's a100-80",
        labels=("gpu", "format", "dense", "2:4 sparse"),
        columns=("TFLOP/s",),
        rows=rows,
    )


def _facts(name: str, title: str, columns: tuple[str, ...], notes: list[str] | None = None) -> Callable[[], Table]:
    """A table that is only shown: nothing in it follows from sizes or machines."""

    def make() -> Table:
        table = paper(name)
        sources = sorted({row["source"] for row in table})
        noted = [f"- {_name(row, columns)}: {row['note']}" for row in table if row.get("note")]
        return Table(
            title=title,
            source="; ".join(sources),
            formula="",
            labels=columns,
            columns=(),
            rows=[(tuple(row[c] for c in columns), ()) for row in table],
            notes=[*(notes or []), *noted],
        )

    return make


def _name(row: Row, columns: tuple[str, ...]) -> str:
    return ", ".join(row[c] for c in columns[:2])


_TRAINED = ["Results of training runs: nothing in the planner computes them."]

FACT_TABLES: list[Callable[[], Table]] = [
    claims,
    a100_peaks,
    _facts("systems_comparison", "Systems", ("system", "released_year", "company", "platform", "community")),
    _facts(
        "resnet_psgd_vs_decentralized",
        "Parallel against decentralised SGD, ResNet",
        ("method", "nodes", "gpus", "top1_acc_percent", "time", "time_unit"),
        _TRAINED,
    ),
    _facts(
        "bert_large_psgd_vs_dsgd",
        "Parallel against decentralised SGD, BERT-Large",
        ("method", "final_loss", "wall_clock_hours", "gpus"),
        _TRAINED,
    ),
    _facts(
        "compressed_sgd_cifar10", "Compressed SGD, CIFAR-10", ("method", "model", "top1_acc_percent", "std"), _TRAINED
    ),
]
