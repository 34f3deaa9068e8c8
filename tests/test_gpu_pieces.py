"""Pieces of `make gpu`, tested without a GPU: which ones measure a noise floor, their processes and repeats, and who
may share a GPU."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _pytest.config.argparsing import Parser
from _pytest.mark.expression import Expression

from benchmarks import gpu
from benchmarks.gpu import LIMIT_SECONDS, MOST_FILES, PIECES, bring_back
from meshmark.adapter.contract import Adapter
from meshmark.adapter.engine import RankContext
from meshmark.adapter.matrix import matrix
from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.cli.options import chosen_adapters, chosen_layouts, chosen_workloads
from meshmark.conformance.scenario import plain_cells
from meshmark.errors import InputError
from meshmark.judge.deviation import LARGEST_FULL, Assess, Sample, assess_of, sample_of
from meshmark.launch import rank as rank_module
from meshmark.launch.cluster import Cluster, ClusterSpec
from meshmark.launch.launch import ForkserverLauncher, LaunchResult
from meshmark.launch.rank import RankInfo
from meshmark.models.module import parameter_shapes
from meshmark.passes import noise
from meshmark.pytest_plugin.selection import add_options, expect_gpus
from meshmark.records.rank_report import RankFailure
from meshmark.records.record import Status
from meshmark.records.record_file import RecordFile
from meshmark.records.request import Request, Task
from meshmark.run.runner import Runner, RunOptions, num_processes
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.precision import Precision, precision
from meshmark.spec.workload import workload
from meshmark.theory.memory import model_states
from tests.factories import make_case, make_good

SUITES = ("equivalence", "memory", "communication", "throughput", "scale")
JUDGED = {"equivalence", "memory", "communication"}
"""Suites whose pass is held against a noise floor."""


SUITE_PIECES = {name: list(piece.suites) for name, piece in PIECES.items() if piece.suites}
"""By name: the words for pytest of each piece of `make gpu` that runs the suites."""


def asked(words: list[str]) -> tuple[Any, set[str]]:
    """Meshmark's options among them, and the suites that `-k` lets run."""
    parser = Parser(_ispytest=True)
    add_options(parser)
    parser.addoption("--keyword", default="test")
    chosen, _ = parser.parse_known_and_unknown_args(["--keyword" if word == "-k" else word for word in words])
    expression = Expression.compile(chosen.keyword)
    return chosen, {suite for suite in SUITES if expression.evaluate(functools.partial(_is_in, f"test_{suite}"))}


def _is_in(test: str, keyword: str, **_: object) -> bool:
    return keyword in test


def test_the_pieces_are_found() -> None:
    assert len(SUITE_PIECES) >= 6
    assert asked(SUITE_PIECES["memory"])[1] == {"memory"} and asked(SUITE_PIECES["ladder"])[1] == {"throughput"}
    assert asked(SUITE_PIECES["correct"])[1] >= JUDGED and asked(SUITE_PIECES["scale"])[1] == {"scale"}


def test_all_pieces_end_within_half_an_hour() -> None:
    """That is as long as a machine is lent; a command there is ended after ten minutes."""
    assert sum(piece.minutes for piece in PIECES.values()) <= 30
    assert all(0 < piece.minutes * 60 < LIMIT_SECONDS for piece in PIECES.values())


def test_pieces_come_by_their_value() -> None:
    order = ["start", "correct", "nccl", "memory", "scale", "scale-7b", "ladder", "calibrate"]
    assert list(PIECES)[: len(order)] == order and list(PIECES).index("roster") > list(PIECES).index("calibrate")


