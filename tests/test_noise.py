"""The noise floor on disk: read back as written, or measured anew and said so."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from meshmark.adapter.engine import Engine
from meshmark.adapters import ADAPTERS
from meshmark.judge.deviation import Quantity, TensorPrint, TruthPrint
from meshmark.judge.tolerance_model import NoiseFloor
from meshmark.judge.trace import digest
from meshmark.launch.cluster import Cluster, ClusterSpec
from meshmark.launch.launch import ForkserverLauncher, LaunchResult
from meshmark.passes.noise import (
    NUM_RUNS,
    TIME_LIMIT_SECONDS,
    noise_key,
    num_chunks,
    perturb,
    read_noise,
    vary_strides,
    write_noise,
)
from meshmark.records.rank_report import RankFailure
from meshmark.records.record import Status, code_digest_of
from meshmark.records.request import Request
from meshmark.reference.own_model import describe
from meshmark.run.runner import Runner, RunOptions
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.precision import Precision
from meshmark.spec.workload import workload
from tests.factories import make_case
from tests.test_own_model import ODD

FLOOR = NoiseFloor(
    runs=[
        {Quantity.parse("loss"): [1e-7, 2e-7], Quantity.parse("gradients/a"): [0.5, 0.25]},
        {Quantity.parse("loss"): [3e-7, 1e-9], Quantity.parse("gradients/a"): [0.125, 1.0]},
    ],
    truth_print=TruthPrint(
        loss=4.25,
        gradients={"a": TensorPrint(norm=0.5, projection=0.25)},
        updates={"a": TensorPrint(norm=0.125, projection=-0.5)},
    ),
)


def test_noise_comes_back_as_it_was_written(tmp_path: Path) -> None:
    write_noise(tmp_path / "noise" / "key.json", FLOOR)
    assert read_noise(tmp_path / "noise" / "key.json") == FLOOR
    assert [file.name for file in (tmp_path / "noise").iterdir()] == ["key.json"]
    with pytest.raises(FileNotFoundError):
        read_noise(tmp_path / "other.json")


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[:-5],
        lambda text: text.replace("0.5", "9.5"),
        lambda text: text.replace("a", "b"),
        lambda text: text.partition("\n")[2],
        lambda text: "{}",
    ],
    ids=["empty", "cut off", "one digit", "a name", "no digest", "other JSON"],
)
def test_damaged_noise_is_not_used(tmp_path: Path, damage: Callable[[str], str]) -> None:
    """Each of these but one would be read without an error, and most would pass for noise."""
    path = tmp_path / "key.json"
    write_noise(path, FLOOR)
    path.write_text(damage(path.read_text()))
    assert read_noise(path) is None


def test_noise_is_that_of_as_many_micro_batches_as_the_case_has_in_all() -> None:
    """Sums over more rows at once round otherwise: of several numbers together, the noisiest make the tail."""
    layouts = [Layout(), Layout(tp=2), Layout(dp=2), Layout(num_micro_batches=2), Layout(dp=2, num_micro_batches=4)]
    cases = [dataclasses.replace(make_case(), workload=workload("gpt-mini"), layout=layout) for layout in layouts]
    assert [num_chunks(case) for case in cases] == [1, 1, 2, 2, 8]
    assert [len({noise_key(case, 3) for case in cases[: i + 1]}) for i in range(5)] == [1, 1, 2, 2, 3]
    alone = dataclasses.replace(cases[-1], workload=workload("gpt-mini-local-sgd2"))
    rounded = dataclasses.replace(cases[-1], precision=Precision.BF16_REDUCE_BF16)
    assert num_chunks(alone) == num_chunks(rounded) == 4, "of each replica, of each rank that rounds what it sends"


def test_a_pipe_in_the_place_of_noise_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "key.json"
    os.mkfifo(path)
    assert read_noise(path) is None
    write_noise(path, FLOOR)
    assert read_noise(path) == FLOOR


@pytest.mark.slow
@pytest.mark.usefixtures("own_noise")
def test_a_damaged_file_is_measured_anew_and_the_record_says_so(launcher: ForkserverLauncher, tmp_path: Path) -> None:
    case, adapters, options = make_case(), {"ddp": "meshmark.adapters.ddp:DDP"}, RunOptions(observed_steps=3)
    runs = []
    for attempt in range(3):
        runner = Runner(launcher, adapters, options, tmp_path)
        runs.append(runner.observe(case))
        runner.close()
        (file,) = (tmp_path / "noise").iterdir()
        if attempt == 1:
            file.write_text(file.read_text()[:-9])
    first, second, third = runs
    assert first.remarks == second.remarks == []
    assert third.remarks == [f"the noise floor {file} was damaged, and has been measured anew"]
    assert first.equivalence.noise == second.equivalence.noise == third.equivalence.noise
    floor = read_noise(file)
    assert floor and len(floor.runs) == NUM_RUNS and floor.truth_print
    assert all(record.verdict("equivalence").passed for record in runs)  # type: ignore[union-attr]


class Refuses(ForkserverLauncher):
    """Keeps what it was asked for, and runs nothing."""

    asked: Request

    def launch(self, request: Request, world_size: int, *, alone: bool = False) -> LaunchResult:
        self.asked = request
        return LaunchResult(
            reports=[], failures=[RankFailure(rank=0, kind="slow", message="no end", time=0.0)], seconds=0.0
        )


@pytest.mark.parametrize("asked, given", [(8.0, TIME_LIMIT_SECONDS), (2 * TIME_LIMIT_SECONDS,) * 2])
def test_a_longer_time_limit_is_the_noise_s_too(tmp_path: Path, asked: float, given: float) -> None:
    """Its message tells the user to give one."""
    with Cluster(ClusterSpec()) as cluster:
        launcher = Refuses(cluster)
        runner = Runner(launcher, ADAPTERS, RunOptions(time_limit_seconds=asked), tmp_path)
        record = runner.observe(make_case())
        runner.close()
    assert record.outcome.status is Status.UNFINISHED
    assert "could not be measured: no end" in record.outcome.message
    assert launcher.asked.time_limit_seconds == given


def test_any_number_of_threads_perturbs_and_hashes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are shared out over the cores that a rank has."""
    found = []
    for num_ranks in ("1", "64"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", num_ranks)
        weight = torch.ones(2100, 1024)
        engine = SimpleNamespace(parameters=lambda weight=weight: {"weight": weight})
        perturb(cast(Engine, engine), make_case(), run=1)
        found.append((weight, digest(weight.numpy())))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]
    assert weight.unique().numel() > 1, "something was changed"
    weight.view(-1)[-1] += 1
    assert digest(weight.numpy()) != found[0][1]


