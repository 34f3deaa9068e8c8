"""Small values made by hand: a record with every field filled, and changes of it."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshmark.environment import Environment
from meshmark.judge.deviation import Deviation, Drift, ObservedPath, Quantity, Sample
from meshmark.judge.faults import Diagnosis, Fault
from meshmark.judge.tolerance_model import Way
from meshmark.measure.laps import GpuPower
from meshmark.measure.profile import ActivityKind, Bandwidth, Kernel, Profile
from meshmark.measure.readings import AlikeSteps, Bytes, Collective, DeviceMemory, MemoryReading, TrafficReading
from meshmark.models.transformer import Family, ModelSpec
from meshmark.records.record import (
    ConformanceEvidence,
    EquivalenceEvidence,
    LaunchSeconds,
    MemoryEvidence,
    Outcome,
    Place,
    Reach,
    Record,
    Relaunch,
    Source,
    Status,
    TimingEvidence,
    TrafficEvidence,
    TrainingCurves,
    Verdict,
)
from meshmark.records.request import Task
from meshmark.spec.case import Case
from meshmark.spec.known_gap import KnownGap
from meshmark.spec.layout import Layout
from meshmark.spec.optimizer import OptimizerSpec
from meshmark.spec.precision import Precision
from meshmark.spec.workload import Workload
from meshmark.theory.memory import ExtraMemory, ModelStates
from meshmark.theory.traffic import Flow, OneTimeTraffic, Purpose, TrafficException


def make_model(**changes: Any) -> ModelSpec:  # noqa: ANN401
    """A GPT small enough for milliseconds, with attention far from uniform."""
    defaults: dict[str, Any] = {
        "name": "mini",
        "family": Family.GPT,
        "num_layers": 2,
        "hidden": 16,
        "num_heads": 4,
        "num_kv_heads": 4,
        "ffn_hidden": 24,
        "vocab_size": 256,
        "seq_len": 12,
        "init_std": 0.2,
    }
    return ModelSpec(**{**defaults, **changes})


def make_workload(**changes: Any) -> Workload:  # noqa: ANN401
    defaults: dict[str, Any] = {
        "name": "mini",
        "model": make_model(),
        "global_batch": 4,
        "optimizer": OptimizerSpec(clip_norm=0.5),
    }
    return Workload(**{**defaults, **changes})


def make_case(adapter: str = "ddp", layout: Layout | None = None, **changes: Any) -> Case:  # noqa: ANN401
    return Case(
        adapter=adapter,
        layout=layout or Layout(dp=2, num_micro_batches=2),
        **{"workload": make_workload(), "precision": Precision.FP32, **changes},
    )


def make_environment(**changes: Any) -> Environment:  # noqa: ANN401
    defaults: dict[str, Any] = {
        "date": "2026-01-02T03:04:05+00:00",
        "command": "pytest suites",
        "commit": "0123456789ab",
        "machine": "Abacus 3000",
        "system": "Linux 6.1",
        "num_cpus": 2,
        "memory_bytes": 8 * 2**30,
        "device": "cpu",
        "backend": "gloo",
        "nnodes": 1,
        "versions": {"torch": "2.13.0"},
    }
    return Environment(**{**defaults, **changes})


def make_memory(parameters: int = 400, activations: int = 1000) -> MemoryReading:
    states = Bytes(parameters=parameters, gradients=400, optimizer_states=800, communication=100)
    return MemoryReading(
        steady=Bytes(parameters=parameters, optimizer_states=800, other=24),
        states=states,
        peak=dataclasses.replace(states, activations=activations, other=24),
        late_bytes=8,
        previous_steady_bytes=parameters + 824,
        allocator_peak_bytes=3000,
        allocator_reserved_bytes=4096,
    )


def make_traffic(num_bytes: int = 400) -> TrafficReading:
    all_reduce = Collective(kind="all_reduce", group_size=2, ranks=(0, 1), count=3, num_bytes=num_bytes)
    return TrafficReading(asked=[all_reduce], issued=[all_reduce])


def _rebuilds() -> list[Collective]:
    """Return the calls of `make_traffic`, and those declared for a single step."""
    told = Collective(kind="broadcast", group_size=2, ranks=(0, 1), count=2, num_bytes=8)
    return [*make_traffic().issued, told]


def make_flow(kind: str = "all_reduce", **changes: Any) -> Flow:  # noqa: ANN401
    """Return a flow that matches `make_traffic`."""
    defaults: dict[str, Any] = {"axes": "dp", "ranks": (0, 1), "num_bytes": 400, "fewest": 1, "most": 5}
    return Flow(kind=kind, **{"purpose": Purpose.GRADIENTS, **defaults, **changes})


def make_verdict(suite: str = "equivalence", passed: bool = True, **changes: Any) -> Verdict:  # noqa: ANN401
    evidence: dict[str, dict[str, float | int | str]] = {
        "equivalence": {
            "worst_quantity": "gradients/head.norm.bias",
            "worst_step": 1,
            "ratio": 1.5,
            "distance": 3e-7,
            "truth_norm": 1.0,
            "multiple_of_truth": 1.0000001,
            "noise": 2e-7,
            "factor": 4.0,
            "detection_limit": 2.5e-6,
            "failing": 0,
            "compared": 160,
        },
        "memory": {"category": "gradients", "rank": 0, "relative_error": 0.001},
        "communication": {"differences": 0, "compared": 2, "declared": "padding to four bytes"},
    }
    defaults: dict[str, Any] = {"summary": f"what decided {suite}", "evidence": evidence[suite]}
    return Verdict(suite=suite, passed=passed, **{**defaults, **changes})


def make_equivalence(**changes: Any) -> EquivalenceEvidence:  # noqa: ANN401
    """Return the evidence of an equivalent run over two steps."""
    deviation = Deviation(distance=1e-7, scale=1.0, factor=1.0)
    defaults: dict[str, Any] = {
        "deviations": {
            Quantity.parse("loss"): [deviation, deviation],
            Quantity.parse("norm"): [deviation, deviation],
            Quantity.parse("gradients/head.norm.bias"): [deviation, deviation],
            Quantity.parse("initial/head.norm.bias"): [Deviation(distance=0.0, scale=1.0, factor=1.0)],
        },
        "noise": {
            Quantity.parse("loss"): [1e-7, 1e-7],
            Quantity.parse("norm"): [1e-7, 1e-7],
            Quantity.parse("gradients/head.norm.bias"): [1e-7, 2e-7],
        },
        "factors": {"number": 4.0, "gradients": 3.0, "parameters": 2.5},
    }
    return EquivalenceEvidence(**{**defaults, **changes})


def make_memory_evidence(**changes: Any) -> MemoryEvidence:  # noqa: ANN401
    """Return the evidence of two ranks."""
    defaults: dict[str, Any] = {
        "readings": [make_memory(), make_memory()],
        "planned": [ModelStates(parameters=400, gradients=400, optimizer_states=800)] * 2,
        "extra_memory": [[ExtraMemory(category="gradients", num_bytes=2.0, reason="padding")], []],
        "live_bytes": [{0: 5000, 1: 5000, 2: 5000, 3: 5000, 4: 5000}] * 2,
        "state_dtypes": {"parameters": "float32", "optimizer_states": "float32"},
    }
    return MemoryEvidence(**{**defaults, **changes})


def make_traffic_evidence(**changes: Any) -> TrafficEvidence:  # noqa: ANN401
    """Return the evidence of two ranks."""
    defaults: dict[str, Any] = {
        "readings": [make_traffic(), make_traffic()],
        "planned": [[make_flow(num_bytes=396)]] * 2,
        "traffic_exceptions": [
            [TrafficException(sends=(make_flow(num_bytes=4, fewest=0, most=0),), reason="padding to four bytes")]
        ]
        * 2,
        "one_time_traffic": [
            [OneTimeTraffic(kind="broadcast", steps=(1,), most_bytes=8, most_calls=2, reason="buckets are made again")]
        ]
        * 2,
        "alike_steps": [
            [AlikeSteps(steps=[0, 2, 3, 4], issued=make_traffic().issued), AlikeSteps(steps=[1], issued=_rebuilds())]
        ]
        * 2,
        "places": [Place()] * 2,
        "reach": Reach(within_nodes=800.0, between_nodes=0.0, between_switches=0.0),
        "planned_reach": Reach(within_nodes=800.0, between_nodes=0.0, between_switches=0.0),
    }
    return TrafficEvidence(**{**defaults, **changes})


def make_timing(num_launches: int = 1, **changes: Any) -> TimingEvidence:  # noqa: ANN401
    """Return the timing of two ranks and two steps, in so many equal launches."""
    defaults: dict[str, Any] = {
        "rank_step_seconds": [[0.5, 0.25], [0.25, 0.75]],
        "peak_flops_per_second": 3e9,
        "power": [
            GpuPower(
                gpu="a", num_samples=9, joules=7.0, lowest_mhz=1, highest_mhz=2, highest_celsius=3, num_processes=1
            )
        ],
        "device_memory": [
            DeviceMemory(
                allocated_peak_bytes=5, reserved_peak_bytes=8, fragmented_bytes=1, num_retries=2, outside_bytes=3
            )
        ],
    }
    found = {**defaults, **changes}
    ranks = found["rank_step_seconds"]
    one_lap = {"rank_starts": [[0.0] for _ in ranks], "lap_steps": [len(ranks[0])] if ranks else []}
    again = Relaunch(rank_step_seconds=ranks, rank_starts=[[0.0] for _ in ranks])
    relaunches = {"relaunches": [again] * (num_launches - 1)} if num_launches > 1 else {}
    return TimingEvidence(**{**one_lap, **found, **relaunches})


def make_profile(**changes: Any) -> Profile:  # noqa: ANN401
    """Return the profile of one rank: it computes for half of a step of one second."""
    defaults: dict[str, Any] = {
        "num_steps": 3,
        "step_seconds": 1.0,
        "compute_seconds": 0.5,
        "communication_seconds": 0.25,
        "exposed_seconds": 0.125,
        "idle_seconds": 0.375,
        "kernels": [Kernel(name="aten::mm", kind=ActivityKind.COMPUTE, seconds=0.25, count=6)],
        "bandwidths": [Bandwidth(kind="all_reduce", group_size=2, count=3, num_bytes=3000, seconds=0.75)],
        "memory": [(0.0, 1), (0.5, 10)],
        "trace": "traces/a.json.gz",
    }
    return Profile(**{**defaults, **changes})


def make_record(**changes: Any) -> Record:  # noqa: ANN401
    """An instrumented pass over two ranks, every field filled."""
    drift = Drift(quantity=Quantity.parse("parameters/head.norm.bias"), step=1, ranks=[1])
    diagnosis = Diagnosis(fault=Fault.DRIFT, step=1, names=["head.norm.bias"], num_names=1, ranks=[1])
    gap = KnownGap(clause="unused", reason="it is so", symptom="stale", link="there", zero_stages=(3,))
    defaults: dict[str, Any] = {
        "case": make_case(),
        "adapter": "meshmark.adapters.ddp:DDP",
        "task": Task.OBSERVE,
        "steps": 2,
        "warmup": 1,
        "timing_budget_seconds": 0.5,
        "environment": make_environment(),
        "sources": [Source(target="mine.py:Mine", sha256="12ab", commit="0123456789ab")],
        "outcome": Outcome(status=Status.OK),
        "launch": LaunchSeconds(seconds=3.5, build_seconds=1.25, compile_seconds=0.5, explain_seconds=0.25),
        "training": TrainingCurves(losses=[5.5, 5.25], norms=[2.0, None], left_out=2),
        "equivalence": make_equivalence(
            drifts=[drift],
            diagnosis=diagnosis,
            num_replicated=3,
            sample=Sample(),
            rounded=["head.norm.bias"],
            gathering_bytes=[1000, 2000],
            moved=[0.5, 0.25],
            ways={"rows": Way(dense={"gradients/a": 2.0}, fewest=3, most_flips=4)},
        ),
        "memory": make_memory_evidence(),
        "traffic": make_traffic_evidence(),
        "not_judged": ["memory: the peak of other steps than step 2"],
        "timing": make_timing(
            rank_cpu_seconds=[[0.5], [0.75]],
            digests={1: "abc"},
            observed=ObservedPath(losses=[5.5], digests=["abc"], repeats=True),
            spoilt=["GPU a: hot"],
            relaunches=[Relaunch(rank_step_seconds=[[0.5, 0.5]] * 2, rank_starts=[[0.0]] * 2, digests={1: "abc"})],
        ),
        "conformance": ConformanceEvidence(
            scenario="plain",
            base=make_case(),
            samples=[{"live_bytes": [1.0, 2.0]}, {}],
            digests=["abc", "def"],
            known_gaps=[gap],
        ),
        "unmeasured": {"memory": "it is so"},
        "kernels": {"float32 products": "highest"},
        "profiles": [make_profile()],
        "verdicts": [make_verdict(suite) for suite in ("equivalence", "memory", "communication")],
        "remarks": ["the noise floor was damaged"],
    }
    return Record(**{**defaults, **changes})


def make_good(**changes: Any) -> Record:  # noqa: ANN401
    """The same without drifts, as an honest run of the matrix leaves it."""
    honest: dict[str, Any] = {
        "equivalence": make_equivalence(),
        "timing": make_timing(),
        "conformance": ConformanceEvidence(),
        "unmeasured": {},
    }
    return make_record(**{**honest, **changes})


def make_timed(**changes: Any) -> Record:  # noqa: ANN401
    """The untouched pass over the same case."""
    untouched: dict[str, Any] = {
        "task": Task.TIME,
        "training": TrainingCurves(losses=[5.25]),
        "equivalence": EquivalenceEvidence(),
        "memory": MemoryEvidence(),
        "traffic": TrafficEvidence(),
        "timing": make_timing(),
        "conformance": ConformanceEvidence(),
        "unmeasured": {},
        "verdicts": [],
        "remarks": [],
    }
    return make_record(**{**untouched, **changes})