@pytest.mark.parametrize("name", [name for name, words in SUITE_PIECES.items() if "gpt-1.3b" in "".join(words)])
def test_every_case_of_a_large_model_exists(name: str) -> None:
    """Skips show nothing: each adapter that a piece names takes a layout of it, in its precision."""
    chosen, _ = asked(SUITE_PIECES[name])
    worlds, layouts = chosen_layouts(chosen.world, chosen.layouts)
    workloads = chosen_workloads(chosen.workload, chosen.model, chosen.global_batch)
    adapters = {each: load_adapter(target) for each, target in chosen_adapters(chosen.adapters, []).items()}
    precisions = [precision(text) for text in chosen.precision.split(",")]
    cells = matrix(adapters, worlds, workloads, precisions, layouts)
    named = set(chosen.adapters.split(",")) if chosen.adapters else {"single", "ddp", "fsdp2"}
    runs = {cell.adapter for cell in cells if isinstance(cell, Case) and takes_on_cuda(adapters[cell.adapter], cell)}
    assert named <= runs


def takes_on_cuda(adapter: type[Adapter], case: Case) -> bool:
    return adapter.supports(case, "cuda", "nccl") is None


def test_states_of_a_rank_fit_the_smallest_gpu() -> None:
    """By theory, an H100's 80 GB hold what every fake world's first rank does, with a quarter of them for the rest."""
    for name in ("scale", "scale-7b"):
        chosen, _ = asked(SUITE_PIECES[name])
        worlds, layouts = chosen_layouts(chosen.world, chosen.layouts)
        adapters = {each: load_adapter(target) for each, target in chosen_adapters(chosen.adapters, []).items()}
        workloads = chosen_workloads(chosen.workload, chosen.model, chosen.global_batch)
        for cell in matrix(adapters, worlds, workloads, [Precision.BF16], layouts):
            if isinstance(cell, Case) and takes_on_cuda(adapters[cell.adapter], cell):
                plan = model_states(cell, 0, adapters[cell.adapter].recipe(cell))
                assert plan and plan.parameters + plan.gradients + plan.optimizer_states < 60e9, cell.id


@pytest.mark.slow
def test_what_to_bring_back_is_a_few_compressed_files(tmp_path: Path) -> None:
    file = RecordFile(tmp_path)
    file.append(make_good())
    file.close()
    (tmp_path / "here.json").write_text("{}")
    (tmp_path / "fixtures").mkdir()
    (tmp_path / "fixtures" / "driver.txt").write_text("550")
    bring_back(tmp_path)
    names = sorted(path.name for path in (tmp_path / "bring").iterdir())
    assert names == ["fixtures.tar.gz", "here.json", "records.jsonl.gz", "report.tar.gz"]
    packed = gzip.decompress((tmp_path / "bring" / "records.jsonl.gz").read_bytes())
    assert packed == (tmp_path / "records.jsonl").read_bytes()


def test_nothing_to_bring_back_is_larger_than_what_may_leave(tmp_path: Path) -> None:
    rng = random.Random(0)
    (tmp_path / "here.json").write_bytes(rng.randbytes(2500))
    (tmp_path / "fixtures").mkdir()
    (tmp_path / "fixtures" / "dump").write_bytes(rng.randbytes(20_000))
    bring_back(tmp_path, most_bytes=1000)
    files = sorted((tmp_path / "bring").iterdir())
    assert len(files) == MOST_FILES and all(file.stat().st_size <= 1000 for file in files)
    parts = [file for file in files if file.name.startswith("here")]
    assert b"".join(part.read_bytes() for part in parts) == (tmp_path / "here.json").read_bytes()


