"""Trains an engine and takes notes of all that it computes."""

from __future__ import annotations

import contextlib
import hashlib

from meshmark.adapter.engine import Engine
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
        if request.assess:
            self.trace.parameters.append(host_copies(engine.parameters()))
        if request.assess and request.case.workload.couples_rows:
            self.trace.buffers.append([host_copies(engine.buffers())])

    def train(self, step: int, watch: Watch | None = None) -> tuple[Named, Named]:
        """One step; returns what the engine holds before and after its update."""
        batch = make_batch(self.request.case.workload, step)
        if self.request.evaluate:
            self.trace.evaluations.append(float(self.engine.evaluate(batch)))
        with _window(watch, "backward", step):
            loss = self.engine.backward(batch)
        before = Named.of(self.engine.holdings())
        if self.request.assess:
            self.trace.gradients.append(host_copies(self.engine.gradients()))
        with _window(watch, "update", step):
            norm = self.engine.update()
        after = Named.of(self.engine.holdings())
        self.trace.losses.append(float(loss))
        self.trace.norms.append(None if norm is None else float(norm))
        if self.request.assess:
            self.trace.parameters.append(host_copies(self.engine.parameters()))
            for own in self.trace.buffers:
                own.append(host_copies(self.engine.buffers()))
        return before, after


def _window(watch: Watch | None, name: str, step: int) -> contextlib.AbstractContextManager[None]:
    return watch.window(name, step) if watch else contextlib.nullcontext()


def digests(trace: Trace) -> list[str]:
    """A hash of all parameters' bits, before the first step and after each."""
    return [
        hashlib.blake2b(repr(sorted(step.items())).encode(), digest_size=8).hexdigest()
        for step in tensor_digests(trace.parameters)
    ]
