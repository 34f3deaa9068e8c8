"""Published tables that state facts: results of training runs, datasheets, claims; checked where that is possible."""

from __future__ import annotations

from collections.abc import Callable

from meshmark.plan.papers import Row, number, paper
from meshmark.plan.system import TERA, gpu
from meshmark.plan.tables import Cell, Table


def claims() -> Table:
    """Numbers from the decks, checked."""
    rows = []
    for row in paper("scalar_claims_checked"):
        value, check = number(row, "deck_value"), number(row, "check_value")
        verdict = (row["verdict"] or "").strip()
        comparable = value == value and check == check
        wrong = verdict if verdict and not verdict.lower().startswith(("ok", "arithmetic ok")) else ""
        flag = f"{wrong} ({row['check_basis']})" if wrong else ""
        cell = Cell(published=value, computed=check, flagged=flag) if comparable else None
        label = (row["deck"], row["claim"], row["unit"], row["deck_value"], row["check_value"], verdict)
        rows.append((label, (cell,)))
    return Table(
        title="Scalar claims", source="the decks of Krishnamurthy, Yuan, Rostami and IDRIS DLO-JZ, each checked",
        formula="by the basis named with each flag", labels=("deck", "claim", "unit", "as shown", "check", "verdict"),
        columns=("value",), rows=rows,
    )  # fmt: skip


def a100_peaks() -> Table:
    """A100 peaks beside the planner's datasheet."""
    names = {"FP32": "fp32", "TF32 Tensor Core": "tf32", "BF16 Tensor Core": "bf16", "FP16 Tensor Core": "fp16"}
    rows = []
    for row in paper("a100_peak"):
        known = names.get(row["format"])
        cell = Cell(published=number(row, "peak_dense"), computed=gpu("a100").peak(known) / TERA) if known else None
        rows.append(((row["gpu"], row["format"], row["peak_dense"], row["peak_2_4_sparse"]), (cell,)))
    return Table(
        title="A100 peaks", source="NVIDIA A100 datasheet; IDRIS DLO-JZ's deck", formula="the planner's a100-80",
        labels=("gpu", "format", "dense", "2:4 sparse"), columns=("TFLOP/s",), rows=rows,
    )  # fmt: skip


def _facts(name: str, title: str, columns: tuple[str, ...], notes: list[str] | None = None) -> Callable[[], Table]:
    """A table that is only shown: nothing in it follows from sizes or machines."""

    def make() -> Table:
        table = paper(name)
        sources = sorted({row["source"] for row in table})
        noted = [f"- {_name(row, columns)}: {row['note']}" for row in table if row.get("note")]
        return Table(
            title=title, source="; ".join(sources), formula="", labels=columns, columns=(),
            rows=[(tuple(row[c] for c in columns), ()) for row in table], notes=[*(notes or []), *noted],
        )  # fmt: skip

    return make


def _name(row: Row, columns: tuple[str, ...]) -> str:
    return ", ".join(row[c] for c in columns[:2])


_TRAINED = ["Results of training runs: nothing in the planner computes them."]

FACT_TABLES: list[Callable[[], Table]] = [
    claims,
    a100_peaks,
    _facts("systems_comparison", "Systems", ("system", "released_year", "company", "platform", "community")),
    _facts("resnet_psgd_vs_decentralized", "Parallel against decentralised SGD, ResNet",
           ("method", "nodes", "gpus", "top1_acc_percent", "time", "time_unit"), _TRAINED),
    _facts("bert_large_psgd_vs_dsgd", "Parallel against decentralised SGD, BERT-Large",
           ("method", "final_loss", "wall_clock_hours", "gpus"), _TRAINED),
    _facts("compressed_sgd_cifar10", "Compressed SGD, CIFAR-10",
           ("method", "model", "top1_acc_percent", "std"), _TRAINED),
]  # fmt: skip