@pytest.mark.slow
def test_a_machine_without_a_gpu_is_red_at_its_first_piece(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--out", str(tmp_path)]) == 1
    printed = capfd.readouterr().out
    assert "red: start" in printed and "--- correct" not in printed
    assert "torch" in (tmp_path / "machine.txt").read_text()


@pytest.mark.parametrize("name", SUITE_PIECES)
def test_no_piece_measures_a_noise_floor_of_a_large_model(name: str) -> None:
    """That takes longer than a piece has, and most of the disk of a machine that is lent."""
    chosen, suites = asked(SUITE_PIECES[name])
    for text in chosen.workload.split(","):
        case = make_case("ddp", Layout(), workload=workload(text))
        how = assess_of(case, Assess(chosen.assess) if chosen.assess else None)
        large = case.workload.model.num_parameters > LARGEST_FULL
        assert not (large and suites & JUDGED and how is not Assess.OFF), f"{name} judges {text}: {how}"


FREE_DISK = 64 * 2**30
"""Free disk of a machine that is lent."""
RECORD_BYTES = 2**20
"""Bound of a record with its evidence and its noise floor's file: more than any that is committed takes."""
NUM_CLAUSES = 40
"""More than there are."""
CHECKPOINT_BYTES = 16
"""A parameter: a clause that saves writes float32 weights and both moments, and some frameworks the gradients too."""


def largest_on_disk(words: list[str]) -> int:
    """Return the bytes that a piece's cases leave, and the tensors that are there at once beside them.

    One case runs after the other, and a run's tensors are removed when it is judged. A noise floor runs as many at once
    as `num_processes` says of one GPU.
    """
    chosen, suites = asked(words)
    worlds, layouts = chosen_layouts(chosen.world, chosen.layouts)
    adapters = {each: load_adapter(target) for each, target in chosen_adapters(chosen.adapters, []).items()}
    workloads = chosen_workloads(chosen.workload, chosen.model, chosen.global_batch)
    precisions = [precision(text) for text in chosen.precision.split(",")]
    cases = [c for c in matrix(adapters, worlds, workloads, precisions, layouts) if isinstance(c, Case)]
    assert cases
    at_once = 0
    for case in cases:
        how = assess_of(case, Assess(chosen.assess) if chosen.assess else None)
        if how is Assess.SAMPLED and suites & JUDGED:
            sample, size = sample_of(case), case.workload.model.num_parameters
            request = make_request(sample=sample)
            at_once = max(at_once, num_processes(request, 1) * sample.stored_bytes(size))
        if chosen.conformance:
            at_once = max(at_once, 2 * CHECKPOINT_BYTES * case.workload.model.num_parameters)
    files = len(cases) * (len(suites) + (NUM_CLAUSES if chosen.conformance else 0)) * RECORD_BYTES
    return files + at_once


def test_what_the_pieces_write_fits_the_disk_of_a_lent_machine() -> None:
    """All of them into one folder of results. A noise floor of gpt-1.3b would take most of what is free alone, and with
    two processes more than it: the memory piece did so once."""
    assert sum(largest_on_disk(words) for words in SUITE_PIECES.values()) < FREE_DISK // 2
    memory = [word for word in SUITE_PIECES["memory"] if word != "--assess=off"]
    assert FREE_DISK // 3 < largest_on_disk(memory) < FREE_DISK


def test_a_noise_run_of_a_sample_takes_the_bytes_that_are_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Weighed(Exception):
        pass

    def weigh(*_: object) -> None:
        raise Weighed(sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()))

    monkeypatch.setattr(noise, "assess_pieces", weigh)
    sample = Sample(noise_runs=1)
    case = make_case("single", Layout(), workload=workload("gpt-tiny"))
    request = make_request(case=case, sample=sample, device="cpu", assess=True)
    context = RankContext(rank=0, world_size=1, device=torch.device("cpu"), backend="gloo", scratch=tmp_path)
    with pytest.raises(Weighed) as weighed:
        noise.measure_noise(request, load_adapter(builtin_adapters()["single"])(), context, 0.0)
    num_tensors = len(parameter_shapes(case.workload.model))
    headers = 128 * num_tensors * (2 * sample.steps + 1)
    assert weighed.value.args[0] == sample.stored_bytes(case.workload.model.num_parameters) + headers


def make_request(name: str = "gpt-1.3b", **changes: Any) -> Request:  # noqa: ANN401
    options = RunOptions(device="cuda", num_gpus=1)
    runner = SimpleNamespace(options=options, adapters=builtin_adapters(), _backend=lambda case: "gloo")
    case = make_case("ddp", Layout(), workload=workload(name), precision=Precision.BF16)
    asked: Request = Runner.request(runner, Task.OBSERVE, case)  # type: ignore[arg-type]
    return dataclasses.replace(asked, **changes)


