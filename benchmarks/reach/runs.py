"""The judged passes whose reach is measured, one after the other, with what each of them executed."""

from __future__ import annotations

import json
import lzma
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.reach.launcher import CoveringLauncher
from meshmark.adapter.matrix import matrix
from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.conformance.clauses import CLAUSES
from meshmark.conformance.scenario import plain_cells, plain_workload
from meshmark.conformance.scenario_runner import ScenarioRunner
from meshmark.launch.cluster import Cluster, ClusterSpec
from meshmark.records.record import Record, Status
from meshmark.reference.own_model import describe
from meshmark.run.runner import Runner, RunOptions
from meshmark.serial import decode, encode
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout, Recompute, parse_layout
from meshmark.spec.precision import Precision
from meshmark.spec.workload import Workload, workload

RESULTS = Path("results/reach")
PASSES = RESULTS / "passes.jsonl"
KEPT = Path("baselines/reach/passes.jsonl.xz")
"""Passes of the last run that came to its end, for mutants on a machine that has run none."""

CLAUSES_OF = (
    "ddp",
    "fsdp2",
    "deepspeed",
    "pipeline",
    "megatron",
    "fsdp1",
    "accelerate-fsdp2",
    "fairscale-fsdp",
    "accelerate",
    "fairscale-oss",
    "fabric-fsdp",
    "accelerate-loop",
    *("deepspeed-configured", "accelerate-loop-split", "accelerate-loop-shuffled", "ddp-zero1", "deepspeed-predivide"),
    *("fabric-loop", "ddp-buckets"),
    *("deepspeed-universal", "deepspeed-elastic", "megatron-gpt", "megatron-gpt-per-token"),
    "megatron-gpt-recommended",
    *("accelerate-fsdp1-by-size", "accelerate-loop-triggered"),
    *(
        "fsdp2-whole-checkpoint",
        "fsdp2-converted-checkpoint",
        "fsdp1-materialized",
        "fsdp1-flat",
        "fabric-fsdp-shard-grad-op",
    ),
    *("fairscale-fsdp-shard-files", "fairscale-oss-by-hand", "pipeline-split", "fabric-deepspeed-arguments"),
)
"""Adapters whose clauses are run, of each the deepest ZeRO stage, most valuable first."""
SOME_CLAUSES_OF = (
    ("megatron-gpt-per-token", "tp2", ("evaluation",)),
    ("megatron-gpt-recommended", "dp2.zero1", ("evaluation",)),
    ("accelerate-loop-triggered", "dp2", ("resume",)),
    ("deepspeed-experts", "dp2.zero2", ("resume",)),
    ("deepspeed-pipeline", "pp2.1f1b.zero1.mb4", ("resume",)),
    ("deepspeed-loader", "dp2.zero2", ("resume",)),
    ("deepspeed-curriculum", "dp2.zero2", ("resume",)),
    ("megatron-gpt-mended-fully-reshardable", "dp2.zero1", ("resume", "reshard")),
    ("megatron-gpt-mended-memory-efficient", "dp2.zero1", ("resume",)),
    ("megatron-gpt-mended-dp-reshardable", "dp2.zero1", ("resume", "reshard")),
    ("megatron-gpt-mended-parallel", "dp2.zero1", ("resume", "reshard")),
    ("megatron-gpt-mended-gathered", "dp2.zero1", ("resume",)),
)
"""Clauses that alone reach an option of an adapter, whose other clauses say what those of its kin do."""
SUITES_OF_TWO = (
    *("ddp", "fsdp2", "deepspeed", "megatron", "gpipe", "pipeline", "accelerate", "accelerate-fsdp2"),
    *(
        "fairscale-oss",
        "fairscale-fsdp",
        "fsdp1",
        "fsdp1-nosync",
        "fsdp1-shard-grad-op",
        "ddp-zero1",
        "tp",
        "ddp-static",
    ),
    *(
        "deepspeed-whole-buckets",
        "deepspeed-reduce-to-ranks",
        "fsdp2-noreshard",
        "fsdp2-nosync",
        "fsdp2-offload",
        "fsdp2-recommended",
        "ddp-recommended",
        "deepspeed-zero0",
    ),
    *("deepspeed-offload", "deepspeed-offload-params", "deepspeed-recommended", "deepspeed-pipeline"),
    *("deepspeed-ulysses", "megatron-gpt", "fabric-ddp", "fabric-fsdp", "fabric-deepspeed", "accelerate-fsdp1"),
    *("accelerate-deepspeed", "fairscale-oss-ddp", "fairscale-fsdp-unflattened", "fairscale-fsdp-noreshard"),
    *("pipeline-looped-bfs", "pipeline-zero-bubble", "pipeline-zbv", "pipeline-dualpipev"),
    *("accelerate-loop", "accelerate-loop-recommended", "hf-trainer", "hf-trainer-fsdp2", "hf-trainer-deepspeed"),
    *("hf-trainer-recommended", "lightning-trainer"),
    *("deepspeed-predivide", "deepspeed-prescale", "deepspeed-separate-gradients", "deepspeed-fetch-by-reduction"),
    *("ddp-buckets", "fabric-loop", "megatron-gpt-average", "fairscale-fsdp-nosync", "fairscale-fsdp-predivide"),
    *("accelerate-sync-each", "accelerate-fsdp2-nosync"),
    *("deepspeed-by-hand", "deepspeed-coalesced", "deepspeed-sums", "deepspeed-round-robin", "deepspeed-elastic"),
    *("deepspeed-leaf-modules", "deepspeed-granularity", "deepspeed-offload-between", "deepspeed-bf16"),
    *("accelerate-loop-synchronized", "accelerate-loop-triggered", "accelerate-loop-joined"),
    *("accelerate-loop-dispatched", "accelerate-loop-epochs", "accelerate-buckets", "accelerate-static"),
    *("accelerate-fsdp1-by-size", "accelerate-deepspeed-auto", "accelerate-deepspeed-file"),
    *("accelerate-fsdp2-launched", "megatron-gpt-per-token", "megatron-gpt-pipeline-options"),
    "megatron-gpt-exchanged-sums",
    *("deepspeed-autocast", "fsdp2-sums", "fsdp2-columns", "fsdp1-no-shard", "ddp-zero1-views"),
    *("ddp-bucket-list", "ddp-skips-unused", "fsdp2-collectives", "fsdp2-recovered", "fsdp2-ignores"),
    *("fsdp2-wide-outputs", "fsdp1-materialized", "fsdp1-casts", "pipeline-traced", "pipeline-split"),
    *("fabric-loop-raw", "fabric-ddp-precision", "fabric-fsdp-shard-grad-op", "fabric-deepspeed-arguments"),
    *("fabric-deepspeed-offloads", "fairscale-fsdp-casts", "fairscale-fsdp-first-rank", "fairscale-oss-by-hand"),
    *("fsdp1-flat", "tp-whole-loss", "fabric-deepspeed-separate", "fsdp1-ignores", "accelerate-fsdp1-ignores"),
    *("accelerate-captured", "accelerate-clips-values", "deepspeed-loader", "deepspeed-curriculum"),
)
SUITES_OF_FOUR = (
    *(
        "fsdp2-hsdp",
        "fsdp2-hsdp-noallreduce",
        "fsdp1-hybrid",
        "tp-fsdp2",
        "megatron-gpt-zero1",
        "megatron-gpt-overlap",
        "pipeline-fsdp2",
    ),
    *("fsdp2-reshard2", "deepspeed-autotp", "deepspeed-hpz", "fabric-tp-fsdp2", "accelerate-hsdp"),
    *("fsdp2-replicas-by-hook", "fabric-fsdp-hybrid", "fabric-tp-fsdp2-whole-checkpoint"),
)
"""Adapters that need four ranks."""
SCHEDULED = (
    *("deepspeed-configured", "deepspeed-range-test", "deepspeed-one-cycle"),
    *("accelerate", "accelerate-loop-split", "accelerate-loop-shuffled", "fairscale-oss", "fabric-ddp"),
)
"""Adapters whose suites are also run with a schedule."""
HARD = ("ddp", "fsdp2", "fsdp1", "deepspeed", "accelerate", "accelerate-fsdp2", "fairscale-oss", "gpipe", "pipeline")
"""Adapters whose suites are also run on the hard workload."""
HARD_WORKLOAD = "examples/workloads/hard.py:Hard"
_MINI = workload("gpt-mini")
_DEEP = replace(_MINI, name="gpt-deep", model=replace(_MINI.model, name="gpt-deep", num_layers=4))
_THREE = replace(_MINI, name="gpt-three", model=replace(_MINI.model, name="gpt-three", num_layers=3))
_WIDE = replace(
    _MINI, name="gpt-wide", model=replace(_MINI.model, name="gpt-wide", num_layers=1, hidden=512, ffn_hidden=2048)
)
_TWELVE = replace(_MINI, name="gpt-mini.b12", global_batch=12)
_MUON = replace(
    workload("gpt-mini-muon"),
    name="gpt-mini-muon-unclipped",
    optimizer=replace(workload("gpt-mini-muon").optimizer, clip_norm=None),
)
_BETAS = replace(
    _MINI, name="gpt-mini-betas", optimizer=replace(_MINI.optimizer, betas=(0.8, 0.95), eps=1e-6, clip_norm=None)
)
OF_LAYOUTS = (
    *(
        (name, "dp2.mb3", Precision.FP32, _TWELVE)
        for name in ("accelerate", "accelerate-loop-epochs", "accelerate-loop-triggered", "megatron-gpt-per-token")
    ),
    *((name, "dp2.zero2.mb3", Precision.FP32, _TWELVE) for name in ("deepspeed", "deepspeed-sums")),
    ("deepspeed-pipeline-options", "pp2.1f1b.zero1.mb4.recompute_full", Precision.FP32, _MINI),
    ("deepspeed-checkpointing", "dp2.zero3.mb2.recompute_full", Precision.FP32, _MINI),
    ("deepspeed-infinity", "dp2.zero3.mb2.offload_nvme", Precision.FP32, _WIDE),
    ("deepspeed-zero0-bf16", "dp2", Precision.BF16_REDUCE_BF16, _MINI),
    ("deepspeed-round-robin", "dp2.zero2.mb2", Precision.FP32, workload("gpt-mini-adam")),
    ("accelerate-deepspeed-auto", "dp2.zero3.mb2", Precision.FP32, workload("gpt-moe-mini")),
    ("megatron-gpt", "tp2.mb2.recompute_full", Precision.FP32, _MINI),
    ("megatron-gpt", "tp2.mb2.recompute_selective", Precision.FP32, _MINI),
    ("megatron-gpt", "pp2.interleaved.v2.mb4", Precision.FP32, _DEEP),
    ("megatron-gpt", "dp2.mb2", Precision.FP32, _BETAS),
    ("deepspeed-muon", "dp2.zero3.mb2", Precision.FP32, _MUON),
    ("fabric-deepspeed-zero0", "dp2.mb2", Precision.FP32, _BETAS),
    ("megatron-gpt-per-token", "tp2.mb2.recompute_full", Precision.FP32, _MINI),
    ("megatron-gpt-per-token", "dp2.mb2", Precision.FP32, workload("gpt-mini-plain-adam")),
    ("megatron-gpt-fp16", "dp2.mb2", Precision.FP16, _MINI),
    ("megatron-gpt-fp16-constant", "dp2.mb2", Precision.FP16, _MINI),
    ("megatron-gpt-uneven", "pp2.1f1b.mb4", Precision.FP32, _THREE),
    ("megatron-gpt-instances", "dp4.zero1.mb2", Precision.FP32, _MINI),
    ("fsdp1-no-shard", "dp4.mb2", Precision.FP32, _MINI),
    ("megatron-gpt-gathers-early", "dp2.pp2.interleaved.v2.zero1.mb4", Precision.FP32, _DEEP),
    ("megatron-gpt-recommended", "dp2.zero1.mb2", Precision.FP32, _MINI),
    ("megatron-gpt-experts", "dp2.mb2", Precision.FP32, workload("gpt-moe-mini")),
    ("deepspeed-experts", "dp2.zero2.mb2", Precision.FP32, workload("gpt-moe-mini")),
    ("deepspeed-experts-data-first", "dp4.zero2.mb2", Precision.FP32, workload("gpt-moe-mini")),
    *(("deepspeed-ulysses-narrow", f"cp2.zero{stage}.mb2", Precision.BF16_REDUCE_BF16, _MINI) for stage in (2, 3)),
    ("megatron-gpt-aligned", "dp2.pp2.1f1b.zero1.mb4", Precision.FP32, _MINI),
    ("megatron-gpt-aligned", "dp2.pp2.interleaved.v2.zero1.mb4", Precision.FP32, _DEEP),
)
"""Cases that no matrix has: unequal degrees, recomputation, interleaved stages, other precisions and optimizers."""
DEEP = (
    "pipeline",
    "pipeline-split",
    "pipeline-looped-bfs",
    "pipeline-zero-bubble",
    "pipeline-zbv",
    "pipeline-dualpipev",
)
"""Adapters whose suites are also run on a model that is deep enough for several stages a rank."""
RECOMPUTED = ("fabric-fsdp-recomputes",)
"""Adapters whose suites are run with recomputation."""
TIMES = 3.0
"""Factor on a pass's time limit: tracing slows ranks down."""
OPTIONS = RunOptions(time_limit_seconds=120.0 * TIMES, observed_steps=3)


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A unit that runs, or resumes, as a whole: the suites of one case, or the clauses of one base case."""

    case: Case
    clauses: bool
    only: tuple[str, ...] = ()
    """Names of the clauses; empty: all of them."""

    @property
    def name(self) -> str:
        return f"{' '.join(self.only) or 'clauses' if self.clauses else 'suites'} {self.case.id}"


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One pass, with what its ranks executed."""

    unit: str
    case: Case
    scenario: str
    """Empty for the suites."""
    judged: bool
    """Whether it came to its end, so that something was judged."""
    passed: list[str]
    """Suites that passed."""
    seconds: float
    lines: dict[str, list[int]] = field(default_factory=dict)
    values: dict[str, dict[str, list[str]]] = field(default_factory=dict)


