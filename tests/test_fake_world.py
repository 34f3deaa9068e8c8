"""Single ranks of fake worlds hold and ask for what ranks of real worlds do, and one that holds too much is found."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshmark.adapter.contract import Feature
from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.cli.commands import main
from meshmark.errors import ResultsError
from meshmark.launch.launch import ForkserverLauncher
from meshmark.measure.readings import MemoryReading
from meshmark.pytest_plugin.plugin import expect_no_worse
from meshmark.records.record import Outcome, Record, Status
from meshmark.records.record_file import RecordFile, read_records
from meshmark.records.request import Request, Task
from meshmark.reference.own_model import describe
from meshmark.regression.baseline import accept
from meshmark.regression.baseline_gate import baseline_gate
from meshmark.regression.compare import compare
from meshmark.regression.gate import DEFAULT_GATE, parse_gate
from meshmark.regression.runs import by_case
from meshmark.report.render import write_report
from meshmark.report.results import results
from meshmark.report.scale import scale
from meshmark.run.assemble import declare
from meshmark.run.runner import Runner, RunOptions, fake_ranks
from meshmark.run.verdict import memory_totals
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout, Schedule
from meshmark.spec.workload import Workload, workload
from tests.factories import make_case, make_good, make_memory, make_memory_evidence

ROOT = Path(__file__).parent.parent
TWO = Layout(dp=2, num_micro_batches=2)
REAL = [
    ("ddp", TWO),
    ("fsdp2", dataclasses.replace(TWO, zero_stage=3)),
    ("deepspeed", dataclasses.replace(TWO, zero_stage=3)),
    ("tp", Layout(tp=2, num_micro_batches=2)),
    ("pipeline", Layout(pp=2, num_micro_batches=4, schedule=Schedule.ONE_F_ONE_B)),
    ("megatron-gpt", Layout(tp=2, sequence_parallel=True, num_micro_batches=2)),
    ("tp-fsdp2", Layout(dp=2, tp=2, zero_stage=3, num_micro_batches=2)),
]
"""Cases that a real world runs here as well."""
SLOW = {"megatron-gpt", "tp-fsdp2"}
"""Adapters that take long to launch. `make test-slow` has them."""


def asked(case: Case, task: Task, **changes: object) -> Request:
    made = Request(
        case=case,
        adapter=builtin_adapters()[case.adapter],
        task=task,
        device="cpu",
        backend="gloo",
        steps=5,
        assess=False,
        time_limit_seconds=120,
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("adapter", "layout"),
    [
        pytest.param(name, layout, marks=pytest.mark.slow if name in SLOW else (), id=f"{name}-{layout.id}")
        for name, layout in REAL
    ],
)
def test_a_rank_of_a_fake_world_holds_what_that_of_the_real_one_does(
    adapter: str, layout: Layout, launcher: ForkserverLauncher
) -> None:
    case = make_case(adapter, layout, workload=workload("gpt-mini"))
    real = launcher.launch(asked(case, Task.OBSERVE), case.world_size)
    assert not real.failures, real.failures[0].traceback
    for rank in (0, case.world_size - 1):
        fake = launcher.launch(asked(case, Task.FAKE_WORLD, fake_ranks=[rank]), 1)
        assert not fake.failures, fake.failures[0].traceback
        there, here = real.reports[rank], fake.reports[0]
        assert there.memory and here.memory and there.traffic and here.traffic and there.steps and here.steps
        expect_same(there.memory, here.memory)
        assert there.traffic.asked == here.traffic.asked
        assert there.steps.live_bytes == here.steps.live_bytes
        assert there.state_dtypes.items() >= here.state_dtypes.items()


def expect_same(real: MemoryReading, fake: MemoryReading) -> None:
    """To the byte; but at a peak gloo's thread may still have buffers that no collective needs any more, and where one
    of these had its address before, a scalar's category is that of its address."""
    assert fake.states == real.states
    assert fake.steady.total == real.steady.total and fake.previous_steady_bytes == real.previous_steady_bytes
    assert fake.held and real.held and fake.held.activations == real.held.activations
    assert real.peak.total - real.late_bytes <= fake.peak.total <= real.peak.total
    assert fake.late_bytes == 0, "there is no other thread"


@pytest.fixture
def runner(launcher: ForkserverLauncher, tmp_path: Path) -> Iterator[Runner]:
    mutants = {"keeps-a-bucket": "tests.broken.alone:KeepsABucket"}
    with contextlib.closing(Runner(launcher, builtin_adapters() | mutants, RunOptions(), tmp_path)) as made:
        yield made


def wide(layout: Layout) -> Workload:
    """Two rows a micro-batch, however many replicas there are."""
    return dataclasses.replace(workload("gpt-mini"), global_batch=2 * layout.dp * layout.num_micro_batches)