@pytest.mark.parametrize(
    "request_, gpus, processes",
    [
        (make_request(), 1, 1),
        (make_request(), 2, 2),
        (make_request(), 8, 6),
        (make_request(sample=None), 8, 2),
        (make_request(sample=None), 1, 1),
        (make_request("gpt-tiny"), 1, 2),
        (make_request(device="cpu"), 0, 2),
    ],
    ids=["one GPU", "two", "eight", "eight in full", "in full", "a small model", "a CPU"],
)
def test_no_two_noise_runs_of_a_large_model_share_a_gpu(request_: Request, gpus: int, processes: int) -> None:
    """Two of 1.3 billion parameters need 94 GB. A small model's runs wait for launches more than for memory."""
    assert num_processes(request_, gpus) == processes


class Fails(ForkserverLauncher):
    """Runs nothing, and says what became of every rank that it was to run."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self.asked: list[tuple[Request, int]] = []
        self.kind: str = Status.OOM

    def launch(self, request: Request, world_size: int, *, alone: bool = False) -> LaunchResult:
        self.asked.append((request, world_size))
        failure = RankFailure(rank=0, kind=self.kind, message="out of memory", time=0.0)
        return LaunchResult(reports=[], failures=[failure], seconds=0.0)


@pytest.mark.usefixtures("own_noise")
@pytest.mark.parametrize("kind", [Status.OOM, Status.NO_SPACE])
def test_a_tolerance_model_that_fails_is_launched_once(tmp_path: Path, kind: Status) -> None:
    """Every case of its workload and precision tells why; another precision's is tried."""
    with Cluster(ClusterSpec()) as cluster:
        launcher = Fails(cluster)
        launcher.kind = kind
        runner = Runner(launcher, builtin_adapters(), RunOptions(), tmp_path)
        cases = [
            make_case(name, Layout(dp=2, num_micro_batches=2, zero_stage=stage))
            for name, stage in (("ddp", 0), ("fsdp2", 3), ("deepspeed", 1))
        ]
        outcomes = [runner.observe(case).outcome for case in cases]
        assert [request.task for request, _ in launcher.asked] == [Task.NOISE]
        runner.observe(dataclasses.replace(cases[0], precision=Precision.BF16))
        assert len(launcher.asked) == 2
        runner.close()
    assert len({(outcome.status, outcome.message) for outcome in outcomes}) == 1
    assert outcomes[0].status is (Status.NO_SPACE if kind is Status.NO_SPACE else Status.UNFINISHED)
    assert "could not be measured: out of memory" in outcomes[0].message


def make_selection(**options: Any) -> Any:  # noqa: ANN401
    given = {"device": "cuda", "backend": "nccl", "num_gpus": 1} | options
    cluster = given.pop("cluster", ClusterSpec())
    return SimpleNamespace(options=RunOptions(**given), cluster=cluster)


FOUR = ClusterSpec(nnodes=4, node_rank=0, rdzv="10.0.0.1:29000", tasks_per_node=2)
"""Four tasks on two nodes."""


@pytest.mark.parametrize(
    "selection, worlds, told",
    [
        (
            make_selection(),
            {1, 2},
            "2 ranks of a node with 1 GPU over nccl.*: give --world 1 or less, --oversubscribe .*, or --backend gloo",
        ),
        (make_selection(num_gpus=4), {8}, "8 ranks of a node with 4 GPUs over nccl.*: give --world 4 or less"),
        (make_selection(num_gpus=1, cluster=FOUR), {4}, "2 ranks of a node with 1 GPU.*: give --world 2 or less"),
        (
            make_selection(num_gpus=1, cluster=dataclasses.replace(FOUR, gpus_by_task=True)),
            {8},
            "2 ranks of a node with 1 GPU.*: give --world 4 or less",
        ),
        (make_selection(device="cpu"), {1}, "--backend nccl with --device cpu: NCCL sends tensors of GPUs alone"),
    ],
    ids=["one", "four", "two nodes", "GPUs by task", "no GPU"],
)
def test_ranks_that_share_a_gpu_are_refused_under_nccl(selection: Any, worlds: set[int], told: str) -> None:  # noqa: ANN401
    """NCCL itself ends in `invalid usage` minutes later, once for every case."""
    with pytest.raises(InputError, match=told):
        expect_gpus(selection, worlds)


