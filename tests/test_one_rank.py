"""One rank, which is the first run of most who have one GPU: nothing is sent, and what is held is what is planned."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from meshmark.adapter.contract import Adapter
from meshmark.adapter.matrix import matrix
from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.adapters import ADAPTERS, ROSTER
from meshmark.judge.deviation import Assess
from meshmark.launch.launch import ForkserverLauncher
from meshmark.run.assemble import declare
from meshmark.run.runner import Runner, RunOptions
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.precision import Precision
from meshmark.spec.workload import workload
from meshmark.theory.traffic import METERED_STEP, departed


def cases(name: str) -> tuple[type[Adapter], list[Case], list[str]]:
    """Return an adapter, its cases of one rank that can run here, and why the others cannot."""
    adapter = load_adapter(builtin_adapters()[name])
    mini = workload("gpt-mini")
    found = [each for each in matrix({name: adapter}, [1], [mini], [Precision.FP32]) if isinstance(each, Case)]
    reasons = {case: adapter.refusal(case, "cpu", "gloo") for case in found}
    return adapter, [case for case in found if reasons[case] is None], [why for why in reasons.values() if why]


@pytest.fixture(scope="module")
def runner(launcher: ForkserverLauncher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    options = RunOptions(observed_steps=METERED_STEP + 1, assess=Assess.OFF)
    running = Runner(launcher, builtin_adapters(), options, tmp_path_factory.mktemp("results"))
    yield running
    running.close()


@pytest.mark.parametrize("name", [*ADAPTERS, *(pytest.param(name, marks=pytest.mark.slow) for name in ROSTER)])
def test_a_rank_that_is_alone_holds_and_sends_what_is_planned(runner: Runner, name: str) -> None:
    _, taken, refused = cases(name)
    if not taken:
        pytest.skip("; ".join(refused) or "no layout of one rank")
    for case in taken:
        record = runner.observe(case)
        memory, communication = record.verdict("memory"), record.verdict("communication")
        assert memory and memory.passed, (case.id, memory, record.outcome)
        assert communication is None or communication.passed, (case.id, communication)


def test_a_replica_that_is_alone_with_its_server_is_not_accused(launcher: ForkserverLauncher, tmp_path: Path) -> None:
    """Adagrad's first step is the sign of a gradient that is all rounding, so noise runs go on from other places."""
    case = Case(adapter="downpour", workload=workload("gpt-mini-sgd-downpour-p1f1"), layout=Layout(num_micro_batches=2))
    running = Runner(launcher, builtin_adapters(), RunOptions(), tmp_path)
    try:
        verdict = running.observe(case).verdict("equivalence")
    finally:
        running.close()
    assert verdict and verdict.passed, verdict


@pytest.mark.parametrize("name", [*ADAPTERS, *ROSTER])
def test_nothing_is_planned_that_one_rank_would_send_to_itself(name: str) -> None:
    adapter, taken, _ = cases(name)
    for case in taken:
        found = declare(adapter, case, [0], "cpu")
        assert not found.failed
        assert departed(found.traffic[0] or [], found.traffic_exceptions[0]) == []


@pytest.mark.parametrize(
    "name, told",
    [
        ("fsdp1", "on one, FSDP1 turns FULL_SHARD into NO_SHARD"),
        ("fabric-fsdp-shard-grad-op", "on one, FSDP1 turns SHARD_GRAD_OP into NO_SHARD"),
        ("fairscale-fsdp-noreshard", "on one, FairScale shards nothing"),
        ("accelerate-static", "takes several processes"),
        ("accelerate-loop-joined", "takes several processes"),
        ("fsdp1-no-shard", None),
        ("fsdp2-noreshard", None),
        ("accelerate", None),
    ],
)
def test_what_a_framework_does_not_do_alone_is_refused_with_the_reason(name: str, told: str | None) -> None:
    _, taken, refused = cases(name)
    assert bool(taken) == (told is None)
    assert told is None or all(told in why for why in refused)
