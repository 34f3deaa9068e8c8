"""Read the `config.json` of checkpoints that are planned and not trained here: Mixtral, Qwen3-MoE, DeepSeek, Gemma."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping
from pathlib import Path

from meshmark.errors import InputError
from meshmark.models.hub_config import LARGEST, SILENT, read_object
from meshmark.models.planned_model import PlannedModel
from meshmark.models.transformer import Family

_DENSE = {
    "num_layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "num_heads": "num_attention_heads",
    "ffn_hidden": "intermediate_size",
    "vocab_size": "vocab_size",
    "seq_len": "max_position_embeddings",
}
_SAME = _DENSE | {"experts_per_token": "num_experts_per_tok"}
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
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), _DENSE),
}
"""The key of each required field, by `model_type`."""
_OF_ANY_WIDTH = ("llama", "mistral", "qwen2", "qwen3")
"""Types that are trained here with heads of `hidden_size / num_attention_heads` and without windows alone, and planned
with any.
"""
_QWEN = {"sliding_window": 4096, "max_position_embeddings": 32_768, "num_key_value_heads": 32, "max_window_layers": 28}
_DEFAULTS: dict[str, dict[str, int]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"sliding_window": 4096, "max_position_embeddings": 131_072, "num_key_value_heads": 8},
    "qwen2": _QWEN,
    "qwen3": _QWEN,
    "gemma2": {"sliding_window": 4096},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    },
}
"""Transformers' own values for keys that published files leave out."""
_EVERY = {"gemma2": 2, "gemma3_text": 6}
"""Every which layer attends to everything; the others have windows (arXiv:2408.00118, arXiv:2503.19786)."""
_READ = {
    *("num_key_value_heads", "head_dim", "q_lora_rank", "n_shared_experts", "sliding_window", "use_sliding_window"),
    *("decoder_sparse_step", "mlp_only_layers", "moe_layer_freq", "tie_word_embeddings"),
    *("layer_types", "sliding_window_pattern"),
}
"""Optional keys that are read, of any type."""
_WITHOUT_SIZE = frozenset(
    # Keys that change neither a size nor a number of operations, so that a plan does not depend on them.
    """
    attention_bias attention_dropout aux_loss_alpha cache_implementation ep_size hidden_act hidden_activation
    initializer_range max_window_layers mlp_bias n_group norm_topk_prob output_router_logits qk_head_dim
    query_pre_attn_scalar rms_norm_eps rope_interleave rope_local_base_freq rope_parameters rope_scaling rope_theta
    routed_scaling_factor router_aux_loss_coef router_jitter_noise scoring_func seq_aux sliding_window_size
    topk_group topk_method use_bidirectional_attention
    """.split()
)
_UNPLANNED = {"num_nextn_predict_layers": "layers that predict further tokens", "quantization_config": "quantization"}
_UNPLANNED |= {"attn_logit_softcapping": "the cap of scores", "final_logit_softcapping": "the cap of logits"}


def planned_type(path: Path, *, planned: bool = True, seq_len: object = None) -> str:
    """Return the `model_type` of a file if such a model is only planned, or an empty string.

    With `planned`, this includes types that can be trained here, if heads have another width than hidden / heads, or
    windows are narrower than `seq_len` (by default the file's longest sequence).
    """
    try:
        kind, said, _ = _read(path)
        width = said["hidden_size"] / said["num_attention_heads"] if kind in _OF_ANY_WIDTH else None  # type: ignore[operator]
        said = {**_DEFAULTS.get(kind, {}), **said}
        longest = seq_len or said.get("max_position_embeddings")
        windowed = width is not None and (_window(kind, said) or LARGEST) < longest  # type: ignore[operator]
    except (InputError, ValueError, KeyError, TypeError, ZeroDivisionError):
        return ""  # the reader of other files says what is wrong
    own = planned and width is not None and (windowed or said.get("head_dim") not in (None, width))
    return kind if kind in PLANNED_TYPES or own else ""


