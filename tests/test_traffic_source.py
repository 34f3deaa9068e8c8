"""Traffic that PyTorch does not see is judged all the same, where its engine brings a source."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from meshmark.launch.launch import ForkserverLauncher
from meshmark.measure.readings import Collective
from meshmark.records.record import Record, Status
from meshmark.run.runner import Runner, RunOptions
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.workload import workload

NAMES = ("Sockets", "SendsTwice", "TellsNothing")
ADAPTERS = {name.lower(): f"tests.broken.sockets:{name}" for name in NAMES} | {"ddp": "meshmark.adapters.ddp:DDP"}
MODEL = workload("gpt-mini")


@pytest.fixture(scope="module")
def runner(launcher: ForkserverLauncher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    running = Runner(launcher, ADAPTERS, RunOptions(observed_steps=3), tmp_path_factory.mktemp("results"))
    yield running
    running.close()


def observe(runner: Runner, adapter: str) -> Record:
    record = runner.observe(Case(adapter=adapter, workload=MODEL, layout=Layout(dp=2, num_micro_batches=2)))
    assert record.outcome.status is Status.OK, record.outcome.message + record.outcome.traceback
    return record


def passed(record: Record) -> dict[str, bool]:
    return {verdict.suite: verdict.passed for verdict in record.verdicts}


def test_an_engine_over_its_own_sockets_passes_and_its_traffic_is_that_of_ddp(runner: Runner) -> None:
    record = observe(runner, "sockets")
    assert passed(record) == {"equivalence": True, "memory": True, "communication": True}
    (all_reduce,) = record.traffic.readings[0].asked
    assert all_reduce == Collective(
        kind="all_reduce", group_size=2, ranks=(0, 1), count=all_reduce.count, num_bytes=4 * MODEL.model.num_parameters
    )
    assert record.traffic.readings[0].issued == [all_reduce] and all_reduce.count > 10, "one a parameter"
    assert sum(c.num_bytes for c in observe(runner, "ddp").traffic.readings[0].asked) == all_reduce.num_bytes


@pytest.mark.parametrize("mutant", ["sendstwice", "tellsnothing"])
def test_too_much_and_unseen_traffic_fail_communication_alone(runner: Runner, mutant: str) -> None:
    assert passed(observe(runner, mutant)) == {"equivalence": True, "memory": True, "communication": False}
