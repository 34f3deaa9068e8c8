"""Train an engine, and note everything that it computes."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from meshmark import rank_progress
from meshmark.adapter.engine import Engine
from meshmark.adapter.holdings import Holdings
from meshmark.adapter.traffic_source import TrafficSource
from meshmark.judge.deviation import Tensors
from meshmark.judge.engine_tensors import host_gradients, host_parameters, local_holdings
from meshmark.judge.gather import all_gather_json
from meshmark.judge.replicas import replica_of
from meshmark.judge.trace import Trace, host_copies, tensor_digests
from meshmark.measure.memory import Named
from meshmark.measure.watch import Watch
from meshmark.records.request import Request
from meshmark.reference.data import Batch, make_batch
from meshmark.spec.precision import LossScaling
from meshmark.spec.workload import Workload
from meshmark.text import describe_error

MOST_LEFT_OUT = 24
"""Largest number of attempts at one step. Each halves the loss scale; GradScaler starts at 2^16, which is then far
below one.
"""


class Notebook(Protocol):
    """Storage of the tensors that a rank notes."""

    def parameters(self, engine: Engine, workload: Workload, step: int) -> Tensors:
        """Return the parameters before `step`. A collective call."""

    def gradients(self, engine: Engine, workload: Workload, step: int) -> Tensors:
        """Return the gradients of `step`. A collective call."""


class HostNotebook:
    """Notebook that keeps all tensors in this rank's memory."""

    def parameters(self, engine: Engine, workload: Workload, step: int) -> Tensors:
        return host_parameters(engine, workload)

    def gradients(self, engine: Engine, workload: Workload, step: int) -> Tensors:
        return host_gradients(engine, workload)


class Observer:
    """Notes of a run on one rank."""

    def __init__(
        self, engine: Engine, request: Request, *, retries: bool = True, notebook: Notebook | None = None
    ) -> None:
        """Begin the notes.

        `retries`: whether to try a step again that dynamic loss scaling skipped. `notebook`: this rank's memory by
        default.
        """
        self.engine, self.request, self.retries = engine, request, retries
        self.notebook: Notebook = notebook or HostNotebook()
        self.trace = Trace(replica=replica_of(request.case.layout, dist.get_rank()) if dist.is_initialized() else 0)
        self.unheld = ""
        """Error of `holdings()`, if any. Losses, gradients and parameters do not depend on it."""
        self.left_out = 0
        """Number of steps that dynamic loss scaling skipped, and that were tried again."""
        self.sources: Sequence[TrafficSource] = ()
        """Sources of the last step's traffic."""
        if request.assess:
            self.trace.parameters.append(self.notebook.parameters(engine, request.case.workload, 0))
        if request.assess and request.case.workload.couples_rows:
            self.trace.buffers.append([host_copies(engine.buffers())])

    def holdings(self) -> Holdings:
        """Return what the engine holds. If it fails, return empty holdings and note the reason in `unheld`."""
        try:
            return local_holdings(self.engine)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            self.unheld = self.unheld or f"Engine.holdings raised {describe_error(error)}"
            return Holdings()

    def train(
        self, step: int, watch: Watch | None = None, meter: Callable[[], Sequence[TrafficSource]] = tuple
    ) -> tuple[Named, Named]:
        """Train one step, and return what the engine holds before and after its update.

        `meter` makes the sources that count the step's traffic. A step that dynamic loss scaling skips, as it should
        if a gradient overflows, is tried again: the run is judged by the steps that were taken.
        """
        batch = make_batch(self.request.case.workload, step)
        if self.request.evaluate:
            self.trace.evaluations.append(float(self.engine.evaluate(batch)))
        attempt, left_out = self._attempt(batch, step, watch, meter()), 0
        while left_out < MOST_LEFT_OUT and self._judges(step) and self._is_left_out(attempt):
            left_out += 1
            if not self.retries:
                break
            if watch:
                watch.forget(step)
            attempt = self._attempt(batch, step, watch, meter())
        self.left_out += left_out
        self.trace.left_out.append(left_out)
        self._note(attempt, self._judges(step))
        rank_progress.advance()
        return attempt.before, attempt.after

    def _judges(self, step: int) -> bool:
        """Return whether the results of `step` are compared with the truth."""
        return self.request.assess and (self.request.sample is None or step < self.request.sample.steps)

    def _attempt(self, batch: Batch, step: int, watch: Watch | None, sources: Sequence[TrafficSource]) -> _Attempt:
        judges, workload, self.sources = self._judges(step), self.request.case.workload, sources
        with _window(watch, "backward", step, sources):
            loss = self.engine.backward(batch)
        inputs = batch.tensors()
        before = Named.of(self.holdings(), inputs)
        gradients = self.notebook.gradients(self.engine, workload, step) if judges else {}
        loss_scale = self.engine.loss_scale()
        with _window(watch, "update", step, sources):
            norm = self.engine.update()
        if watch:
            watch.settle(step)
        return _Attempt(
            loss=float(loss),
            norm=None if norm is None else float(norm),
            before=before,
            after=Named.of(self.holdings(), inputs),
            gradients=gradients,
            loss_scale=loss_scale,
            parameters=self.notebook.parameters(self.engine, workload, step + 1) if judges else {},
        )

    def _is_left_out(self, attempt: _Attempt) -> bool:
        """Return whether a gradient overflowed on some rank and no parameter moved on any rank.

        A collective call under dynamic loss scaling.
        """
        if self.request.case.precision.loss_scaling is not LossScaling.DYNAMIC:
            return False
        stood = self.trace.parameters[-1]
        overflows = not all(np.isfinite(gradient).all() for gradient in attempt.gradients.values())
        moved = not all(np.array_equal(stood[name], new) for name, new in attempt.parameters.items())
        everyone = all_gather_json([overflows, moved])
        return any(o for o, _ in everyone) and not any(m for _, m in everyone)

    def _note(self, attempt: _Attempt, judges: bool) -> None:
        self.trace.losses.append(attempt.loss)
        self.trace.norms.append(attempt.norm)
        self.trace.loss_scales.append(attempt.loss_scale)
        if judges:
            self.trace.gradients.append(attempt.gradients)
            self.trace.parameters.append(attempt.parameters)
            self.trace.versions.append(self.engine.server_versions())
            for own in self.trace.buffers:
                own.append(host_copies(self.engine.buffers()))


@dataclass(frozen=True, kw_only=True)
class _Attempt:
    """The results of one attempt at a step."""

    loss: float
    norm: float | None
    before: Named
    """Parameters of the engine before the update."""
    after: Named
    gradients: Tensors
    """Gradients. Empty if nothing is assessed, like `parameters`."""
    loss_scale: float
    parameters: Tensors


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
    """Return hashes of the bits of all parameters of all replicas, before the first step and after each."""
    replicas = [tensor_digests(trace.parameters) for trace in traces]
    return [
        hashlib.blake2b("".join(repr(sorted(step.items())) for step in steps).encode(), digest_size=8).hexdigest()
        for steps in zip(*replicas, strict=True)
    ]