def units(of: Iterable[str] = ()) -> Iterator[Unit]:
    """Yield what is to be run, in its order. `of`: only these adapters."""
    chosen = set(of)

    def wanted(names: Iterable[str]) -> list[str]:
        # A name that is not built in has not been merged yet, or is one of an older checkout.
        return [name for name in names if name in builtin_adapters() and (not chosen or name in chosen)]

    for name in wanted([*SUITES_OF_TWO, *SUITES_OF_FOUR]):
        yield from _suites(name, Precision.FP32)
    for name in wanted(CLAUSES_OF):
        cells = plain_cells(name, load_adapter(builtin_adapters()[name]), 2)
        yield from [Unit(case=cell, clauses=True) for cell in cells if isinstance(cell, Case)][-1:]
    for name, layout, only in SOME_CLAUSES_OF:
        if name in wanted([name]):
            trained = plain_workload(load_adapter(builtin_adapters()[name]).capabilities.families)
            case = Case(adapter=name, workload=trained, layout=parse_layout(layout))
            yield Unit(case=case, clauses=True, only=only)
    for name in wanted([*SUITES_OF_TWO, *SUITES_OF_FOUR]):
        yield from _suites(name, Precision.BF16)
    for name in wanted(SCHEDULED):
        yield from _suites(name, Precision.FP32, workload("gpt-mini-warmup"))
    for name, layout, precision, trained in OF_LAYOUTS:
        if name in wanted([name]):
            case = Case(adapter=name, workload=trained, layout=parse_layout(layout), precision=precision)
            if load_adapter(builtin_adapters()[name]).refusal(case, "cpu", "gloo") is None:
                yield Unit(case=case, clauses=False)
    hard = describe(HARD_WORKLOAD)
    for name in wanted(HARD):
        yield from _suites(name, Precision.FP32, hard)
    for name in wanted(DEEP):
        yield from _suites(name, Precision.FP32, _DEEP)
    for name in wanted(RECOMPUTED):
        layout = Layout(dp=2, zero_stage=3, num_micro_batches=2, recompute=Recompute.FULL)
        yield Unit(case=Case(adapter=name, workload=_MINI, layout=layout), clauses=False)


