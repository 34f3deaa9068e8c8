"""Mixtures of experts, latent attention and windows are planned, from presets and from a checkpoint's config.json."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from meshmark.cli.commands import main
from meshmark.errors import InputError
from meshmark.models.model_text import described_model
from meshmark.models.planned_model import PlannedModel
from meshmark.plan.model_names import PLAN_MODELS, plan_model
from meshmark.plan.predict_file import predict_rows
from meshmark.theory.model_theory import model_flops_per_token

ROW = {"model": "mixtral-8x7b", "gpu": "h100", "framework": "nemo", "layout": "dp16.tp2.sp.zero1.mb8"}
CONFIGS: dict[str, dict[str, object]] = {
    "mixtral-8x7b": {
        "model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000, "max_position_embeddings": 32768,
        "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "vocab_size": 151936, "max_position_embeddings": 40960, "num_experts": 128, "num_experts_per_tok": 8,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
        "num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048, "vocab_size": 129280,
        "max_position_embeddings": 163840, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
        "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128, "v_head_dim": 128, "num_nextn_predict_layers": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("mixtral-8x7b", 46.7, 12.9),
        ("mixtral-8x22b", 140.6, 39.2),
        ("qwen3-30b-a3b", 30.5, 3.35),
        ("qwen3-235b-a22b", 235.1, 22.2),
        ("deepseek-v3", 671.0, 37.6),
    ],
)
def test_presets_have_the_sizes_that_their_authors_publish(name: str, billions: float, active: float) -> None:
    model = plan_model(name)
    assert isinstance(model, PlannedModel)
    assert model.num_parameters / 1e9 == pytest.approx(billions, rel=0.002)
    assert model.active_parameters / 1e9 == pytest.approx(active, rel=0.01)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_checkpoint_s_config_is_its_preset(name: str, tmp_path: Path) -> None:
    path = tmp_path / name / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(CONFIGS[name]))
    if name == "deepseek-v3":
        with pytest.warns(UserWarning, match="planned without layers that predict further tokens"):
            read = plan_model(f"{path},seq_len=4096")
    else:
        read = plan_model(f"{path},seq_len=4096")
    assert read == PLAN_MODELS[name]
    with pytest.raises(InputError, match="is planned, by `plan` and `predict`, and not trained here"):
        described_model(str(path))
    path.write_text(json.dumps({**CONFIGS[name], "hidden_size": "wide"}))
    with pytest.raises(InputError, match="hidden_size is 'wide', expected a whole number"):
        plan_model(str(path))


def test_experts_are_divided_over_their_own_ranks() -> None:
    """Twice as many hold half the experts each; their states are sharded over the ranks that hold the same ones."""
    found = predict_rows([{**ROW, "ep": str(ep)} for ep in (1, 2, 4, 8)])
    weights = found["predicted_parameters_gib"]
    assert (np.diff(weights) < 0).all() and weights[0] > 4 * weights[3]
    assert found["predicted_optimizer_gib"] == pytest.approx(found["predicted_optimizer_gib"][0]), "all are sharded"
    sent = found["predicted_expert_communication_seconds"]
    assert sent[0] == 0 and 0 < sent[1] < sent[2] < sent[3]
    own = predict_rows([{**ROW, "ep": "4", "etp": "2"}])
    assert own["predicted_parameters_gib"][0] == pytest.approx(weights[3])
    assert own["predicted_expert_communication_seconds"][0] > sent[2], "an expert's ranks gather its tokens"
    across = predict_rows([{**ROW, "model": "qwen3-30b-a3b", "ep": ep} for ep in ("8", "16")])
    assert np.diff(across["predicted_expert_communication_seconds"])[0] > 0


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"ep": "3"}, "row 2: ep 3 does not divide 8 experts of 'mixtral-8x7b'"),
        ({"ep": "8", "layout": "dp2.tp2.sp.zero1"}, "row 2: ep 8 x etp 1 do not divide dp x cp x tp, 4"),
        ({"ep": "2", "model": "llama-8b"}, "row 2: ep 2 and etp 1, but 'llama-8b' has no experts"),
    ],
)
def test_experts_that_cannot_be_divided_are_refused(changes: dict[str, str], told: str) -> None:
    with pytest.raises(InputError, match=told):
        predict_rows([{**ROW, **changes}])


def test_a_token_pays_for_its_own_experts_and_a_window_for_what_it_sees() -> None:
    model = plan_model("mixtral-8x7b")
    assert isinstance(model, PlannedModel)
    dense = PlannedModel(**{**vars(model), "num_experts": 0, "ffn_hidden": 2 * 14336})
    router = 6.0 * 32 * 4096 * 8
    assert model_flops_per_token(model) == pytest.approx(model_flops_per_token(dense) + router)
    # Of 4,096 tokens a window of 1,024 leaves 1,024 - 128 of 2,048 pairs a token.
    near = PlannedModel(**{**vars(model), "window": 1024, "windowed_layers": 32})
    assert near.attention_width / model.attention_width == pytest.approx((1024 - 128) / 2048)


def test_a_search_tries_expert_parallelism_and_gives_no_interval(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", "--model", "mixtral-8x7b", "--gpus", "64", "--gpu", "h100"]
    assert main([*plan, "--ep", "8"]) == 0
    said = capsys.readouterr().out
    assert ".ep8" in said and "Error bar: none; half of the published runs of mixtures" in said
    assert main([*plan, "--ep", "3"]) == 2 and "--ep 3: none divides 8 experts" in capsys.readouterr().err
    dense = ["plan", "--model", "llama-8b", "--gpus", "8", "--ep", "2"]
    assert main(dense) == 2 and "'llama-8b' has no experts" in capsys.readouterr().err


GEMMA2 = {
    "model_type": "gemma2", "num_hidden_layers": 42, "hidden_size": 3584, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 256, "intermediate_size": 14336, "vocab_size": 256000,
    "max_position_embeddings": 8192, "sliding_window": 4096, "final_logit_softcapping": 30.0,
}  # fmt: skip
GEMMA3 = {
    "num_hidden_layers": 62, "hidden_size": 5376, "num_attention_heads": 32, "num_key_value_heads": 16,
    "head_dim": 128, "intermediate_size": 21504, "sliding_window": 1024, "model_type": "gemma3_text",
}  # fmt: skip


def test_gemma_is_planned_from_its_config_and_by_name(tmp_path: Path) -> None:
    """Sizes of its reports, in billions of parameters with the embedding once: 8.54, 9.24, 27.2 and 27.0 of text."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GEMMA2))
    with pytest.warns(UserWarning, match="planned without the cap of logits"):
        read = described_model(str(path), planned=True)
    assert dataclasses.replace(read, name="gemma2-9b") == plan_model("gemma2-9b") == plan_model("gemma-2-9b")
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": GEMMA3, "vision_config": {}}))
    with pytest.warns(UserWarning, match="planned without what is not of text"):
        text = described_model(str(path), planned=True)
    wanted = dataclasses.replace(plan_model("gemma3-27b"), seq_len=131_072)
    assert dataclasses.replace(text, name="gemma3-27b") == wanted
    for name, billions in (("gemma-7b", 8.54), ("gemma2-9b", 9.24), ("gemma2-27b", 27.2), ("gemma3-27b", 27.0)):
        assert plan_model(name).num_parameters / 1e9 == pytest.approx(billions, rel=0.005)


