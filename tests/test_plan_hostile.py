"""Messages of `meshmark plan` and `predict` about inputs that they cannot handle as asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshmark.cli.commands import main

_MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
    "vocab_size": 32000, "max_position_embeddings": 32768,
}  # fmt: skip
_COLUMNS = "model,gpu,framework,dp"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--gpu", "a100-80", "--precision", "fp8"], "a100-80 computes in fp32, tf32, fp16, bf16, not in fp8"),
        (["--gpu", "h100", "--precision", "mxfp8"], "not in mxfp8, whose block scales came with fp4"),
        (["--gpu", "mi355x", "--precision", "nvfp4"], "mi355x has no products in nvfp4, which is NVIDIA's"),
        (["--model", "mixtral-8x7b", "--framework", "ddp", "--ep", "8"], "framework ddp has no expert parallelism"),
        (["--gpu", "tpu-v5p", "--framework", "nemo"], "nemo does not train on tpu-v5p: name one of maxtext, pax"),
        (["--gpus-per-node", "7"], "--gpus 64 --gpus-per-node 7: expected whole nodes, so a multiple of 7 GPUs"),
        (["--tp", "0,2"], "--tp '0,2': 0 is too small, expected at least 1"),
        (["--zero-stage", "-1"], "--zero-stage '-1': -1 is too small, expected at least 0"),
        (["--cp", "two"], "--cp 'two': expected whole numbers"),
        (["--framework", "fsdp2", "--tp", "4"], "fsdp2, which has dp and ZeRO 3, does not train with tp above 1"),
        (["--framework", "fsdp2", "--pp", "1,2"], "does not train with pp above 1; name another --framework"),
        (["--framework", "nemo", "--zero-stage", "3"], "framework nemo, which has dp, tp, pp, cp and ZeRO 0, 1, does"),
        (["--framework", "nanotron", "--virtual-stages", "2"], "does not train with virtual_stages above 1"),
        (["--framework", "nanotron", "--schedules", "interleaved"], "does not train with virtual_stages above 1"),
        (["--framework", "nanotron", "--precision", "fp8"], "does not train with products in fp8"),
        (["--framework", "composer", "--gpu", "b200", "--precision", "nvfp4"], "does not train with products in nvfp4"),
        (["--ga", "8"], "--ga: the micro-batches of a step follow from --global-batch, --dp and --micro-batch"),
        (["--mbs", "2"], "--mbs: the option is called --micro-batch here"),
        (["--vp", "2"], "--vp: the option is called --virtual-stages here"),
        (["--peft", "2"], "--peft: the option is called --lora here"),
    ],
)
def test_what_a_gpu_or_framework_has_not_got_is_refused(
    options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--gpus", "64", *options]) == 2
    assert told in capsys.readouterr().err


def test_a_batch_for_so_many_gpus_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """16,384 GPUs were answered with "try a power of two of gpus, or another batch"."""
    plan = ["plan", "--model", "llama-405b", "--gpus", "16384"]
    assert main(plan) == 2
    told = "256 sequences evenly; so many gpus need more sequences, such as --global-batch "
    before, named, batch = capsys.readouterr().err.partition(told)
    assert named and int(batch) > 256, before
    assert main([*plan, "--global-batch", batch.strip()]) == 0


def test_chunks_that_do_not_divide_the_layers_are_planned_where_they_are_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """DeepSeek-V3's 61 layers ran in 2 stages of 8 chunks (Megatron-Bridge on GB300), and plan said that there is 1."""
    plan = ["plan", "--model", "deepseek-v3", "--gpus", "256", "--gpu", "gb300", "--pp", "2", "--global-batch", "4096"]
    assert main([*plan, "--ep", "32", "--virtual-stages", "8", "--json", "--top", "20"]) == 0
    layouts = [layout["layout"] for layout in json.loads(capsys.readouterr().out)["layouts"]]
    assert {layout["virtual_stages"] for layout in layouts} == {8}
    assert all(layout["num_micro_batches"] % 2 == 0 for layout in layouts)
    assert main([*plan, "--virtual-stages", "32"]) == 2, "no chunk is without a layer"
    dense = ["plan", "--model", "llama-8b", "--gpus", "8", "--pp", "2", "--json"]
    assert main([*dense, "--virtual-stages", "4"]) == 0
    even = json.loads(capsys.readouterr().out)["num_examined"]
    assert main([*dense, "--virtual-stages", "4,5"]) == 0
    assert json.loads(capsys.readouterr().out)["num_examined"] == 2 * even, "what divides is not there twice"