def failures(record: Record) -> list[str]:
    return [verdict.summary for verdict in record.verdicts if not verdict.passed]


@pytest.mark.parametrize(
    ("adapter", "layout"),
    [
        ("ddp", Layout(dp=512)),
        ("deepspeed", Layout(dp=8, zero_stage=3, num_micro_batches=2)),
        ("tp-fsdp2", Layout(dp=4, tp=4, zero_stage=3, num_micro_batches=2)),
    ],
    ids=["ddp", "deepspeed", "tp-fsdp2"],
)
def test_worlds_that_are_not_there_hold_and_ask_for_what_is_planned(
    adapter: str, layout: Layout, runner: Runner
) -> None:
    record = runner.observe_alone(make_case(adapter, layout, workload=wide(layout)))
    assert record.outcome.status is Status.OK, record.outcome.traceback
    assert {verdict.suite for verdict in record.verdicts} == {"memory", "communication"} and not failures(record)
    assert record.fake_ranks == [0, layout.world_size - 1] and len(record.memory.readings) == 2
    assert any("the world of" in text for text in record.not_judged)


def test_a_rank_that_holds_one_bucket_too_many_is_told_with_its_number(runner: Runner) -> None:
    layout = Layout(dp=8, num_micro_batches=2)
    case = make_case("keeps-a-bucket", layout, workload=wide(layout))
    record = runner.observe_alone(case)
    assert record.outcome.status is Status.OK, record.outcome.traceback
    (summary,) = failures(record)
    assert "on rank 7" in summary, "the only one that keeps it"


@pytest.mark.parametrize(("adapter", "stage"), [("ddp", 0), ("fsdp2", 3), ("deepspeed", 3), ("ddp-zero1", 1)])
def test_blocks_of_512_bytes_are_no_failure(adapter: str, stage: int, launcher: ForkserverLauncher) -> None:
    """CUDA's allocator rounds every size up, so that a scalar takes as much as 128. Real engines, whose allocator is
    made to tell blocks here, hold no more than is let pass."""
    case = make_case(adapter, Layout(dp=4, zero_stage=stage, num_micro_batches=2), workload=workload("gpt-mini"))
    blocks = f"tests.broken.rounded:{adapter.replace('-', '_')}"
    launched = launcher.launch(asked(case, Task.FAKE_WORLD, fake_ranks=[0], adapter=blocks), 1)
    assert not launched.failures, launched.failures[0].traceback
    reading = launched.reports[0].memory
    declared = declare(load_adapter(builtin_adapters()[adapter]), case, [0], "cuda")
    (plan,), (extra,) = declared.states, declared.extra_memory
    assert reading and plan and reading.rounding_bytes > 0
    for held in memory_totals(0, reading, plan, extra, on_cpu=False):
        assert held.measured - held.late - held.planned <= held.spare, held


def test_ranks_that_stand_for_a_world() -> None:
    assert fake_ranks(Layout(dp=8)) == [0, 7]
    layout = Layout(pp=4, dp=2, num_micro_batches=4)
    assert [layout.coordinates(rank).pp for rank in fake_ranks(layout)] == [0, 2, 3]
    assert fake_ranks(Layout(pp=2, num_micro_batches=4)) == [0, 1]


@pytest.mark.parametrize("name", ["horovod", "horovod-fp16", "downpour"])
def test_what_no_fake_world_can_show_is_refused_with_the_reason(name: str) -> None:
    adapter = load_adapter(builtin_adapters()[name])
    (told,) = adapter.capabilities.lacking(frozenset({Feature.FAKE_WORLD}))
    assert told.startswith("one rank of a fake world (")


def test_nobody_takes_a_fake_world_for_a_real_one() -> None:
    """It is in no table but its own, and in no comparison with a baseline."""
    fake = make_good(task=Task.FAKE_WORLD, fake_ranks=[0, 1])
    assert results([fake]) == [] and by_case([fake]) == {}
    (row,) = scale([fake])
    assert row["seen from"] == "0, 1" and row["ranks"] == fake.case.world_size
    assert scale([make_good()]) == []


def test_a_page_of_fake_worlds_alone_says_so(tmp_path: Path) -> None:
    with contextlib.closing(RecordFile(tmp_path)) as file:
        file.append(make_good(task=Task.FAKE_WORLD, fake_ranks=[0, 1]))
        refused = Outcome(status=Status.SKIPPED, message="it cannot")
        file.append(make_good(case=make_case("horovod"), task=Task.FAKE_WORLD, fake_ranks=[0, 1], outcome=refused))
    write_report(read_records(tmp_path), tmp_path / "page.md", "meshmark report")
    page = (tmp_path / "page.md").read_text()
    assert "fake worlds" in page.partition("\n")[0]
    assert "1 of 1 case holds and sends what is planned" in page and "1 not run" in page
    assert "Measured on single ranks of a fake world" in page and "it cannot" in page
    assert "trains correctly" not in page and "Throughput" not in page


