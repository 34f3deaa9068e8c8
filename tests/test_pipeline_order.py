"""Tensors that wait, or were sent and are still held, when a pipeline's backward passes begin."""

from __future__ import annotations

import numpy as np
import pytest

from meshmark.adapters.pipeline import Pipeline
from meshmark.models.transformer import ModelSpec
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout, Schedule
from meshmark.spec.workload import Workload
from meshmark.theory.activations import chunk_in_flight, num_in_flight
from meshmark.theory.grid import SCHEDULES, make_grid
from meshmark.theory.memory import Overheads, memory, model_states
from meshmark.theory.peak import backward_passes
from meshmark.theory.recipe import recipe
from tests.factories import make_model

Seen = tuple[int, tuple[int, ...], int, int]
"""Chunk, passes, outputs, gradients."""


def seen(schedule: Schedule, pp: int, index: int, m: int, chunks: int = 1) -> list[Seen]:
    return [(b.chunk, b.passes, b.outputs, b.gradients) for b in backward_passes(schedule, pp, index, m, chunks)]


def test_one_f_one_b_keeps_its_last_messages() -> None:
    """Read off torch 2.13's `Schedule1F1B`: the list of its first phase's last sends, and of its last gradients."""
    assert seen(Schedule.ONE_F_ONE_B, 2, 0, 4) == [(0, (2,), 2, 0), (0, (2,), 3, 0), (0, (1,), 2, 0)]
    assert seen(Schedule.ONE_F_ONE_B, 2, 1, 4) == [(0, (1,), 0, 0), (0, (1,), 0, 1)]
    # Three in flight; what was sent last at first still waits for its backward pass when the second one runs.
    assert seen(Schedule.ONE_F_ONE_B, 4, 1, 3)[:2] == [(0, (3,), 3, 0), (0, (2,), 2, 1)]


def test_gpipe_keeps_every_message() -> None:
    assert seen(Schedule.GPIPE, 4, 1, 5) == [(0, (5,), 5, 0), (0, (4,), 5, 1)]
    assert seen(Schedule.GPIPE, 4, 3, 5) == [(0, (5,), 0, 0), (0, (4,), 0, 1)]


def test_the_runtime_of_several_chunks_keeps_every_message() -> None:
    """Ends with four outputs of the first chunk, and gradients of both: measured, 7 more than wait."""
    found = seen(Schedule.INTERLEAVED, 2, 1, 4, 2)
    assert found[0] == (1, (2, 1), 2, 0)
    assert (1, (2, 1), 4, 5) in found
    assert seen(Schedule.INTERLEAVED, 2, 0, 4, 2)[-1] == (0, (1, 0), 8, 4)


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("chunks", [1, 2])
def test_the_first_backward_pass_finds_what_the_papers_say(pp: int, chunks: int) -> None:
    """arXiv:2104.04473 sec. 2.2.2."""
    schedule = Schedule.INTERLEAVED if chunks > 1 else Schedule.ONE_F_ONE_B
    grid = make_grid(pp=[pp], num_micro_batches=[2 * pp], virtual_stages=[chunks], schedule=SCHEDULES.index(schedule))
    for index in range(pp):
        first = backward_passes(schedule, pp, index, 2 * pp, chunks)[0]
        flight = num_in_flight(grid, index)
        assert sum(first.passes) == flight[0]
        assert first.passes == tuple(int(chunk_in_flight(grid, flight, chunk)[0]) for chunk in range(chunks))
        assert first.chunk == chunks - 1 and not any(first.begun)


def peak(spec: ModelSpec, layout: Layout, rank: int, adapter: type[Pipeline] = Pipeline) -> float | None:
    work = Workload(name=spec.name, model=spec, global_batch=8, masked=False)
    case = Case(adapter="pipeline", workload=work, layout=layout)
    planned = model_states(case, rank, adapter.recipe(case))
    assert planned is not None
    return planned.peak


def planned_peak(spec: ModelSpec, layout: Layout, rank: int) -> float:
    found = peak(spec, layout, rank)
    assert found is not None
    return found


def test_every_schedule_has_a_peak_and_later_stages_a_lower_one() -> None:
    spec = make_model(num_layers=4, vocab_size=16)
    one = Layout(pp=4, num_micro_batches=4, schedule=Schedule.ONE_F_ONE_B)
    all_first = Layout(pp=4, num_micro_batches=4, schedule=Schedule.GPIPE)
    assert planned_peak(spec, one, 1) > planned_peak(spec, one, 2)
    assert planned_peak(spec, one, 2) < planned_peak(spec, all_first, 2)
    interleaved = Layout(pp=2, num_micro_batches=4, schedule=Schedule.INTERLEAVED, virtual_stages=2)
    plain = Layout(pp=2, num_micro_batches=4, schedule=Schedule.ONE_F_ONE_B)
    assert planned_peak(spec, interleaved, 0) > planned_peak(spec, plain, 0)

    class OtherOrder(Pipeline):
        """Runs chunks in another order."""

    assert peak(spec, interleaved, 0, OtherOrder) is None
    assert peak(spec, plain, 0, OtherOrder) == peak(spec, plain, 0)


def test_rows_of_several_schedules_are_planned_as_alone() -> None:
    spec, using = make_model(num_layers=4), recipe("eager")
    schedules = [SCHEDULES.index(s) for s in (Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED)]
    grid = make_grid(pp=2, schedule=schedules, num_micro_batches=[4, 8, 4], virtual_stages=[1, 1, 2])
    together = memory(spec, grid, using, Overheads()).total_bytes
    alone = [float(memory(spec, grid.take(np.array([i])), using, Overheads()).total_bytes[0]) for i in range(3)]
    assert np.allclose(together, alone)
    assert len(set(alone)) == 3