def test_a_pipeline_s_stages_are_sharded_where_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """torchtitan's table has Llama 3.1 405B on 512 H100 in 8 stages of FSDP, and plan said that there is stage 0."""
    plan = ["plan", "--model", "llama-405b", "--gpus", "512", "--framework", "torchtitan", "--tp", "8", "--pp", "8"]
    assert main([*plan, "--zero-stage", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["layouts"]
    assert {layout["layout"]["zero_stage"] for layout in found} == {3} and found[0]["headroom_bytes"] > 0
    assert main([*plan, "--zero-stage", "0"]) == 2 and "does not fit" in capsys.readouterr().err


def test_a_framework_is_planned_with_what_it_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", "--model", "llama-8b", "--gpus", "64", "--json", "--top", "40"]
    assert main([*plan, "--framework", "nanotron"]) == 0
    assert {layout["layout"]["virtual_stages"] for layout in json.loads(capsys.readouterr().out)["layouts"]} == {1}
    assert main([*plan, "--framework", "torchtitan", "--gpu", "b200", "--precision", "nvfp4"]) == 0
    assert main([*plan, "--seq", "4096"]) == 0, "an abbreviation that is as clear as before"
    capsys.readouterr()
    rows = tmp_path / "rows.csv"
    for column, value, option in (("precision", "fp8", ()), ("schedule", "", ("--precision", "fp8"))):
        rows.write_text(f"{_COLUMNS},{column}\nllama-8b,h100,nanotron,8,{value}\n")
        assert main(["predict", str(rows), "-o", str(tmp_path / "o.csv"), *option]) == 2
        assert "row 2: framework nanotron, which has dp, tp, pp and ZeRO 0, 1, does not" in capsys.readouterr().err
    rows.write_text(f"{_COLUMNS},precision\nllama-8b,h100,nanotron,8,bf16\n")
    assert main(["predict", str(rows), "-o", str(tmp_path / "o.csv"), "--precision", "fp8"]) == 0, "the row says bf16"
    rows.write_text(f"{_COLUMNS}\nllama-8b,h101,nanotron,8\n")
    assert main(["predict", str(rows), "-o", str(tmp_path / "o.csv")]) == 2
    assert "`meshmark plan --gpu-template` prints such a file" in capsys.readouterr().err


def test_a_plan_says_its_sequences_and_the_products_that_the_gpu_computes(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", "--model", "llama-8b", "--gpus", "64"]
    assert main([*plan, "--gpu", "h100", "--precision", "fp8"]) == 0
    assert "sequences of 8,192 tokens, products in fp8 (MFU is of h100's fp8 peak)" in capsys.readouterr().out
    assert main([*plan, "--gpu", "v100-32", "--framework", "nemo"]) == 0
    assert "products in fp16 (v100-32 has no bf16)" in capsys.readouterr().out
    assert main([*plan, "--gpu", "h100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["gpus"], found["global_batch"], found["seq_len"], found["products"]) == (64, 256, 8192, "bf16")


def test_a_tpu_is_planned_for_a_framework_that_trains_on_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "llama-8b", "--gpus", "256", "--gpu", "tpu-v5p"]) == 0
    assert "Planned for maxtext, as no --framework is given" in capsys.readouterr().out


def test_predict_does_not_replace_its_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text(f"{_COLUMNS}\nllama-8b,h100,nemo,8\n")
    before = rows.read_bytes()
    assert main(["predict", str(rows), "-o", str(tmp_path / "." / "rows.csv")]) == 2
    assert "is the file of layouts itself" in capsys.readouterr().err and rows.read_bytes() == before


def test_predict_replaces_no_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, records = tmp_path / "rows.csv", tmp_path / "records.jsonl"
    rows.write_text(f"{_COLUMNS}\nllama-8b,h100,nemo,8\n")
    records.write_text("{}\n")
    (tmp_path / "out.csv").symlink_to(records)
    for output in (records, tmp_path / "out.csv"):
        assert main(["predict", str(rows), "-o", str(output)]) == 2
        assert "it holds records" in capsys.readouterr().err and records.read_text() == "{}\n"


def test_a_key_that_no_planned_model_knows_is_warned_of(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(_MIXTRAL | {"num_key_value_head": 4, "router_aux_loss_coef": 0.02}))
    with pytest.warns(UserWarning, match=r"planned without: num_key_value_head \(is num_key_value_heads meant\?\)$"):
        assert main(["plan", "--model", str(config), "--gpus", "64", "--gpu", "h100"]) == 0


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"num_hidden_layers": "32"}, "num_hidden_layers is '32', expected a whole number from 1 to 10,000,000"),
        ({"model_type": "mamba"}, "qwen3, mixtral, qwen3_moe"),
    ],
)
def test_a_config_that_is_not_planned_is_told_what_is(
    changed: dict[str, str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(_MIXTRAL | changed))
    assert main(["plan", "--model", str(config), "--gpus", "64", "--gpu", "h100"]) == 2
    assert told in capsys.readouterr().err


def test_a_file_of_excel_is_read_and_other_separators_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, out = tmp_path / "rows.csv", tmp_path / "out.csv"
    rows.write_text(f"{_COLUMNS}\nllama-8b,h100,nemo,8\n", encoding="utf-8-sig")
    assert main(["predict", str(rows), "-o", str(out)]) == 0
    assert out.read_text().startswith(_COLUMNS)
    rows.write_text(rows.read_text(encoding="utf-8-sig").replace(",", ";"))
    assert main(["predict", str(rows), "-o", str(out)]) == 2
    assert "expected commas between cells" in capsys.readouterr().err


def test_experts_of_a_framework_without_them_are_refused_in_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text(f"{_COLUMNS},ep\nmixtral-8x7b,h100,ddp,8,8\n")
    assert main(["predict", str(rows), "-o", str(tmp_path / "out.csv")]) == 2
    assert "row 2: framework ddp, which has dp and ZeRO 0, does not train with ep above 1" in capsys.readouterr().err