def _window(kind: str, said: Mapping[str, object]) -> int | None:
    """Return the tokens of a file's windows. Those of Qwen are off unless `use_sliding_window` turns them on."""
    usual = kind in ("mixtral", "mistral", *_EVERY)
    window = said.get("sliding_window") if said.get("use_sliding_window", usual) else None
    return window if isinstance(window, int) and window else None


def _read(path: Path) -> tuple[str, dict[str, object], bool]:
    """Return a file's `model_type` and settings, and whether they are those of a part that reads text."""
    said = read_object(path, f"--model {str(path)!r}")
    text = said.get("text_config")
    if isinstance(text, dict) and text.get("model_type") in PLANNED_TYPES:
        return str(text["model_type"]), text, True
    kind = said.get("model_type")
    return (kind, said, False) if isinstance(kind, str) else ("", {}, False)


def planned_model(path: Path, given: Mapping[str, object]) -> PlannedModel:
    """Return the model of a config file, with the fields in `given` in place of the file's.

    Raises `InputError` for a missing or impossible size, and warns of parts that are planned without.
    """
    kind, written, is_part = _read(path)
    said: dict[str, object] = {**_DEFAULTS.get(kind, {}), **written}
    keys = PLANNED_TYPES.get(kind, _DENSE)

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

    fields = {field: size(key, least=0 if field == "dense_layers" else 1) for field, key in keys.items()}
    fields["num_kv_heads"] = size("num_key_value_heads", fields["num_heads"])
    if "kv_rank" in fields:
        fields["query_rank"] = size("q_lora_rank", 0, least=0)
        fields["shared_ffn"] = fields["expert_ffn"] * size("n_shared_experts", 0, least=0)
    else:
        fields["head_width"] = size("head_dim", 0, least=0)
        if window := _window(kind, said):
            fields |= {"window": window, "windowed_layers": _windowed(said, fields["num_layers"], _EVERY.get(kind))}
    if kind in _EVERY:
        fields["norms"] = 4
    if kind == "qwen3_moe":
        every = size("decoder_sparse_step", 1)
        listed = said.get("mlp_only_layers")
        dense = {*(listed if isinstance(listed, list) else ())} | {
            i for i in range(fields["num_layers"]) if (i + 1) % every
        }
        fields["dense_layers"] = len(dense)
    known = {*keys.values(), *_READ, *_UNPLANNED, *_WITHOUT_SIZE, *SILENT}
    unknown = [key for key in said if key not in known]
    if unknown:
        near = [(key, difflib.get_close_matches(key, known, n=1)) for key in unknown]
        told = ", ".join(key + (f" (is {match[0]} meant?)" if match else "") for key, match in near)
        warnings.warn(f"{path}: not known, and planned without: {told}", stacklevel=3)
    left = [told for key, told in _UNPLANNED.items() if said.get(key)]
    if said.get("moe_layer_freq", 1) != 1:
        left.append("dense layers between those of experts")
    if is_part:
        left.append("what is not of text")
    if left:
        warnings.warn(f"{path}: planned without {' and '.join(left)}", stacklevel=3)
    made: dict[str, object] = {"name": path.parent.name or path.stem, "family": Family.LLAMA, **fields}
    made["tied_embeddings"] = said.get("tie_word_embeddings", kind.startswith("gemma")) is True
    return PlannedModel(**{**made, **given})  # type: ignore[arg-type]


def _windowed(said: Mapping[str, object], num_layers: int, every: int | None) -> int:
    """Return how many layers have windows: all, all but every `every`th, or, of Qwen, all but the first."""
    if isinstance(types := said.get("layer_types"), list) and len(types) == num_layers:
        return types.count("sliding_attention")
    if isinstance(first := said.get("max_window_layers"), int):
        return max(num_layers - first, 0)
    pattern = said.get("sliding_window_pattern", every)
    return num_layers - num_layers // pattern if isinstance(pattern, int) and pattern else num_layers
