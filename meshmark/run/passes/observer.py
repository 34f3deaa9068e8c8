"""Trains an engine and takes notes of all that it computes."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence

import torch

from meshmark import rank_progress
from meshmark.adapter.engine import Engine
from meshmark.adapter.holdings import Holdings
from meshmark.adapter.traffic_source import TrafficSource
from meshmark.clip import told
from meshmark.judge.engine_tensors import host_gradients, host_parameters, local_holdings
from meshmark.judge.trace import Trace, host_copies, tensor_digests
from meshmark.measure.memory import Named
from meshmark.measure.watch import Watch
from meshmark.reference.data import make_batch
from meshmark.run.request import Request


class Observer:
    """One rank's notes of a run."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self.engine, self.request = engine, request
        self.trace = Trace()
        self.unheld = ""
        """What went wrong with `holdings()`, of which no loss, gradient or parameter depends."""
        if request.assess:
            self.trace.parameters.append(host_parameters(engine, request.case.workload))
        if request.assess and request.case.workload.couples_rows:
            self.trace.buffers.append([host_copies(engine.buffers())])

    def holdings(self) -> Holdings:
        """What the engine holds; nothing, and why in `unheld`, where it cannot tell."""
        try:
            return local_holdings(self.engine)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            self.unheld = self.unheld or f"Engine.holdings raised {told(error)}"
            return Holdings()

    def train(
        self, step: int, watch: Watch | None = None, sources: Sequence[TrafficSource] = ()
    ) -> tuple[Named, Named]:
        """One step, whose traffic `sources` are to tell; returns what the engine holds before and after its update."""
        batch = make_batch(self.request.case.workload, step)
        if self.request.evaluate:
            self.trace.evaluations.append(float(self.engine.evaluate(batch)))
        with _window(watch, "backward", step, sources):
            loss = self.engine.backward(batch)
        inputs = (batch.inputs, batch.targets, batch.weights)
        before = Named.of(self.holdings(), inputs)
        if self.request.assess:
            self.trace.gradients.append(host_gradients(self.engine, self.request.case.workload))
        with _window(watch, "update", step, sources):
            norm = self.engine.update()
        if watch:
            watch.settle(step)
        after = Named.of(self.holdings(), inputs)
        self.trace.losses.append(float(loss))
        self.trace.norms.append(None if norm is None else float(norm))
        if self.request.assess:
            self.trace.parameters.append(host_parameters(self.engine, self.request.case.workload))
            for own in self.trace.buffers:
                own.append(host_copies(self.engine.buffers()))
        rank_progress.advance()
        return before, after


@contextlib.contextmanager
def _window(watch: Watch | None, name: str, step: int, sources: Sequence[TrafficSource]) -> Iterator[None]:
    for source in sources:
        source.start()
    try:
        with watch.window(name, step) if watch else contextlib.nullcontext():
            yield
    finally:
        for source in sources:
            source.stop()


def digests(traces: Sequence[Trace]) -> list[str]:
    """A hash of all parameters' bits of all replicas, before the first step and after each."""
    replicas = [tensor_digests(trace.parameters) for trace in traces]
    return [
        hashlib.blake2b("".join(repr(sorted(step.items())) for step in steps).encode(), digest_size=8).hexdigest()
        for steps in zip(*replicas, strict=True)
    ]
