"""A step of a noise run by an algorithm whose gradients are of older weights."""

from __future__ import annotations

from collections.abc import Callable

from meshmark.adapter.single import SingleEngine
from meshmark.algorithms.replicas import Tensors
from meshmark.algorithms.stale import stale_step
from meshmark.judge.trace import Trace, host_copies
from meshmark.reference.data import Batch
from meshmark.run.passes.engine_rule import EngineRule, put
from meshmark.spec.case import Case


def note_stale_step(
    case: Case, trace: Trace, rule: EngineRule, batch: Batch, arrange: Callable[[Batch], Batch]
) -> None:
    """`arrange`: the run's order of a part's rows."""
    engine: SingleEngine = rule.engine
    trace.evaluations.append(float(engine.evaluate(arrange(batch))))

    def compute(parameters: Tensors, part: Batch, newest: Tensors) -> tuple[float, Tensors]:
        engine.optimizer.zero_grad()
        put(engine.parameters(), parameters)
        loss = engine.backward(arrange(part))
        return float(loss), host_copies(engine.gradients())

    found = stale_step(case.workload, case.layout, trace.parameters, batch, compute)
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