def test_ranks_share_a_gpu_under_nccl_where_the_run_asks_for_it(tmp_path: Path) -> None:
    expect_gpus(make_selection(backend=None, oversubscribe=True), {1, 2, 8})
    expect_gpus(make_selection(oversubscribe=True), {1, 2, 8})
    for device, backend in (("cpu", None), ("cuda", "gloo")):
        with pytest.raises(InputError, match="for ranks that share GPUs over nccl"):
            expect_gpus(make_selection(device=device, backend=backend, oversubscribe=True), {2})
    with Cluster(ClusterSpec()) as cluster:
        options = RunOptions(device="cuda", num_gpus=1, oversubscribe=True)
        runner = Runner(ForkserverLauncher(cluster), builtin_adapters(), options, tmp_path)
        case = make_case("ddp", layout=Layout(dp=2))
        assert runner.refusal(case) is None and runner.request(Task.OBSERVE, case).backend == "nccl"
        runner.close()


@pytest.mark.parametrize(
    "gpus, ranks, hosts", [(1, 2, ["a-0", "a-1"]), (2, 4, ["a-0", "a-0", "a-1", "a-1"]), (2, 2, ["a", "a"])]
)
def test_ranks_of_one_gpu_are_hosts_of_their_own(
    gpus: int, ranks: int, hosts: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """NCCL refuses two ranks of one GPU on one host, by this name."""
    chosen = list[int]()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen[-1])
    request = make_request(device="cuda", backend="nccl")
    for rank in range(ranks):
        monkeypatch.setenv("NCCL_HOSTID", "a")
        place = RankInfo(
            rank=rank,
            local_rank=rank,
            local_world_size=ranks,
            world_size=ranks,
            host="h",
            port=0,
            prefix="",
            folder=tmp_path,
        )
        rank_module._prepare(request, place, rank)
        assert os.environ["NCCL_HOSTID"] == hosts[rank] and chosen[-1] == rank % gpus


def test_what_nccl_and_gloo_can_serve_is_not_refused() -> None:
    expect_gpus(make_selection(), {1})
    expect_gpus(make_selection(backend="gloo"), {1, 2, 8})
    expect_gpus(make_selection(backend=None), {1, 2, 8})
    expect_gpus(make_selection(num_gpus=8), {1, 2, 8})
    expect_gpus(make_selection(cluster=dataclasses.replace(FOUR, gpus_by_task=True)), {4})


@pytest.mark.parametrize("name", builtin_adapters())
def test_refusals_of_every_adapter_by_backend_and_gpus(name: str, tmp_path: Path) -> None:
    """Over nccl where ranks outnumber GPUs, with the reason, whatever the adapter; else as the adapter itself says of
    the backend that is taken."""
    adapter = load_adapter(builtin_adapters()[name])
    with Cluster(ClusterSpec()) as cluster:
        launcher = ForkserverLauncher(cluster)
        for backend, gpus, taken in (
            ("nccl", 1, None),
            ("nccl", 2, "nccl"),
            ("gloo", 1, "gloo"),
            (None, 1, "gloo"),
            (None, 2, "nccl"),
        ):
            options = RunOptions(device="cuda", backend=backend, num_gpus=gpus)
            runner = Runner(launcher, builtin_adapters(), options, tmp_path)
            for case in plain_cells(name, adapter, 2):
                if case.world_size != 2:
                    continue
                expected = adapter.refusal(case, "cuda", taken) if taken else "2 ranks of a node with 1 GPU over nccl"
                found = runner.refusal(case)
                assert found == expected if taken else (found or "").startswith(expected or "")
            runner.close()
