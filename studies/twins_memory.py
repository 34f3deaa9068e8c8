"""Twins of published memory tables: ZeRO's largest models and activations. See `twins.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from meshmark.models.transformer import ModelSpec
from meshmark.plan.rows import Row, number
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.precision import precision
from meshmark.spec.workload import Workload
from meshmark.theory.activations import layer_activation_bytes
from meshmark.theory.grid import make_grid
from meshmark.theory.memory import Overheads, memory, model_states, state_bytes
from meshmark.theory.recipe import eager_recipe, recipe
from studies.papers import paper
from studies.table import Cell, Table
from studies.twins import model_of, origin, twin

_STATES = ("parameters", "gradients", "optimizer")
_MIB = 2**20


def zero_twin() -> Table:
    """ZeRO table 2."""
    rows = twin("zero")
    keys = dict.fromkeys((r["dp"], r["zero_stage"], r["adapter"]) for r in rows)
    out = []
    for key in keys:
        by_states, by_peak = (
            next(r for r in rows if (r["dp"], r["zero_stage"], r["adapter"]) == key and r["judged"] == judged)
            for judged in ("states", "peak")
        )
        cells = (
            _size_cell(by_states, _formula_bytes),
            _size_cell(by_states, _declared_bytes),
            _size_cell(by_peak, _planned_bytes),
            _peak_cell(by_peak, "held_bytes", 0),
            _peak_cell(by_peak, "next_held_bytes", int(by_peak["hidden_step"])),
        )
        out.append(((*key, _published_gain(key[1]), by_states["hidden"], by_peak["hidden"]), cells))
    budget, first = number(rows[0], "budget_bytes") / _MIB, rows[0]
    return Table(
        title="ZeRO table 2, twin",
        source=f"arXiv:1910.02054 table 2; {origin(rows)}",
        formula="the widest model on the search's grid whose bytes fit: 16 bytes a parameter divided by stage (fp32: "
        "4 + 4 + 8; sec. 5.1 to 5.3); the bytes that the framework's adapter declares; the planner's peak of the "
        "framework's eager recipe. Then that peak itself, of the widest model that fitted and of the next",
        labels=(
            "dp",
            "stage",
            "framework",
            "paper: gain at dp 64, theory / measured",
            "width by states",
            "width by peak",
        ),
        columns=(
            "by states, 1e6, ZeRO's formula",
            "by states, 1e6, as declared",
            "by peak, 1e6, planner",
            "its peak MiB",
            "peak MiB, one step wider",
        ),
        rows=out,
        notes=[
            f"The largest GPT of {first['layers']} layers whose bytes on the fullest rank fit {budget:g} MiB, by "
            f"bisection over its width in steps of {first['hidden_step']}; {_num_runs(rows)} real runs, fp32, "
            f"{first['global_batch']} sequences of {first['seq_len']} tokens a step.",
            "DeepSpeed keeps 20 bytes a parameter in fp32 (weights and masters are two copies), and at stage 1 no",
            "other rank's reduced gradients, which ZeRO's formula drops from stage 2 on. Its peaks, by the meter's",
            "list of storages: at stage 1 all whole gradients with the rank's part of them, or with the bucket; at",
            "stage 2 the bucket, its flat copy and the part; AdamW's two temporaries, as large as the one flat tensor",
            "that it is given, and at stage 3 a flat copy of the gradients too. FSDP2's: what is reduced of a block,",
            "gloo's copy of it, and the block gathered ahead. The plan is for collectives whose buffers are gone once",
            "they are done. gloo's threads may release them later, four ranks on two cores more often than two, and",
            "then a peak holds up to a block or a bucket more, at random: the search stops at the first width where",
            "it does, so that the last column, measured once, shows how far above the plan that goes.",
        ],
    )


def _num_runs(rows: list[Row]) -> int:
    return sum(int(row["runs"]) for row in rows if row["judged"] == "peak")


def _published_gain(stage: str) -> str:
    """How many times larger than the baseline the paper's models are, without tensor parallelism."""
    row = paper("zero_table2_max_model_size")[0]
    name = ("baseline", "Pos", "Pos_g", "Pos_g_p")[int(stage)]
    theory = number(row, f"theory_{name}_billion") / number(row, "theory_baseline_billion")
    if stage != "1":
        return f"{theory:.3g}"
    measured = number(row, "measured_ZeRO_DP_Pos_billion") / number(row, "measured_baseline_billion")
    return f"{theory:.3g} / {measured:.3g}"