def test_heads_of_a_width_of_their_own_are_planned(tmp_path: Path) -> None:
    """Qwen3-32B has 64 heads of 128 in a width of 5,120. Such a model is not trained here."""
    path = tmp_path / "config.json"
    said = {
        "model_type": "qwen3", "num_hidden_layers": 64, "hidden_size": 5120, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 25600, "vocab_size": 151936,
        "max_position_embeddings": 40960,
    }  # fmt: skip
    path.write_text(json.dumps(said))
    assert described_model(str(path), planned=True).num_parameters / 1e9 == pytest.approx(32.8, rel=0.005)
    with pytest.raises(InputError, match="head_dim is 128"):
        described_model(str(path))


@pytest.mark.parametrize(
    ("written", "preset"),
    [
        ("llama3-70b", "llama-70b"),
        ("llama-3.1-405b", "llama-405b"),
        ("Llama3.1-8B", "llama-8b"),
        ("gemma-3-12b", "gemma3-12b"),
    ],
)
def test_other_ways_to_write_a_preset_s_name_are_read(written: str, preset: str) -> None:
    assert plan_model(written) == plan_model(preset)


def test_a_sequence_as_long_as_a_checkpoint_takes_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["mixtral-8x7b"]))
    asked = ["plan", "--model", str(path), "--gpus", "64", "--gpu", "h100"]
    assert main(asked) == 0
    assert "sequences of 32,768 tokens are the longest that the file allows; --seq-len" in capsys.readouterr().err
    assert main([*asked, "--seq-len", "4096"]) == 0
    assert capsys.readouterr().err == ""
