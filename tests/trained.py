"""Runs of tiny problems on ranks that are forked once for many of them: engines, broken or not, against the truth."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.judge.deviation import Deviations, QuantityKind, replicas_of_ranks
from meshmark.judge.faults import Diagnosis
from meshmark.judge.replica_diagnosis import diagnose_replicas
from meshmark.judge.tolerance_model import fit, noise_run
from meshmark.judge.trace import Trace, gather_replicas, host_copies
from meshmark.judge.truth import assess_replicas
from meshmark.reference.data import make_batch
from meshmark.spec.case import Case
from tests.broken.engine import Broken, breaks

LIMIT_SECONDS = 400
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """An adapter, as it is or with a defect, and a case of it."""

    case: Case
    defect: type[Broken] | None = None
    steps: int = 4

    def train(self, rank: int, folder: Path) -> list[Trace]:
        context = RankContext(
            rank=rank, world_size=dist.get_world_size(), device=torch.device("cpu"), backend="gloo", scratch=folder
        )
        adapter = load_adapter(builtin_adapters()[self.case.adapter])()
        assert (reason := adapter.supports(self.case, "cpu", "gloo")) is None, reason
        engine: Engine = adapter.build(self.case, context)
        if self.defect:
            engine = breaks(engine, self.defect)
        trace = Trace(parameters=[host_copies(engine.parameters())])
        for step in range(self.steps):
            trace.losses.append(float(engine.backward(make_batch(self.case.workload, step))))
            trace.gradients.append(host_copies(engine.gradients()))
            norm = engine.update()
            trace.norms.append(None if norm is None else float(norm))
            trace.parameters.append(host_copies(engine.parameters()))
            trace.versions.append(engine.server_versions())
        engine.close()
        return gather_replicas(trace, replicas_of_ranks(self.case))[0]


def train_all(trials: Sequence[Trial], folder: Path) -> list[list[Trace]]:
    """By trial, then replica. All trials are over as many ranks."""
    (world,) = {trial.case.world_size for trial in trials}
    context = multiprocessing.get_context("fork")
    answer, told = context.Pipe(duplex=False)

    def rank(number: int) -> None:
        torch.set_num_threads(1)
        store = dist.FileStore(str(folder / "store"), world)
        dist.init_process_group("gloo", store=store, rank=number, world_size=world)
        found: Any
        try:
            found = [trial.train(number, folder) for trial in trials]
        except Exception:
            found = traceback.format_exc()
            told.send(found)
            raise
        if number == 0:
            told.send(found)
        dist.barrier()

    processes = [context.Process(target=rank, args=(number,)) for number in range(world)]
    for process in processes:
        process.start()
    try:
        assert answer.poll(LIMIT_SECONDS), "no rank answers"
        found = answer.recv()
    finally:
        for process in processes:
            process.join(10)
            process.kill()
            process.join()
    assert not isinstance(found, str), found
    traces: list[list[Trace]] = found
    return traces


def furthest(deviations: Deviations) -> float:
    """The largest distance from the truth, each relative to the truth where that is larger than one."""
    return max(d.distance / max(d.scale, 1.0) for steps in deviations.values() for d in steps)


def diagnosed(trial: Trial, traces: list[Trace], honest: list[Trace]) -> Diagnosis | None:
    """Return the diagnosis of `traces`, with the distances of the `honest` ones for noise."""
    workload, layout = trial.case.workload, trial.case.layout
    noise = noise_run(assess_replicas(honest, workload, layout=layout), trial.case.precision)
    return diagnose_replicas(trial.case, traces, assess_replicas(traces, workload, layout=layout), [], fit([noise] * 2))


def moved(traces: Sequence[Trace]) -> bool:
    """Whether replicas have come apart."""
    return any(QuantityKind.PARAMETERS and (a != b).any() for a, b in zip(*_last(traces), strict=True))


def _last(traces: Sequence[Trace]) -> list[list[Any]]:
    return [list(trace.parameters[-1].values()) for trace in traces[:2]]
