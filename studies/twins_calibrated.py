"""Steps measured here beside what the planner predicts from a calibration of the same machine in the same sitting."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from meshmark.plan.calibration_file import Calibrated, read_calibrated
from meshmark.plan.prediction import Prediction, predict_grid
from meshmark.plan.rows import Row, number
from meshmark.spec.layout import Schedule
from meshmark.theory.grid import SCHEDULES, make_grid
from meshmark.theory.recipe import recipe
from studies.table import Cell, Table
from studies.twins import model_of, origin, twin


def calibrated_twin() -> Table:
    """No paper's table: what `meshmark calibrate` is worth."""
    rows, out = twin("calibrated"), []
    there = machine_of(rows[0])
    links = there.rates.network
    for row in rows:
        found = predict_row(row, there)
        layout = found.grid.layout(0)
        median, high = number(row, "step_seconds"), number(row, "slowest_seconds")
        label = (
            row["adapter"],
            layout.id,
            row["hidden"],
            f"{number(row, 'parameters') / 1e6:.1f}",
            f"{median:.3f} ({high:.3f})",
        )
        cell = Cell(published=number(row, "fastest_seconds"), computed=float(found.step_seconds[0]))
        out.append((label, (cell,)))
    peak = there.gpu.peak("fp32") / 1e9
    return Table(
        title="Steps from a calibration",
        source=origin(rows),
        formula="the planner's step time on the machine and with the rates that `meshmark calibrate` measured in the "
        f"same sitting: {peak:.1f} GFLOP/s a rank, {there.gpu.memory_bandwidth / 1e9:.1f} GB/s of memory, collectives "
        f"of {1e3 * links.tp_latency_seconds:.2f} ms and {links.tp_bandwidth / 1e9:.2f} GB/s; nothing is "
        "fitted to the steps",
        labels=("framework", "layout", "hidden", "parameters 1e6", "seconds, median (slowest)"),
        columns=("seconds, fastest",),
        rows=out,
        notes=[
            f"GPTs of {rows[0]['layers']} layers, {rows[0]['seq_len']} tokens, {rows[0]['global_batch']} sequences a",
            f"step, fp32, gloo, {rows[0]['samples']} steps each. The machine is shared: calibration and steps both",
            "take the fastest of their repetitions. What the planner does not know of a CPU: a framework's host work,",
            "which computes on the same core, its copies into and out of gathered and reduced buffers (FSDP2's above",
            "all), AdamW's unfused passes, and waiting for the slower rank of two.",
        ],
    )


def machine_of(row: Row) -> Calibrated:
    """The calibration that was measured with a row."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "machine.json"
        path.write_text(json.dumps(json.loads(row["machine_file"])))
        return read_calibrated(path)


def predict_row(row: Row, there: Calibrated) -> Prediction:
    """The planner's view of one measured step."""
    dp, count = int(row["dp"]), int(row["num_micro_batches"])
    grid = make_grid(
        dp=[dp],
        tp=[int(row["tp"])],
        pp=[int(row["pp"])],
        zero_stage=[int(row["zero_stage"])],
        num_micro_batches=[count],
        micro_batch=[int(row["global_batch"]) // dp // count],
        schedule=[SCHEDULES.index(Schedule.GPIPE)],
    )
    return predict_grid(model_of(row), grid, there.gpu, recipe("eager"), there.rates)
