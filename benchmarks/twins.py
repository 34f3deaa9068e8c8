"""Scaled-down twins of published tables, measured with real processes on this machine's CPU cores: GPipe's throughput
by stages and micro-batches, ZeRO's largest model, Megatron's weak scaling, activations by batch and layout; and steps
that the planner predicts from a calibration of this machine.

Leaves one CSV file each in baselines/twins/; `make tables` sets them beside the published tables and the planner.
Eight minutes on two quiet cores: `make twins`, or `python -m benchmarks.twins zero` for one alone.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.all_reduce import REDUCTIONS_PER_STEP
from benchmarks.largest import Probe, largest
from benchmarks.quiet import Quiet
from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.environment import describe
from meshmark.errors import MeshmarkError
from meshmark.launch.cluster import Cluster, ClusterSpec
from meshmark.launch.launch import ForkserverLauncher, Launcher
from meshmark.models.transformer import ModelSpec, gpt
from meshmark.plan.calibrate import calibrate_here
from meshmark.records.rank_report import RankReport
from meshmark.records.request import Request, Task
from meshmark.spec.case import Case
from meshmark.spec.layout import Coordinates, Layout
from meshmark.spec.precision import Precision
from meshmark.spec.workload import Workload
from meshmark.theory.memory import model_states

TWINS_DIR = Path(__file__).parent.parent / "baselines" / "twins"
ADAPTERS = {**builtin_adapters(), "all-reduce": "benchmarks.all_reduce:AllReduce"}
ROUNDS = 3
"""Every configuration is timed this often, in turn with the others: the machine may be shared."""
PATIENCE_SECONDS = 60.0
"""How long to wait, in all, for a shared machine to be quiet before something is timed."""
BUDGET_BYTES = 16 * 2**20
"""Memory of one rank, in the search for the largest model."""
CALIBRATION_SECONDS = 20.0
HIDDEN_STEP = 4
"""The search's grid."""

Row = dict[str, object]


