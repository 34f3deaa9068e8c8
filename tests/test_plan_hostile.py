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
        (["--model", "mixtral-8x7b", "--framework", "ddp", "--ep", "8"], "framework ddp has no expert parallelism"),
        (["--gpu", "tpu-v5p", "--framework", "nemo"], "nemo does not train on tpu-v5p: name one of maxtext, pax"),
        (["--gpus-per-node", "7"], "--gpus 64 --gpus-per-node 7: expected whole nodes, so a multiple of 7 GPUs"),
        (["--tp", "0,2"], "--tp '0,2': 0 is too small, expected at least 1"),
        (["--zero-stage", "-1"], "--zero-stage '-1': -1 is too small, expected at least 0"),
        (["--cp", "two"], "--cp 'two': expected whole numbers"),
    ],
)
def test_what_a_gpu_or_framework_has_not_got_is_refused(
    options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--gpus", "64", *options]) == 2
    assert told in capsys.readouterr().err


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