def _suites(name: str, precision: Precision, trained: Workload | None = None) -> Iterator[Unit]:
    adapter = load_adapter(builtin_adapters()[name])
    world = 4 if name in SUITES_OF_FOUR else 2
    for cell in matrix({name: adapter}, [world], [trained or workload("gpt-mini")], [precision]):
        if isinstance(cell, Case) and adapter.refusal(cell, "cpu", "gloo") is None:
            yield Unit(case=cell, clauses=False)


def done(path: Path = PASSES) -> dict[str, dict[str, str]]:
    """Return the finished units, with the results of their clauses."""
    return {row["done"]: row["clauses"] for row in _rows(path) if "done" in row}


def passes(path: Path = PASSES) -> list[Pass]:
    """Return the passes of all finished units."""
    finished = done(path)
    return [decode(Pass, row) for row in _rows(path) if row.get("unit") in finished]


def keep() -> None:
    """Write the passes to `KEPT`."""
    partial = KEPT.with_suffix(".partial")
    partial.write_bytes(lzma.compress(PASSES.read_bytes(), preset=9))
    partial.replace(KEPT)


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    found: list[dict[str, Any]] = []
    content = path.read_bytes()
    for line in (lzma.decompress(content) if path.suffix == ".xz" else content).decode().splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:  # the run was cut off here
            continue
    return found