def test_noise_of_a_user_s_model_is_that_of_its_code_wherever_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package of the project beside the workload's folder, as in a `src` layout."""
    (tmp_path / "src" / "hidden_layers").mkdir(parents=True)
    (helper := tmp_path / "src" / "hidden_layers" / "__init__.py").write_text("from torch import tanh as act\n")
    (tmp_path / "workloads").mkdir()
    (file := tmp_path / "workloads" / "mine.py").write_text(
        "from hidden_layers import act\n" + ODD.replace("torch.tanh(", "act(").replace("{cls}", "Plain")
    )
    monkeypatch.syspath_prepend(tmp_path / "src")
    case = Case(adapter="ddp", workload=describe(f"{file}:W"), layout=Layout(dp=2))
    before = noise_key(case, 3)
    assert noise_key(case, 3) == before
    helper.write_text("from torch import exp as act\n")
    code_digest_of.cache_clear()
    assert noise_key(case, 3) != before


def test_every_other_run_stores_parameters_row_by_row() -> None:
    """Frameworks that keep them in flat shards were called wrong for the format that a convolution then picks."""
    gray = torch.nn.Conv2d(1, 8, 3).to(memory_format=torch.channels_last)
    weight, strides, values = gray.weight, gray.weight.stride(), gray.weight.detach().clone()
    vary_strides(gray, 0)
    assert gray.weight.stride() == strides == (9, 1, 3, 1)
    vary_strides(gray, 1)
    assert gray.weight is weight and weight.stride() == (9, 9, 3, 1) and torch.equal(weight, values)
