"""Mixtures of experts, latent attention and windows are planned, from presets and from a checkpoint's config.json."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from meshmark.cli.commands import main
from meshmark.errors import InputError
from meshmark.plan.model_names import PLAN_MODELS, plan_model
from meshmark.plan.predict_file import predict_rows
from meshmark.spec.model_text import described_model
from meshmark.spec.planned_model import PlannedModel
from meshmark.theory.flops import model_flops_per_token

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
