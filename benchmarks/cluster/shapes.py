"""Ways of starting the suites on two nodes, without a fault."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.cluster.jobs import Job
from benchmarks.cluster.row import Row
from benchmarks.cluster.slurm import SWITCHES, TOP, Slurm
from benchmarks.cluster.trial import Trial
from meshmark.records.record import Place, Record, Status
from meshmark.records.record_file import read_records

_HOURS = 3600.0
_PATIENT = ("--time-limit", "900", "-p", "no:cacheprovider")
"""On a machine that others use, a case that is correct may take minutes."""

_SMALL = ("--workload", "gpt-mini", "--model", "layers=4,hidden=32,heads=4,vocab=256,seq_len=32,init_std=0.15")
"""As many layers as the deepest pipeline of four ranks has stages."""
_ONE_OF_EACH = "not (deepspeed and (zero1 or zero2) or tp2 or pp2 or interleaved)"
"""One case of each adapter, on all four ranks: how it is started is no other for its other layouts."""


_SWITCHES = [f"{TOP}.{switch}" for switch in SWITCHES]


def one_task_a_node(slurm: Slurm) -> Row:
    """Every adapter of the core, each of whose launches has two ranks on each node."""
    return _all_adapters(slurm, 1)


def one_task_a_rank(slurm: Slurm) -> Row:
    return _all_adapters(slurm, 2)


def _all_adapters(slurm: Slurm, tasks: int) -> Row:
    folder = slurm.folder / f"adapters-{tasks}"
    folder.mkdir()
    where = "networks" if slurm.networks else "loopback"
    command = ["srun", "--nodes=2", f"--ntasks-per-node={tasks}", "pytest", "suites/test_equivalence.py"]
    chosen = ["--world", "4", *_SMALL, "-k", _ONE_OF_EACH, "--results", str(folder), *_PATIENT]
    began = time.monotonic()
    code = _wait(slurm, folder / "output", [*command, *chosen])
    records = read_records(folder).records
    ran = [record for record in records if record.outcome.status is not Status.SKIPPED]
    wrong = [f"srun ended with {code}: {(folder / 'output').read_text()[-800:]}"] if code else []
    wrong += [f"{record.case.id}: {_why(record)}" for record in ran if not _right(record)]
    wrong += [f"{r.case.id} on {r.environment.nnodes} nodes" for r in ran if r.environment.nnodes != 2]
    wrong += [f"{record.case.id}: {problem}" for record in ran if (problem := _misplaced(record))]
    wrong += [] if ran else ["nothing ran"]
    adapters = {record.case.adapter for record in ran}
    skipped = len(records) - len(ran)
    return Row(
        engine="SLURM, srun",
        shape=f"2 x {tasks} x {2 // tasks}, {where}",
        seconds=time.monotonic() - began,
        told=f"{len(ran)} cases of {len(adapters)} adapters correct; {skipped} skipped",
        wrong=wrong,
    )


def doctor(slurm: Slurm) -> Row:
    """Two tasks a node."""
    output, began = slurm.folder / "doctor.out", time.monotonic()
    code = _wait(slurm, output, ["srun", "--nodes=2", "--ntasks-per-node=2", "meshmark", "doctor", "--cluster"])
    said, seconds = output.read_text(), time.monotonic() - began
    told = [line for line in said.splitlines() if line.startswith("all-reduce of")]
    wrong = [] if code == 0 and "2 nodes, alike" in said and told else [f"ended with {code}: {said[-800:]}"]
    return Row(
        engine="srun meshmark doctor",
        shape="2 x 2 x 1, loopback",
        seconds=seconds,
        told=" ".join(told),
        wrong=wrong,
    )


def _right(record: Record) -> bool:
    return record.outcome.status is Status.OK and all(verdict.passed for verdict in record.verdicts)


def _misplaced(record: Record) -> str:
    """Where its ranks ran, and how far what they sent went, as measured and as planned."""
    traffic = record.traffic
    expected = [Place(node=node, switch=switch) for node, switch in enumerate(_SWITCHES) for _ in range(2)]
    if traffic.places != expected:
        return f"its ranks were at {traffic.places}, expected {expected}"
    return "" if traffic.reach == traffic.planned_reach else f"sent {traffic.reach}, planned {traffic.planned_reach}"


def _why(record: Record) -> str:
    failed = [verdict.summary for verdict in record.verdicts if not verdict.passed]
    return f"{record.outcome.status} {record.outcome.message[:300]} {'; '.join(failed)[:300]}"


def shipped_script(slurm: Slurm) -> Row:
    """As examples/slurm has it, unchanged."""
    trial = Trial(slurm.folder, "shipped", slurm.mark)
    trial.open()
    began = time.monotonic()
    last = Job(slurm, trial).ends()
    return Row(
        engine="SLURM, sbatch",
        shape="2 x 1 x 1, loopback",
        seconds=time.monotonic() - began,
        told=last,
        wrong=([] if last == "COMPLETED" else [f"it ended as {last}"]) + trial.complaints(),
    )


def job_array(slurm: Slurm) -> Row:
    """`meshmark submit` in two tasks of one node each, and the same command at once: equal but for times."""
    folder = slurm.folder / "submitted"
    pytest = ["--adapters", "ddp,gpipe,fsdp2", "--workload", "gpt-mini", "-k", "equivalence", *_PATIENT]
    submit = ["meshmark", "submit", "--tasks=2", f"--results={folder}", "--", *pytest]
    began = time.monotonic()
    code = _wait(slurm, slurm.folder / "submitted.out", submit)
    seconds = time.monotonic() - began
    alone = ["pytest", "--pyargs", "meshmark.suites", *pytest, "--results", str(slurm.folder / "at-once")]
    wrong = [f"submit ended with {code}: {(slurm.folder / 'submitted.out').read_text()[-800:]}"] if code else []
    wrong += ["the run at once failed"] if _wait(slurm, slurm.folder / "at-once.out", alone) else []
    parts, whole = (_computed(slurm.folder / name) for name in ("submitted", "at-once"))
    wrong += [f"{case}: differs from the run at once" for case in whole if parts.get(case) != whole[case]]
    wrong += [] if len(whole) > 2 and parts.keys() == whole.keys() else [f"{len(parts)} cases, at once {len(whole)}"]
    return Row(
        engine="SLURM, meshmark submit",
        shape="array of 2: 1 x 1 x 2",
        seconds=seconds,
        told=f"{len(parts)} cases, equal to those of one run",
        wrong=wrong,
    )


def _wait(slurm: Slurm, output: Path, command: list[str]) -> int:
    running = slurm.start(output, *command)
    try:
        return running.wait(_HOURS)
    finally:
        running.terminate()


def _computed(folder: Path) -> dict[str, object]:
    """Return the results of a run's cases, without times."""
    return {
        record.case.id: (record.outcome.status, record.training.losses, [(v.suite, v.passed) for v in record.verdicts])
        for record in read_records(folder).records
    }
