"""Runs that are computed together must be correct runs, and their truth the truth."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from torch import Tensor

from benchmarks.batched import Traces, assess_batched, train, train_batched
from benchmarks.problems import SMALL, varied
from meshmark.algorithms.contract import Tensors
from meshmark.judge.tolerance_model import noise_run
from meshmark.judge.trace import Trace
from meshmark.judge.truth import assess
from meshmark.passes.noise import num_ways

STEPS = 2


def one(stacked: Mapping[str, Tensor], run: int) -> Tensors:
    return {name: tensor[run].numpy() for name, tensor in stacked.items()}


def trace_of(traces: Traces, run: int) -> Trace:
    return Trace(
        parameters=[one(step, run) for step in traces.parameters],
        gradients=[one(step, run) for step in traces.gradients],
        losses=[float(losses[run]) for losses in traces.losses],
        norms=[float(norms[run]) for norms in traces.norms] or [None] * STEPS,
    )


@pytest.mark.parametrize(
    "index", [0, 1, 2, 5, 7], ids=lambda index: f"{SMALL[index].workload.id} {SMALL[index].precision}"
)
def test_a_run_of_many_is_assessed_as_it_is_alone(index: int) -> None:
    """And within its precision's rounding of the truth: clipped, decayed, every row once."""
    case = varied(SMALL[index], 2)
    traces = train(case, STEPS, range(3))
    together, start = assess_batched(traces, case.workload), one(traces.parameters[0], 1)
    alone = assess(trace_of(traces, 1), case.workload, start=start)
    for quantity, steps in together[1].items():
        for own, right in zip(steps, alone[quantity], strict=True):
            assert own.distance == pytest.approx(right.distance, rel=1e-6, abs=1e-13 * right.scale)
            if right.scale > 1e-12:  # else it is zero by mathematics, and has no multiple
                assert own.factor == pytest.approx(right.factor, rel=1e-12)
    loss = [
        deviation.distance / deviation.scale
        for q, steps in together[1].items()
        if str(q) == "loss"
        for deviation in steps
    ]
    assert max(loss) < 16 * 2.0**-case.precision.compute.mantissa_bits


def test_no_two_runs_of_many_are_the_same_and_all_are_counted() -> None:
    for index in (0, 7):
        case = varied(SMALL[index], 1)
        runs = train_batched(case, STEPS, 6)
        if num_ways(case) == 2:  # any part of the runs, as noise runs are, is of both
            (first, *_) = assess_batched(train(case, STEPS, range(1, 6, 2), cast_weights=True), case.workload)
            assert runs[1] == noise_run(first, case.precision) != runs[2]
        losses = [tuple(v for q, steps in run.items() if q.kind == "gradients" for v in steps) for run in runs]
        assert len(set(losses)) == 6
        assert all(np.isfinite(loss).all() for loss in losses)