def test_a_users_model_is_not_accused_of_the_scalars_of_its_loss(runner: Runner) -> None:
    """They are 2 % of two rows' activations, and are let pass in a real world too."""
    towers = describe(str(ROOT / "examples/workloads/two_towers.py:TwoTowers"))
    record = runner.observe_alone(make_case("ddp", Layout(dp=8, num_micro_batches=2), workload=towers))
    assert record.outcome.status is Status.OK, record.outcome.traceback
    assert not failures(record)


def test_show_names_the_ranks_that_were_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    eight = make_case("ddp", Layout(dp=8), workload=wide(Layout(dp=8)))
    fake = make_good(task=Task.FAKE_WORLD, fake_ranks=[0, 7], case=eight)
    assert len(fake.memory.readings) == 2
    with contextlib.closing(RecordFile(tmp_path)) as file:
        file.append(fake)
    assert main(["show", "ddp", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "peak, rank 7" in told and "sent, rank 7" in told and "rank 1" not in told


def test_no_baseline_and_no_comparison_takes_a_fake_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The case of a fake world has the id of the real one's."""
    monkeypatch.chdir(tmp_path)
    real, fake = make_good(), make_good(task=Task.FAKE_WORLD, fake_ranks=[0, 1])
    bigger = make_memory_evidence(readings=[make_memory(), make_memory(activations=2000)])
    for folder, records in (("alone", [fake]), ("both", [real, fake])):
        with contextlib.closing(RecordFile(tmp_path / folder)) as file:
            for record in records:
                file.append(record)
    with pytest.raises(ResultsError, match="no record of a real world"):
        accept(tmp_path / "alone", "alone")
    keeper = baseline_gate(accept(tmp_path / "both", "both"), parse_gate(DEFAULT_GATE))
    assert [record.task for runs in keeper.cases.values() for record in runs.observed] == [Task.OBSERVE]
    expect_no_worse(dataclasses.replace(fake, memory=bigger), "memory", keeper)
    with pytest.raises(ResultsError, match="fake worlds are held to the plan alone"):
        compare([fake], [fake])


def test_a_baseline_beside_fake_worlds_alone_is_a_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with contextlib.closing(RecordFile(tmp_path / "results")) as file:
        file.append(make_good())
    accept(tmp_path / "results", "here")
    words = [str(ROOT / "suites" / "test_scale.py"), "--world=8", "--global-batch=16", "--adapters=ddp"]
    asked_for = [*words, "--baseline=here", "--across"]
    done = subprocess.run([sys.executable, "-m", "pytest", *asked_for], capture_output=True, text=True, timeout=120)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR and "this session has only fake worlds" in done.stderr


_COLLECTIVES = """
    import torch
    import torch.distributed as dist
    from meshmark.measure.fake_world import Copies, fake_world

    with fake_world(3, 8, Copies.GLOO) as issued:
        assert dist.get_rank() == 3 and dist.get_world_size() == 8
        told = [None] * 8
        dist.all_gather_object(told, {"rank": 3})
        assert told == [{"rank": 3}] * 8
        reduced = torch.arange(4.0)
        dist.all_reduce(reduced)
        assert reduced.tolist() == [0, 1, 2, 3]
        part = torch.empty(4)
        dist.reduce_scatter_tensor(part, torch.arange(32.0))
        assert part.tolist() == [12, 13, 14, 15], "its own"
        whole = torch.zeros(32)
        dist.all_gather_into_tensor(whole, whole[12:16].fill_(7))
        assert whole.tolist() == [7] * 32, "from a view of its own place"
        group = dist.new_group([1, 3])
        received = torch.ones(2)
        (work,) = dist.batch_isend_irecv([dist.P2POp(dist.irecv, received, 1)])
        work.wait()
        assert received.tolist() == [0, 0]
        dist.barrier(group)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1, bias=False))
        model(torch.ones(2, 4)).sum().backward()
        assert model.module.weight.grad.tolist() == [[0.25] * 4], "a mean over eight, of which seven brought nothing"
        assert [(one.kind, one.ranks) for one in issued if one.ranks != tuple(range(8))] == [("barrier", (1, 3))]
    assert not dist.is_initialized()
"""


@pytest.mark.slow
def test_collectives_are_over_at_once() -> None:
    code = "import warnings; warnings.simplefilter('ignore', FutureWarning)\n" + textwrap.dedent(_COLLECTIVES)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
