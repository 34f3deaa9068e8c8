"""Read the `config.json` of checkpoints that are planned and not trained here: Mixtral, Qwen3-MoE, DeepSeek."""

from __future__ import annotations

import difflib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path

from meshmark.errors import InputError
from meshmark.spec.hub_config import LARGEST, SILENT
from meshmark.spec.model_spec import Family
from meshmark.spec.planned_model import PlannedModel

_SAME = {
    "num_layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "num_heads": "num_attention_heads",
    "ffn_hidden": "intermediate_size",
    "vocab_size": "vocab_size",
    "seq_len": "max_position_embeddings",
    "experts_per_token": "num_experts_per_tok",
}
_LATENT = {
    "expert_ffn": "moe_intermediate_size",
    "num_experts": "n_routed_experts",
    "dense_layers": "first_k_dense_replace",
    "kv_rank": "kv_lora_rank",
    "rotary_width": "qk_rope_head_dim",
    "head_width": "qk_nope_head_dim",
    "value_width": "v_head_dim",
}
PLANNED_TYPES: dict[str, dict[str, str]] = {
    "mixtral": _SAME | {"num_experts": "num_local_experts", "expert_ffn": "intermediate_size"},
    "qwen3_moe": _SAME | {"num_experts": "num_experts", "expert_ffn": "moe_intermediate_size"},
    "deepseek_v2": _SAME | _LATENT,
    "deepseek_v3": _SAME | _LATENT,
}
"""The key of each required field, by `model_type`."""
_READ = {
    *("num_key_value_heads", "head_dim", "q_lora_rank", "n_shared_experts", "sliding_window", "use_sliding_window"),
    *("decoder_sparse_step", "mlp_only_layers", "moe_layer_freq", "tie_word_embeddings"),
}
"""Optional keys that are read, of any type."""
_WITHOUT_SIZE = frozenset(
    # Keys that change neither a size nor a number of operations, so that a plan does not depend on them.
    """
    attention_bias attention_dropout aux_loss_alpha ep_size hidden_act initializer_range max_window_layers n_group
    norm_topk_prob output_router_logits qk_head_dim rms_norm_eps rope_interleave rope_parameters rope_scaling rope_theta
    routed_scaling_factor router_aux_loss_coef router_jitter_noise scoring_func seq_aux topk_group topk_method
    """.split()
)
_UNPLANNED = {"num_nextn_predict_layers": "layers that predict further tokens", "quantization_config": "quantization"}


def planned_type(path: Path) -> str:
    """Return the `model_type` of a file if such a model is only planned, or an empty string."""
    try:
        said = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return ""  # the reader of other files says what is wrong
    kind = said.get("model_type") if isinstance(said, dict) else None
    return kind if kind in PLANNED_TYPES else ""


def planned_model(path: Path, given: Mapping[str, object]) -> PlannedModel:
    """Return the model of a config file, with the fields in `given` in place of the file's.

    Raises `InputError` for a missing or impossible size, and warns of parts that are planned without.
    """
    said = json.loads(path.read_text())
    kind = said["model_type"]

    def size(key: str, usual: int | None = None, least: int = 1) -> int:
        value = said.get(key)
        if value is None and usual is not None:
            return usual
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= LARGEST:
            raise InputError(
                f"--model {str(path)!r}: {key} is {repr(value)[:40]}, "
                f"expected a whole number from {least} to {LARGEST:,}"
            )
        return value

    fields = {field: size(key, least=0 if field == "dense_layers" else 1) for field, key in PLANNED_TYPES[kind].items()}
    fields["num_kv_heads"] = size("num_key_value_heads", fields["num_heads"])
    if "kv_rank" in fields:
        fields["query_rank"] = size("q_lora_rank", 0, least=0)
        fields["shared_ffn"] = fields["expert_ffn"] * size("n_shared_experts", 0, least=0)
    else:
        fields["head_width"] = size("head_dim", 0, least=0)
        window = said.get("sliding_window") if said.get("use_sliding_window", kind == "mixtral") else None
        if isinstance(window, int) and window:
            fields |= {"window": window, "windowed_layers": fields["num_layers"]}
    if kind == "qwen3_moe":
        every = size("decoder_sparse_step", 1)
        dense = set(said.get("mlp_only_layers") or ()) | {i for i in range(fields["num_layers"]) if (i + 1) % every}
        fields["dense_layers"] = len(dense)
    known = {*PLANNED_TYPES[kind].values(), *_READ, *_UNPLANNED, *_WITHOUT_SIZE, *SILENT}
    unknown = [key for key in said if key not in known]
    if unknown:
        near = [(key, difflib.get_close_matches(key, known, n=1)) for key in unknown]
        told = ", ".join(key + (f" (is {match[0]} meant?)" if match else "") for key, match in near)
        warnings.warn(f"{path}: not known, and planned without: {told}", stacklevel=3)
    left = [told for key, told in _UNPLANNED.items() if said.get(key)]
    if said.get("moe_layer_freq", 1) != 1:
        left.append("dense layers between those of experts")
    if left:
        warnings.warn(f"{path}: planned without {' and '.join(left)}", stacklevel=3)
    made: dict[str, object] = {"name": path.parent.name or path.stem, "family": Family.LLAMA, **fields}
    made["tied_embeddings"] = said.get("tie_word_embeddings") is True
    return PlannedModel(**{**made, **given})  # type: ignore[arg-type]
