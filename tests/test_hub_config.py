"""Hugging Face's config.json: what is honoured is in the model that is trained; what is not is refused by its key."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import pytest
import torch

from meshmark.cli.commands import main
from meshmark.cli.options import chosen_workloads
from meshmark.errors import InputError
from meshmark.models.model_text import describe, described_model
from meshmark.models.planned_model import PlannedModel
from meshmark.models.transformer import ModelSpec
from meshmark.models.transformer.module import Transformer
from meshmark.plan.model_names import plan_model

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "head_dim": 4,
    "hidden_act": "silu",
    "hidden_size": 16,
    "initializer_range": 0.5,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0",
    "use_cache": True,
    "vocab_size": 64,
}
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_head": 4, "n_layer": 2, "n_positions": 32, "vocab_size": 64}
GPT2 |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0) | {"activation_function": "gelu_new"}
MISTRAL = LLAMA | {"model_type": "mistral", "sliding_window": None}
WITHOUT = object()


def written(folder: Path, config: dict[str, object]) -> str:
    said = {key: value for key, value in config.items() if value is not WITHOUT}
    (folder / "config.json").write_text(json.dumps(said))
    return str(folder / "config.json")


@pytest.mark.parametrize(
    ("base", "change", "words"),
    [
        (LLAMA, {"hidden_act": "gelu"}, ['hidden_act "gelu"', "silu"]),
        (LLAMA, {"attention_bias": True}, ["attention_bias true"]),
        (LLAMA, {"mlp_bias": True}, ["mlp_bias true"]),
        (LLAMA, {"attention_dropout": 0.1}, ["attention_dropout 0.1"]),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["rope_scaling", "yarn"]),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope_scaling", "linear"]),
        (LLAMA, {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, ["rope_scaling", "llama3"]),
        (LLAMA, {"rope_theta": "x"}, ['rope_theta "x"']),
        (LLAMA, {"partial_rotary_factor": 0.5}, ["partial_rotary_factor 0.5"]),
        (LLAMA, {"quantization_config": {"bits": 4}}, ["quantization_config"]),
        (LLAMA, {"hidden_activation": "silu"}, ["hidden_activation", "not known", "hidden_act"]),
        (LLAMA, {"num_experts": 8}, ["num_experts 8", "not known"]),
        (LLAMA, {"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "sliding_attention"]),
        (LLAMA, {"model_type": "qwen2"}, ["qwen2", "biases"]),
        (LLAMA, {"model_type": "qwen3"}, ["qwen3", "normed"]),
        (GPT2, {"activation_function": "relu"}, ['activation_function "relu"', "gelu_new"]),
        (GPT2, {"activation_function": "gelu"}, ['activation_function "gelu"']),
        (GPT2, {"resid_pdrop": WITHOUT}, ["resid_pdrop 0.1", "add dropout=0 after the file"]),
        (GPT2, {"scale_attn_weights": False}, ["scale_attn_weights false"]),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx true"]),
        (GPT2, {"add_cross_attention": True}, ["add_cross_attention true"]),
        (GPT2, {"rope_theta": 10000.0}, ["rope_theta", "not known"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_would_be_another_model_is_refused_and_a_plan_tells_it(
    tmp_path: Path, base: dict[str, object], change: dict[str, object], words: list[str]
) -> None:
    described_model(written(tmp_path, base))
    file = written(tmp_path, base | change)
    with pytest.raises(InputError) as raised:
        chosen_workloads("gpt-tiny", file, None)
    for word in (*words, "Another model would be trained"):
        assert word in str(raised.value)
    with pytest.warns(UserWarning, match="planned without") as told:
        assert plan_model(file).num_layers == 2
    assert all(word in str(told[0].message) for word in words)


@pytest.mark.parametrize(
    ("base", "change"),
    [
        (LLAMA, {"rope_scaling": {"rope_type": "default"}, "torch_dtype": "float32", "pretraining_tp": 2}),
        (LLAMA, {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "rope_theta": WITHOUT}),
        (LLAMA, {"id2label": {"0": "a"}, "eos_token_id": [1, 2], "hidden_act": "swish"}),
        (MISTRAL, {"sliding_window": 32, "model_type": "mistral"}),
        (GPT2, {"activation_function": "gelu_pytorch_tanh", "summary_type": "cls_index", "n_ctx": 32}),
    ],
)
def test_what_is_the_same_model_has_the_same_id(
    tmp_path: Path, base: dict[str, object], change: dict[str, object]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert described_model(written(tmp_path, base | change)) == described_model(written(tmp_path, base))


def test_a_shorter_sequence_is_within_the_window(tmp_path: Path) -> None:
    file = written(tmp_path, MISTRAL | {"sliding_window": 16})
    assert described_model(f"{file},seq_len=16").seq_len == 16
    told = written(tmp_path, MISTRAL | {"sliding_window": WITHOUT, "max_position_embeddings": 8192})
    with pytest.raises(InputError, match="sliding_window 4096"):  # Mistral's own, where the file says nothing
        described_model(told)


def test_windows_are_planned_and_not_trained(tmp_path: Path) -> None:
    """A Mistral was planned as if each token attended to all before it."""
    file = written(tmp_path, MISTRAL | {"sliding_window": 16})
    with pytest.raises(InputError, match="sliding_window 16, below seq_len 32"):
        described_model(file)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, within = plan_model(file), plan_model(f"{file},seq_len=16")
    assert isinstance(found, PlannedModel) and (found.window, found.windowed_layers) == (16, 2)
    assert found.attention_width == 0.75 * found.hidden, "16 of 32 tokens see 16, and those before as many as there are"
    assert not isinstance(within, PlannedModel), "what no window narrows is trained here too"
    qwen = MISTRAL | {"model_type": "qwen2", "sliding_window": 16, "max_window_layers": 1}
    found = plan_model(written(tmp_path, qwen | {"use_sliding_window": True}))
    assert isinstance(found, PlannedModel) and (found.window, found.windowed_layers) == (16, 1)


def test_dropout_behind_the_file_is_chosen(tmp_path: Path) -> None:
    file = written(tmp_path, GPT2 | {"resid_pdrop": 0.1})
    assert described_model(f"{file},dropout=0").dropout == 0
    assert described_model(f"{file},dropout=0.2").dropout == 0.2


def logits(model: ModelSpec) -> torch.Tensor:
    torch.manual_seed(0)
    module = Transformer(model)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.5)
    out: torch.Tensor = module(torch.arange(model.seq_len)[None])
    return out


@pytest.mark.parametrize(
    ("base", "change"),
    [(LLAMA, {"rope_theta": 5e5}), (LLAMA, {"rms_norm_eps": 0.1}), (GPT2, {"layer_norm_epsilon": 0.1})],
    ids=["rope_theta", "rms_norm_eps", "layer_norm_epsilon"],
)
def test_what_is_honoured_is_in_the_model_and_in_its_name(
    tmp_path: Path, base: dict[str, object], change: dict[str, object]
) -> None:
    plain = described_model(written(tmp_path, base))
    changed = described_model(written(tmp_path, base | change))
    assert changed.name != plain.name
    assert not torch.allclose(logits(changed), logits(plain), rtol=1e-3)
    assert described_model(describe(changed)) == changed, "what a plan hands to the suites"


def test_what_a_file_leaves_out_is_what_transformers_takes(tmp_path: Path) -> None:
    left = described_model(written(tmp_path, LLAMA | {"rms_norm_eps": WITHOUT, "rope_theta": WITHOUT}))
    assert (left.norm_eps, left.rope_theta) == (1e-6, 10000.0)
    assert described_model(written(tmp_path, GPT2)).norm_eps == 1e-5


def test_a_plan_that_is_run_trains_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, LLAMA | {"hidden_act": "relu"})
    plan = ["plan", "--model", file, "--gpus", "2", "--gpu", "h100", "--framework", "fsdp2", "--run"]
    assert main(plan) == 2 and 'hidden_act "relu"' in capsys.readouterr().err


@pytest.mark.parametrize("field", ["rope_theta", "norm_eps"])
@pytest.mark.parametrize("value", ["0", "nan", "inf"])
def test_an_impossible_number_is_refused(field: str, value: str) -> None:
    with pytest.raises(InputError, match=f"{field} is "):
        described_model(f"family=llama,layers=1,hidden=32,{field}={value}")


@pytest.mark.parametrize("kind", ["pipe", "large", "nested"])
def test_a_file_that_is_no_config_is_refused_and_not_read_to_its_end(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "large":
        with path.open("wb") as file:
            file.truncate(2**40)
    else:
        path.write_text("[" * 200_000)
    with pytest.raises(InputError, match="no regular file|over 1,048,576 bytes|not JSON"):
        described_model(str(path))
