"""A step of a noise run by a pipeline whose gradients are of older weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from meshmark.adapter.single import SingleEngine
from meshmark.algorithms.contract import GradientRule, Tensors
from meshmark.judge.trace import Trace, host_copies
from meshmark.reference.data import Batch
from meshmark.run.passes.engine_rule import EngineRule, put


def note_pipelined_step(
    gradient_rule: GradientRule,
    trace: Trace,
    rule: EngineRule,
    batch: Batch,
    arrange: Callable[[Batch], Batch],
) -> None:
    """Train one step by `gradient_rule` and note it in `trace`; `arrange` orders the rows of a part."""
    engine: SingleEngine = rule.engine
    trace.evaluations.append(float(engine.evaluate(arrange(batch))))

    def compute(parameters: Tensors, part: Batch, changed: Tensors | None) -> tuple[float, Tensors]:
        engine.optimizer.zero_grad()
        put(engine.parameters(), parameters)
        with nullcontext() if changed is None else _changed_between(engine, changed):
            loss = engine.backward(arrange(part))
        return float(loss), host_copies(engine.gradients())

    found = gradient_rule.step(trace.parameters, batch, compute)
    after = rule.step(trace.parameters[-1], found.gradients)
    there = found.after or after
    put(engine.parameters(), there)
    trace.losses.append(found.loss)
    trace.gradients.append(found.gradients)
    trace.left_out.append(0)
    trace.loss_scales.append(engine.loss_scale())
    trace.norms.append(rule.norm)
    trace.parameters.append(there)
    trace.buffers[0].append(host_copies(engine.buffers()))


@contextmanager
def _changed_between(engine: SingleEngine, values: Tensors) -> Iterator[None]:
    """Puts `values` in the place of what the forward pass has saved."""

    def change(*_: object) -> None:
        for name, parameter in engine.parameters().items():
            parameter.data.copy_(torch.from_numpy(values[name]))

    handle = engine.module.register_forward_hook(change)
    try:
        yield
    finally:
        handle.remove()