def run(chosen: Iterable[Unit], seconds: float) -> int:
    """Run units that are not done yet, for about `seconds`. Returns how many are left."""
    finished, started = done(), time.monotonic()
    open_units = [unit for unit in chosen if unit.name not in finished]
    RESULTS.mkdir(parents=True, exist_ok=True)
    with Cluster(ClusterSpec()) as cluster, _closing(CoveringLauncher(cluster)) as launcher, PASSES.open("a") as file:
        runner = None
        for index, unit in enumerate(open_units):
            if time.monotonic() - started > seconds:
                return len(open_units) - index
            began = time.monotonic()
            rows: list[Pass] = []

            def announce(
                what: str, case: Case, record: Record | None, unit: Unit = unit, rows: list[Pass] = rows
            ) -> None:
                if record is not None:
                    rows.append(_pass(unit, record, launcher))

            launcher.take()
            runner = Runner(launcher, builtin_adapters(), OPTIONS, RESULTS / "records", announce)
            results: dict[str, str] = {}
            if unit.clauses:
                scenarios = ScenarioRunner(runner)
                chosen_clauses = {name: CLAUSES[name] for name in unit.only or CLAUSES}
                results = {
                    name: str(scenarios.judge(clause, unit.case).result) for name, clause in chosen_clauses.items()
                }
            else:
                runner.observe(unit.case)
            runner.close()
            for row in rows:
                file.write(json.dumps(encode(row)) + "\n")
            file.write(json.dumps({"done": unit.name, "clauses": results}) + "\n")
            file.flush()
            told = ", ".join(sorted({*results.values()})) or ", ".join(rows[-1].passed if rows else ["nothing"])
            print(f"{time.monotonic() - began:6.1f} s  {unit.name}: {told}", flush=True)
    return 0


@contextmanager
def _closing(launcher: CoveringLauncher) -> Iterator[CoveringLauncher]:
    try:
        yield launcher
    finally:
        launcher.close()


def _pass(unit: Unit, record: Record, launcher: CoveringLauncher) -> Pass:
    lines, values = launcher.take()
    return Pass(
        unit=unit.name,
        case=record.case,
        scenario=record.conformance.scenario,
        judged=record.outcome.status is Status.OK,
        passed=[verdict.suite for verdict in record.verdicts if verdict.passed],
        seconds=record.launch.seconds,
        lines={file: sorted(found) for file, found in lines.items()},
        values={source: {o: sorted(v) for o, v in options.items()} for source, options in values.items()},
    )