def _size_cell(row: Row, held: Callable[[Row, ModelSpec], float]) -> Cell:
    """Parameters in millions of the largest model, measured and by `held` bytes."""
    step = int(row["hidden_step"])
    hidden = step
    while held(row, model_of(row, hidden + step)) <= number(row, "budget_bytes"):
        hidden += step
    return Cell(published=number(row, "parameters") / 1e6, computed=model_of(row, hidden).num_parameters / 1e6)


def _formula_bytes(row: Row, model: ModelSpec) -> float:
    grid = make_grid(dp=[int(row["dp"])], zero_stage=[int(row["zero_stage"])])
    found = state_bytes(np.array([float(model.num_parameters)]), grid, recipe("eager"))
    return float(sum(found[name][0] for name in _STATES))


def _declared_bytes(row: Row, model: ModelSpec) -> float:
    names = ("parameters", "gradients", "optimizer_states")
    return sum(number(row, f"declared_{name}_bytes") for name in names) * model.num_parameters


def _planned_bytes(row: Row, model: ModelSpec) -> float:
    dp, stage = int(row["dp"]), row["zero_stage"]
    grid = make_grid(dp=[dp], zero_stage=[int(stage)], micro_batch=[int(row["global_batch"]) // dp])
    name = f"eager-deepspeed-{stage}" if row["adapter"] == "deepspeed" else f"eager-{row['adapter']}"
    return float(memory(model, grid, recipe(name), Overheads()).total_bytes[0])


def _peak_cell(row: Row, column: str, wider: int) -> Cell:
    """The peak of the largest model, or of one wider, measured and planned."""
    planned = _planned_bytes(row, model_of(row, int(row["hidden"]) + wider))
    return Cell(published=number(row, column) / _MIB, computed=planned / _MIB)


def activations_twin() -> Table:
    """Activations by batch, tensor-parallel degree and stage."""
    rows, out = twin("activations"), []
    for row in rows:
        case = _case_of(row)
        using = eager_recipe(case, casts_weights=row["casts_weights"] == "True")
        exact = model_states(case, int(row["rank"]), using).activations
        assert exact is not None, "the twin runs nothing that is not planned"
        held = number(row, "held_bytes") / _MIB
        label = (
            row["adapter"],
            case.layout.id,
            row["precision"],
            row["global_batch"],
            row["rank"],
            f"{number(row, 'declared_bytes') / _MIB:.3f}",
        )
        formula = _formula_activations(case) if case.layout.pp == 1 and row["precision"] == "fp32" else None
        out.append(
            (
                label,
                (
                    Cell(published=held, computed=(exact + number(row, "declared_bytes")) / _MIB),
                    Cell(published=held, computed=formula / _MIB) if formula else None,
                ),
            )
        )
    first = rows[0]
    reasons = sorted({f"- {row['adapter']}: {row['declared']}." for row in rows if row["declared"]})
    return Table(
        title="Activations, twin",
        source=f"arXiv:2205.05198 table 2; Krishnamurthy's deck; {origin(rows)}",
        formula="first what PyTorch's eager autograd saves of this project's model, operator by operator, and what the "
        "adapter declares beyond it (the suites judge this, within 1 %); then the literature's form without dropout "
        "and scores, s b L (h (16 + 46/t) + 4a/t) bytes in fp32, which has neither head nor loss",
        labels=("framework", "layout", "precision", "global batch", "rank", "declared MiB"),
        columns=("held MiB, eager plan", "held MiB, literature"),
        rows=out,
        notes=[
            f"A GPT of {first['layers']} layers, {first['hidden']} wide, {first['seq_len']} tokens, vocabulary "
            f"{first['vocab']}; read when the step's first backward pass begins. Declared:",
            "",
            *reasons,
        ],
    )


def _case_of(row: Row) -> Case:
    model, batch = model_of(row), int(row["global_batch"])
    layout = Layout(
        dp=int(row["dp"]),
        tp=int(row["tp"]),
        pp=int(row["pp"]),
        zero_stage=int(row["zero_stage"]),
        num_micro_batches=int(row["num_micro_batches"]),
    )
    return Case(
        adapter=row["adapter"],
        layout=layout,
        precision=precision(row["precision"]),
        workload=Workload(name=model.name, model=model, global_batch=batch, masked=False),
    )


def _formula_activations(case: Case) -> float:
    layout, workload = case.layout, case.workload
    rows = workload.global_batch // (layout.dp * layout.num_micro_batches)
    plain = recipe("fp32")
    literature = dataclasses.replace(plain, activations=dataclasses.replace(plain.activations, flash_attention=True))
    each = layer_activation_bytes(workload.model, make_grid(tp=[layout.tp], micro_batch=[rows]), literature)
    return workload.model.num_layers * float(each[0])
