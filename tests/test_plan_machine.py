"""The machine that a plan is for: datasheets, a person's file, options that change one; and what fits tightly."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from meshmark.cli.commands import main
from meshmark.models.transformer import model_spec
from meshmark.plan.frameworks import FRAMEWORKS
from meshmark.plan.gpu_file import gpu_template, read_gpu
from meshmark.plan.prediction import MEMORY_ERROR, predict_grid
from meshmark.plan.rates import rates
from meshmark.plan.search import search
from meshmark.plan.stacks import rates_for
from meshmark.spec.hardware import GIB, GPUS, gpu
from meshmark.theory.grid import SearchSpace, make_grid
from meshmark.theory.recipe import RECIPES, recipe


@pytest.mark.parametrize("name", sorted(GPUS))
def test_a_template_is_read_back_as_the_gpu_it_was_made_of(name: str, tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text(gpu_template(gpu(name), rates_for(gpu(name))))
    written = read_gpu(tmp_path / "one.toml")
    assert rates_for(written.gpu, nearest=written.rates) == rates_for(gpu(name))
    again, known = dataclasses.asdict(written.gpu), dataclasses.asdict(gpu(name))
    for fields in (again, known):
        fields["host"] = fields["host"] or {}
        fields |= {f"peak {dtype}": flops for dtype, flops in fields.pop("peak_flops").items()}
        fields |= {f"host {key}": value for key, value in fields.pop("host").items()}
    assert again == {key: pytest.approx(value) if isinstance(value, float) else value for key, value in known.items()}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("memory_gib", "memory_gb", "memory_gb is not known"),
        ("gpus_per_node = 8", "", "gpus_per_node is missing"),
        ("gpus_per_node = 8", "gpus_per_node = 8.5", "gpus_per_node is '8.5', expected a whole number"),
        ("bf16 = 989.4", 'bf16 = "many"', "tflops.bf16 is 'many', expected a number"),
        ("[tflops]", "[flops]", r"a table \[tflops\] is missing"),
        ('rates = "h100"', 'rates = "h1"', "rates is 'h1', expected one of h100, a100, cpu"),
        ("bf16 = 989.4", "bf16 = 9.8e14", "is no accelerator's peak"),
        ("nvme_tb", "nvme", r"host.nvme is not known"),
        ("name = ", "name ", "cannot read"),
    ],
)
def test_a_file_that_says_no_gpu_is_refused_by_its_key(
    old: str, new: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = gpu_template(gpu("h100"), rates("h100-nanotron"))
    assert old in text
    (tmp_path / "one.toml").write_text(text.replace(old, new))
    assert main(["plan", "--gpus", "8", "--gpu", str(tmp_path / "one.toml")]) == 2
    assert message.replace("\\", "") in capsys.readouterr().err


def plan(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, object]:
    arguments = ["plan", "--model", "gpt3-13b", "--gpus", "64", "--top", "1", "--json", *options]
    assert main(arguments) == 0, capsys.readouterr().err
    found: dict[str, object] = json.loads(capsys.readouterr().out)["layouts"][0]
    return found


def test_a_machine_is_changed_by_options_or_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usual = plan(capsys)
    slower = plan(capsys, "--network-bandwidth", "2", "--link-bandwidth", "20")
    assert slower["tokens_per_second_per_gpu"] < 0.9 * usual["tokens_per_second_per_gpu"]  # type: ignore[operator]
    assert plan(capsys, "--gpus-per-node", "1")["tokens_per_second_per_gpu"] != usual["tokens_per_second_per_gpu"]
    assert main(["plan", "--gpu-template", "--gpu", "h100"]) == 0
    (tmp_path / "mine.toml").write_text(capsys.readouterr().out.replace("= 79.1", "= 40.0"))
    written = plan(capsys, "--gpu", str(tmp_path / "mine.toml"))
    assert written["memory_bytes"] + written["headroom_bytes"] <= 40 * GIB  # type: ignore[operator]
    for options, words in (
        (["--rates", "a100", "--link-bandwidth", "1"], "leave out --rates"),
        (["--gpus-per-node", "0"], "gpus_per_node is 0, expected a whole number from 1 to"),
        (["--framework", "fdsp2"], "did you mean 'fsdp2'"),
    ):
        assert main(["plan", "--gpus", "8", *options]) == 2
        assert words in capsys.readouterr().err
    assert main(["plan"]) == 2 and "--gpus is missing" in capsys.readouterr().err
    table = tmp_path / "in.csv"
    table.write_text("model,gpu,dp\ngpt3-13b,h100,8\n")
    assert main(["predict", str(table), "-o", str(tmp_path / "out.csv"), "--gpus-per-node", "4"]) == 2
    assert "give --gpu too" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(FRAMEWORKS))
def test_a_framework_is_searched_in_what_it_has(name: str) -> None:
    one = FRAMEWORKS[name]
    assert name != "ddp" or "fsdp" not in one.describe(RECIPES[one.recipe]), "which shards nothing"
    space = SearchSpace(num_gpus=16, global_batch=64, axes=one.axes, zero_stages=one.zero_stages)
    grid = search(
        model_spec("gpt3-1.3b"), space, gpu("h100"), RECIPES[one.recipe], rates("h100-nanotron")
    ).prediction.grid
    assert set(grid.zero_stage) == set(one.zero_stages)
    for axis in ("tp", "pp"):
        assert bool((getattr(grid, axis) > 1).any()) is (axis in one.axes)
    assert not (grid.sequence_parallel & (grid.tp == 1)).any()  # `sp` is no part of an id where tp is 1


def test_what_is_left_within_the_planner_s_error_is_tight(capsys: pytest.CaptureFixture[str]) -> None:
    grid = make_grid(dp=8, zero_stage=1, micro_batch=range(1, 20))
    found = predict_grid(model_spec("gpt3-2.7b"), grid, gpu("h100"), recipe("nanotron"), rates("h100-nanotron"))
    left = (found.available_bytes - found.needed_bytes) / found.needed_bytes
    assert found.tight.any() and (found.fits & ~found.tight).any()
    assert ((0 <= left) & (left < MEMORY_ERROR) == found.tight).all()
    assert main(["plan", "--model", "gpt3-13b", "--gpus", "8", "--global-batch", "64", "--top", "300"]) == 0
    said = capsys.readouterr().out
    assert "seq: sequences in a micro-batch" in said and "Planned for megatron-core, as no --framework is given" in said
    lines = re.findall(r"(\d+\.\d) +\+(\d+\.\d)  \w.* %, tight$", said, re.MULTILINE)
    assert lines and all(0 <= float(left) < 0.08 * float(held) + 6 for held, left in lines)