class Bench:
    """Runs passes over cases and hands back what their ranks measured."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher, self.quiet = launcher, Quiet(PATIENCE_SECONDS)

    def run(self, case: Case, task: Task, *, steps: int, warmup: int = 0) -> list[RankReport]:
        """Reports by rank. Raises `MeshmarkError` when a rank failed: a twin with a hole in it is worth nothing."""
        request = Request(
            case=case,
            adapter=ADAPTERS[case.adapter],
            task=task,
            device="cpu",
            backend="gloo",
            steps=steps,
            warmup=warmup,
            assess=False,
            time_limit_seconds=120,
        )
        launched = self.launcher.launch(request, case.world_size)
        if launched.failures:
            raise MeshmarkError(f"{case.id}: {launched.failures[0].message}\n{launched.failures[0].log_tail}")
        return launched.reports

    def rounds(self, cases: Sequence[Case], *, steps: int) -> list[list[float]]:
        """Seconds of the slowest rank of every case, `steps` a round after one of warm-up; cases take turns."""
        samples: list[list[float]] = [[] for _ in cases]
        for _ in range(ROUNDS):
            for found, case in zip(samples, cases, strict=True):
                self.quiet.wait()
                reports = self.run(case, Task.TIME, steps=steps, warmup=1)
                found += [max(ranks) for ranks in zip(*(r.step_seconds for r in reports), strict=True)]
        return samples


def timed(seconds: list[float]) -> Row:
    """The columns of a timed row."""
    return {
        "step_seconds": f"{statistics.median(seconds):.5g}",
        "fastest_seconds": f"{min(seconds):.5g}",
        "slowest_seconds": f"{max(seconds):.5g}",
        "samples": len(seconds),
    }


def shape(model: ModelSpec) -> Row:
    return {
        "layers": model.num_layers,
        "hidden": model.hidden,
        "heads": model.num_heads,
        "vocab": model.vocab_size,
        "seq_len": model.seq_len,
        "tied_embeddings": model.tied_embeddings,
        "parameters": model.num_parameters,
    }


def gpipe(bench: Bench) -> list[Row]:
    """GPipe table 2: K stages and M micro-batches of one mini-batch. K = 1 is the model in one process, accumulating
    gradients over the micro-batches: what the micro-batches alone cost."""
    work = Workload(
        name="gpipe-twin",
        model=gpt("gpipe-twin", 4, 128, 4, vocab_size=256, seq_len=256),
        global_batch=32,
        masked=False,
    )
    cases = [
        Case(adapter="gpipe" if k > 1 else "single", workload=work, layout=Layout(pp=k, num_micro_batches=m))
        for m in (1, 4, 32)
        for k in (1, 2, 4)
    ]
    rows: list[Row] = []
    for case, seconds in zip(cases, bench.rounds(cases, steps=2), strict=True):
        layout = case.layout
        rows.append(
            {
                "adapter": case.adapter,
                "partitions_K": layout.pp,
                "micro_batches_M": layout.num_micro_batches,
                **shape(work.model),
                "global_batch": work.global_batch,
                **timed(seconds),
            }
        )
    return rows


def megatron(bench: Bench) -> list[Row]:
    """Megatron SC21 table 1, its rows without a pipeline: hidden over 8, layers over 6. An all-reduce of the residual
    stream is timed by itself on as many ranks."""
    cases, reductions = [], {}
    for tp, layers, hidden, heads in ((1, 4, 288, 8), (2, 5, 384, 8), (4, 6, 512, 8)):
        name = f"megatron-twin-tp{tp}"
        model = gpt(name, layers, hidden, heads, vocab_size=512, seq_len=128, tied_embeddings=True)
        work = Workload(name=name, model=model, global_batch=8, masked=False)
        cases.append(Case(adapter="megatron", workload=work, layout=Layout(tp=tp)))
        if tp > 1:
            reductions[tp] = Case(adapter="all-reduce", workload=work, layout=Layout(tp=tp))
    seconds_of = dict(
        zip([*cases, *reductions.values()], bench.rounds([*cases, *reductions.values()], steps=4), strict=True)
    )
    rows: list[Row] = []
    for case in cases:
        reduction = reductions.get(case.layout.tp)
        one = statistics.median(seconds_of[reduction]) / REDUCTIONS_PER_STEP if reduction else 0.0
        rows.append(
            {
                "adapter": case.adapter,
                "tp": case.layout.tp,
                **shape(case.workload.model),
                "global_batch": case.workload.global_batch,
                **timed(seconds_of[case]),
                "all_reduce_seconds": f"{one:.4g}",
            }
        )
    return rows


def zero(bench: Bench) -> list[Row]:
    """ZeRO table 2: by stage and ranks, the widest model whose model states, and whose peak, fit the budget."""
    rows: list[Row] = []
    for dp in (2, 4):
        for adapter, stage in (("ddp", 0), ("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3), ("fsdp2", 3)):
            rows += _largest_models(bench, adapter, Layout(dp=dp, zero_stage=stage))
    return rows


def _largest_models(bench: Bench, adapter: str, layout: Layout) -> list[Row]:
    """Two rows: by model states, and by the peak; every width is measured once for both."""

    def case_of(hidden: int) -> Case:
        return _zero_case(adapter, hidden, layout)

    probe, rows = Probe(lambda hidden: _bytes_held(bench, case_of(hidden))), []
    for judged in ("states", "peak"):
        hidden = largest(partial(probe.number, judged), BUDGET_BYTES, step=HIDDEN_STEP)
        case, following = case_of(hidden), hidden + HIDDEN_STEP
        rows.append(
            {
                "adapter": adapter,
                "zero_stage": layout.zero_stage,
                "dp": layout.dp,
                "judged": judged,
                "budget_bytes": BUDGET_BYTES,
                "hidden_step": HIDDEN_STEP,
                **shape(case.workload.model),
                "global_batch": case.workload.global_batch,
                "held_bytes": probe.number(judged, hidden),
                "next_held_bytes": probe.number(judged, following),
                "runs": len(probe.seen),
                **_declared(case_of(following)),
            }
        )
    return rows


def _zero_case(adapter: str, hidden: int, layout: Layout) -> Case:
    model = gpt(f"zero-twin-{hidden}", 2, hidden, 2, vocab_size=256, seq_len=32)
    return Case(
        adapter=adapter, layout=layout, workload=Workload(name=model.name, model=model, global_batch=4, masked=False)
    )


def _bytes_held(bench: Bench, case: Case) -> dict[str, int]:
    """Measured, on the fullest rank: model states, and everything at the peak."""
    read = [report.memory for report in bench.run(case, Task.OBSERVE, steps=3) if report.memory]
    states = [m.states.parameters + m.states.gradients + m.states.optimizer_states for m in read]
    return {"states": max(states), "peak": max(m.peak.total for m in read)}


def _declared(case: Case) -> Row:
    """Bytes a parameter that the adapter's recipe and extra memory declare for the fullest rank. Asked of the first
    model that does not fit: what tensors reach over a partition's ends depends a little on the size."""
    adapter, count = load_adapter(ADAPTERS[case.adapter]), case.workload.model.num_parameters
    found: list[dict[str, float]] = []
    for rank in range(case.world_size):
        plan = model_states(case, rank, adapter.recipe(case))
        more = adapter.extra_memory(case, rank)
        found.append(
            {
                name: (getattr(plan, name) + sum(r.num_bytes for r in more if r.category == name)) / count
                for name in ("parameters", "gradients", "optimizer_states")
            }
        )
    fullest = max(found, key=lambda parts: sum(parts.values()))
    return {f"declared_{name}_bytes": f"{value:.8g}" for name, value in fullest.items()}


