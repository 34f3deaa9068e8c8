"""Layouts and models as users write them on the command line."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from meshmark.cli.commands import main
from meshmark.cli.options import chosen_layouts, chosen_workloads
from meshmark.errors import InputError, LayoutError
from meshmark.models.config import Dataset
from meshmark.models.model_text import described_model
from meshmark.models.transformer import MODELS, Family
from meshmark.plan.model_names import plan_model
from meshmark.spec.layout import Layout, Offload, Recompute, Schedule, parse_layout

LAYOUTS = [
    Layout(),
    Layout(num_micro_batches=3),
    *(
        Layout(dp=dp, tp=tp, pp=2, cp=cp, schedule=schedule, zero_stage=stage, num_micro_batches=4)
        for dp, tp, cp, schedule, stage in itertools.product((1, 12), (1, 2), (1, 4), Schedule, (0, 3))
    ),
    Layout(pp=4, schedule=Schedule.INTERLEAVED, virtual_stages=2, recompute=Recompute.FULL, offload=Offload.NVME),
    Layout(pp=2, schedule=Schedule.INTERLEAVED, virtual_stages=2, folded=True, num_micro_batches=4),
    Layout(tp=2, sequence_parallel=True, recompute=Recompute.SELECTIVE, offload=Offload.CPU),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.id)
def test_an_id_is_read_back_as_its_layout(layout: Layout) -> None:
    assert parse_layout(layout.id) == layout
    assert parse_layout(".".join(reversed(layout.id.split(".")))) == layout, "in any order"


@pytest.mark.parametrize(
    "text, words",
    [
        ("dp2.zz3.mb2", ["'zz3' at character 5", "mbN"]),
        ("dp2.ga4", ["'ga4' at character 5", "did you mean 'mb4'?"]),
        ("dp2.vp2", ["'vp2' at character 5", "did you mean 'v2'?"]),
        ("dp2.mbs4", ["'mbs4' at character 5", "has no sizes of batches: mbN are N micro-batches"]),
        ("dp2.tp2.dp4", ["'dp4' at character 9", "dp once more"]),
        ("dp2.gpipe.1f1b", ["'1f1b' at character 11"]),
        ("dp2..mb2", ["'' at character 5"]),
        ("", ["'' at character 1"]),
        ("DP2", ["'DP2' at character 1"]),
        ("dp٢", ["at character 1"]),
        ("dp0", ["'dp0' at character 1: expected at least 1"]),
        ("dp2.mb00", ["'mb00' at character 5: expected at least 1"]),
        ("dp2.zero7", ["'zero7' at character 5: expected a stage from 0 to 3"]),
        ("pp2.v2", ["'pp2.v2'", "interleaved"]),
        ("pp2.folded", ["'pp2.folded'", "folded chunks are two", "1 virtual stages"]),
        ("recompute_none", ["at character 1"]),
        ("dp9999999999", ["at character 1"]),
    ],
)
def test_what_is_no_layout_is_told_with_its_place(text: str, words: list[str]) -> None:
    with pytest.raises(LayoutError) as raised:
        parse_layout(text)
    for word in words:
        assert word in str(raised.value)


def test_layouts_and_world_sizes_exclude_each_other() -> None:
    assert chosen_layouts(None, None) == ([2], None)
    assert chosen_layouts("4,2", None) == ([4, 2], None)
    assert chosen_layouts(None, "tp4.dp2, dp2") == ([2, 8], [Layout(dp=2, tp=4), Layout(dp=2)])
    with pytest.raises(InputError, match="--world 2 and --layouts 'dp2': give one of them"):
        chosen_layouts("2", "dp2")


def test_cases_of_chosen_layouts_are_listed_with_what_adapters_cannot_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cases", "--adapters", "ddp,gpipe", "--layouts", "dp2,pp2.mb4", "--model", "layers=3,hidden=32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ddp-dp2-gpt-l3h32a1f128v256s64-fp32"
    assert lines[1].startswith("ddp-pp2.mb4-") and "skipped: ddp does not support" in lines[1]
    assert lines[2].startswith("gpipe-dp2-") and "skipped:" in lines[2]
    assert lines[3] == "gpipe-pp2.mb4-gpt-l3h32a1f128v256s64-fp32" and lines[5] == "4 cases"


def test_a_model_by_its_dimensions() -> None:
    model = described_model("layers=6, hidden=96,heads=6,seq_len=32,tied_embeddings=true")
    assert (model.num_layers, model.hidden, model.num_heads, model.ffn_hidden, model.seq_len) == (6, 96, 6, 384, 32)
    assert model.family is Family.GPT and model.tied_embeddings and model.name == "gpt-l6h96a6f384v256s32tied"
    llama = described_model("family=llama,layers=2,hidden=64,heads=8,kv_heads=2")
    assert (llama.family, llama.num_kv_heads, llama.ffn_hidden) == (Family.LLAMA, 2, 176)
    assert plan_model("layers=6,hidden=96,heads=6").num_layers == 6, "the planner reads the same"
    heads = {hidden: described_model(f"layers=1,hidden={hidden}").num_heads for hidden in (33, 96, 128, 200, 768)}
    assert heads == {33: 1, 96: 1, 128: 2, 200: 2, 768: 12}, "those that a user leaves out divide any width"


def test_different_models_have_different_names() -> None:
    plain = "layers=2,hidden=64,heads=4"
    changes = ["", ",kv_heads=2", ",dropout=0.1", ",init_std=0.1", ",vocab=512", ",seq_len=32", ",tied_embeddings=1"]
    changes += [",family=llama", ",ffn_hidden=32"]
    assert len({described_model(plain + change).name for change in changes}) == len(changes)


@pytest.mark.parametrize(
    "text, words",
    [
        ("layers=6", ["hidden missing"]),
        ("layers=6,hidden", ["'hidden' at character 10", "KEY=VALUE"]),
        ("layers=6,width=3", ["'width=3' at character 10", "kv_heads"]),
        ("layers=6,layers=7,hidden=32", ["'layers=7' at character 10", "given twice"]),
        ("layers=-1,hidden=32", ["character 1", "whole number"]),
        ("layers=1e3,hidden=32", ["character 1", "whole number"]),
        ("layers=99999999999999999999,hidden=32", ["10,000,000"]),
        ("family=bert,layers=1,hidden=32", ["gpt or llama"]),
        ("layers=2,hidden=30,heads=4", ["hidden 30 is not divisible by num_heads 4"]),
        ("layers=2,hidden=32,tied_embeddings=maybe", ["true or false"]),
        ("layers=2,hidden=32,dropout=x", ["expected a number"]),
        ("layers=2,hidden=32,dropout=nan", ["dropout is nan"]),
        ("layers=2,hidden=32,init_std=nan", ["init_std is nan, expected a number above 0"]),
        ("layers=2,hidden=32,init_std=inf", ["init_std is inf"]),
        ("layers=2,hidden=32,init_std=0", ["init_std is 0.0"]),
        ("nowhere/config.json", ["No such file", "config.json"]),
    ],
)
def test_what_is_no_model_is_told_with_its_place(text: str, words: list[str]) -> None:
    with pytest.raises(InputError) as raised:
        described_model(text)
    for word in words:
        assert word in str(raised.value)


LLAMA_CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "initializer_range": 0.02,
}


def written(folder: Path, config: object) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder / "config.json")


def test_a_model_by_its_config_json(tmp_path: Path) -> None:
    own = plan_model("llama-8b")
    model = described_model(written(tmp_path, LLAMA_CONFIG))
    assert model.num_parameters == own.num_parameters == 8_030_261_248, "Llama 3 8B's"
    short = described_model(f"{tmp_path / 'config.json'},seq_len=128,layers=2")
    assert (short.seq_len, short.num_layers, short.hidden) == (128, 2, 4096)
    gpt2 = described_model(f"{written(tmp_path, {'model_type': 'gpt2'})},dropout=0")
    assert gpt2.num_parameters == MODELS["gpt2-124m"].num_parameters == 124_439_808


@pytest.mark.parametrize(
    "config, words",
    [
        ({"model_type": "bert"}, "model_type is 'bert', expected one of gpt2, llama, mistral"),
        ([1], "model_type is None"),
        ({key: value for key, value in LLAMA_CONFIG.items() if key != "hidden_size"}, "hidden_size is None"),
        (LLAMA_CONFIG | {"hidden_size": "x"}, "hidden_size is x, expected a whole number"),
        (LLAMA_CONFIG | {"vocab_size": 10**12}, "vocab_size is 1000000000000"),
        (LLAMA_CONFIG | {"num_hidden_layers": True}, "num_hidden_layers is True"),
        (LLAMA_CONFIG | {"tie_word_embeddings": 3}, "expected true or false"),
        (LLAMA_CONFIG | {"initializer_range": float("inf")}, "init_std is inf, expected a number above 0"),
        (LLAMA_CONFIG | {"head_dim": 256}, "head_dim is 256; expected hidden_size / num_attention_heads, 128"),
    ],
)
def test_a_config_that_cannot_be_is_told_by_its_key(tmp_path: Path, config: object, words: str) -> None:
    with pytest.raises(InputError) as raised:
        described_model(written(tmp_path, config))
    assert words in str(raised.value)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"{", b"[" * 100_000, b" " * (2**20 + 1)])
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(InputError, match="not JSON|over 1,048,576 bytes"):
        described_model(str(tmp_path / "config.json"))


def test_workloads_are_renamed_by_what_they_are_changed_by() -> None:
    (plain,) = chosen_workloads("gpt-tiny", "layers=2,hidden=32", 16)
    assert plain.name == "gpt-l2h32a1f128v256s64.b16" and plain.global_batch == 16
    for name, text in (("bert-mini", "layers=2,hidden=48"), ("gpt-tiny", "layers=2,hidden=48,causal=0")):
        (encoder,) = chosen_workloads(name, text, None)
        assert (encoder.model.hidden, encoder.model.causal, encoder.dataset) == (48, False, Dataset.MASKED_TEXT)
    (other,) = chosen_workloads("gpt-mini-momentum", "layers=2,hidden=32", None)
    assert other.name == "gpt-mini-momentum.gpt-l2h32a1f128v256s64"
    with pytest.raises(InputError, match="trains 'vit-mini', no model of text"):
        chosen_workloads("vit-digits", "layers=2,hidden=32", None)
    with pytest.raises(InputError, match="expected KEY=VALUE,... or FILE.json"):
        chosen_workloads("gpt-tiny", "gpt-mini", None)