def activations(bench: Bench) -> list[Row]:
    """Korthikanti's and Krishnamurthy's activations: what is held when the first backward pass begins, by micro-batch,
    tensor-parallel degree, pipeline stage and precision."""
    model = gpt("activations-twin", 4, 128, 4, vocab_size=256, seq_len=128)
    runs = [("single", Layout(), batch, Precision.FP32) for batch in (1, 2, 4, 8)]
    runs += [
        ("single", Layout(), 8, Precision.BF16),
        ("fsdp2", Layout(dp=2, zero_stage=3), 8, Precision.BF16),
        ("megatron", Layout(tp=2), 8, Precision.FP32),
        ("megatron", Layout(tp=4), 8, Precision.FP32),
        ("gpipe", Layout(pp=2, num_micro_batches=4), 8, Precision.FP32),
    ]
    rows: list[Row] = []
    for adapter, layout, batch, precision in runs:
        work = Workload(name=model.name, model=model, global_batch=batch, masked=False)
        case = Case(adapter=adapter, workload=work, layout=layout, precision=precision)
        framework = load_adapter(ADAPTERS[adapter])
        for report in bench.run(case, Task.OBSERVE, steps=3):
            if layout.coordinates(report.rank) != Coordinates(pp=layout.coordinates(report.rank).pp):
                continue  # one rank a stage
            assert report.memory and report.memory.held
            eager = framework.recipe(case).eager
            declared = [r for r in framework.extra_memory(case, report.rank) if r.category == "activations"]
            rows.append(
                {
                    "adapter": adapter,
                    "dp": layout.dp,
                    "tp": layout.tp,
                    "pp": layout.pp,
                    "zero_stage": layout.zero_stage,
                    "num_micro_batches": layout.num_micro_batches,
                    "precision": precision.name,
                    "global_batch": batch,
                    **shape(model),
                    "rank": report.rank,
                    "held_bytes": report.memory.held.activations,
                    "declared_bytes": f"{sum(r.num_bytes for r in declared):.0f}",
                    "declared": "; ".join(r.reason for r in declared),
                    "casts_weights": eager is not None and eager.casts_weights,
                }
            )
    return rows


def calibrated(bench: Bench) -> list[Row]:
    """Steps of real frameworks beside what the planner says of a machine that `meshmark calibrate` measured in the same
    sitting; its file stays with the rows."""
    with tempfile.TemporaryDirectory() as folder:
        bench.quiet.wait()
        machine = Path(folder) / "machine.json"
        calibrate_here(machine, CALIBRATION_SECONDS)
        found = json.dumps(json.loads(machine.read_text()))
    runs = [
        ("single", Layout()),
        ("single", Layout(num_micro_batches=4)),
        ("ddp", Layout(dp=2)),
        ("fsdp2", Layout(dp=2, zero_stage=3)),
        ("megatron", Layout(tp=2)),
        ("gpipe", Layout(pp=2, num_micro_batches=4)),
    ]
    models = [gpt(f"calibrated-twin-{hidden}", 4, hidden, 4, vocab_size=512, seq_len=128) for hidden in (192, 256, 512)]
    cases = [
        Case(adapter=adapter, layout=layout, workload=Workload(name=m.name, model=m, global_batch=8, masked=False))
        for m in models
        for adapter, layout in runs
    ]
    rows: list[Row] = []
    for case, seconds in zip(cases, bench.rounds(cases, steps=6), strict=True):
        layout = case.layout
        rows.append(
            {
                "adapter": case.adapter,
                "dp": layout.dp,
                "tp": layout.tp,
                "pp": layout.pp,
                "zero_stage": layout.zero_stage,
                "num_micro_batches": layout.num_micro_batches,
                **shape(case.workload.model),
                "global_batch": case.workload.global_batch,
                **timed(seconds),
                "machine_file": found,
            }
        )
    return rows


TWINS: dict[str, Callable[[Bench], list[Row]]] = {
    "gpipe": gpipe,
    "megatron": megatron,
    "zero": zero,
    "activations": activations,
    "calibrated": calibrated,
}


def write(path: Path, rows: list[Row]) -> None:
    """Rows as CSV, each with where it comes from."""
    here = describe("cpu", "gloo", 1, command=["python", "-m", "benchmarks.twins", path.stem])
    origin = {
        "machine": here.machine,
        "cores": here.num_cpus,
        "torch": here.versions["torch"],
        "commit": here.commit,
        "date": here.date,
        "command": here.command,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*rows[0], *origin])
        writer.writeheader()
        writer.writerows({**row, **origin} for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("twins", nargs="*", metavar="TWIN", help=f"of {', '.join(TWINS)}; all of them by default")
    parser.add_argument("-o", "--output", type=Path, default=TWINS_DIR, help="folder of the CSV files")
    parsed = parser.parse_args(arguments)
    if unknown := set(parsed.twins) - set(TWINS):
        parser.error(f"unknown twin {', '.join(sorted(unknown))}; known: {', '.join(TWINS)}")
    with Cluster(ClusterSpec()) as cluster:
        bench = Bench(ForkserverLauncher(cluster))
        for name in parsed.twins or TWINS:
            rows = TWINS[name](bench)
            write(parsed.output / f"{name}.csv", rows)
            print(f"{name}: {len(rows)} rows in {parsed.output / f'{name}.csv'}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
