"""Read the `config.json` of a Hugging Face checkpoint.

A key is accepted if a model of this project honours it, if its value changes nothing here, or if it does not affect
the trained function. Any other key is an error if the model is to be trained. A planner, which only needs sizes, warns
about it and continues.
"""

from __future__ import annotations

import difflib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from meshmark.errors import InputError
from meshmark.models.transformer import Family

Fields = dict[str, Family | float]
"""Fields of a `ModelSpec` by name."""
LARGEST = 10**7
"""Upper bound for any dimension. A larger value means that the unit is wrong."""
_LARGEST_FILE = 2**20
_REQUIRED = None
"""Marker in place of a default value: the key is required."""

# By `model_type`: the config.json key of each field, and the default that Transformers uses.
_DECODER: dict[str, tuple[str, object]] = {
    "num_layers": ("num_hidden_layers", _REQUIRED),
    "hidden": ("hidden_size", _REQUIRED),
    "num_heads": ("num_attention_heads", _REQUIRED),
    "ffn_hidden": ("intermediate_size", _REQUIRED),
    "vocab_size": ("vocab_size", _REQUIRED),
    "tied_embeddings": ("tie_word_embeddings", False),
    "init_std": ("initializer_range", 0.02),
    "norm_eps": ("rms_norm_eps", 1e-6),
}
_HONOURED: dict[str, dict[str, tuple[str, object]]] = {
    "gpt2": {
        "num_layers": ("n_layer", 12),
        "hidden": ("n_embd", 768),
        "num_heads": ("n_head", 12),
        "vocab_size": ("vocab_size", 50257),
        "seq_len": ("n_positions", 1024),
        "tied_embeddings": ("tie_word_embeddings", True),
        "init_std": ("initializer_range", 0.02),
        "norm_eps": ("layer_norm_epsilon", 1e-5),
    },
    "llama": _DECODER | {"seq_len": ("max_position_embeddings", 2048)},
    "mistral": _DECODER | {"seq_len": ("max_position_embeddings", 131072), "num_kv_heads": ("num_key_value_heads", 8)},
    "qwen2": _DECODER | {"seq_len": ("max_position_embeddings", 32768), "num_kv_heads": ("num_key_value_heads", 32)},
    "qwen3": _DECODER | {"seq_len": ("max_position_embeddings", 32768), "num_kv_heads": ("num_key_value_heads", 32)},
}
_OPTIONAL = {"num_kv_heads": "num_key_value_heads", "ffn_hidden": "n_inner"}
"""Fields that are derived from others if the file has null or no value."""
_GPT2_DROPOUTS = ("attn_pdrop", "embd_pdrop", "resid_pdrop")
_LEFT_OUT = {
    "qwen2": "queries, keys and values have biases",
    "qwen3": "queries and keys are normed",
}
"""Parts of a family, by `model_type`, that this project's model of it does not have."""

# Keys that change the trained function, with the values under which they have no effect.
_OFF: tuple[object, ...] = (None, False, 0)
_UNCHANGING: dict[str, tuple[object, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (None, 1),
    "scale_attn_weights": (True,),
    **dict.fromkeys(
        (
            "add_cross_attention",
            "attention_bias",
            "attention_dropout",
            "cross_attention_hidden_size",
            "is_encoder_decoder",
            "mlp_bias",
            "scale_attn_by_inverse_layer_idx",
            "tie_encoder_decoder",
            "use_sliding_window",
        ),
        _OFF,
    ),
    "pruned_heads": (None, {}),
    "quantization_config": (None,),
}

SILENT = frozenset(
    # Keys about the file itself, the tokenizer, storage, implementation details and the use of outputs. None of them
    # changes the loss of the next token or its gradients.
    """
    _attn_implementation _attn_implementation_autoset _name_or_path architectures attn_implementation auto_map
    chunk_size_feed_forward dtype finetuning_task gradient_checkpointing id2label is_decoder label2id model_type
    output_attentions output_hidden_states prefix pretraining_tp problem_type reorder_and_upcast_attn return_dict
    task_specific_params tf_legacy_loss tokenizer_class torch_dtype torchscript transformers_version use_bfloat16
    use_cache use_return_dict
    bos_token_id decoder_start_token_id eos_token_id pad_token_id sep_token_id
    n_ctx summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length min_length
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores remove_invalid_values
    repetition_penalty return_dict_in_generate suppress_tokens temperature top_k top_p typical_p
    """.split()
)


def read_config(path: Path, given: Mapping[str, object], *, planned: bool) -> Fields:
    """Return the fields that a config file sets, except those in `given`, which override the file.

    Raises `InputError` for a file that cannot be read, and for settings that no model here implements. If the model is
    only `planned`, such settings produce a warning instead.
    """
    config = read_object(path, f"--model {str(path)!r}")
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _HONOURED:
        from meshmark.models.planned_config import PLANNED_TYPES  # which imports this module

        known = ", ".join([*_HONOURED, *(PLANNED_TYPES if planned else ())])
        raise InputError(f"--model {str(path)!r}: model_type is {kind!r}, expected one of {known}")
    fields: Fields = {"family": Family.GPT if kind == "gpt2" else Family.LLAMA}
    for field, (key, usual) in _HONOURED[kind].items():
        fields[field] = _entry(path, config, key, usual)
    for field, key in _OPTIONAL.items():
        if config.get(key) is not None:
            fields[field] = _entry(path, config, key, _REQUIRED)
    own = {key for key, _ in _HONOURED[kind].values()} | {*_OPTIONAL.values(), "head_dim"}
    own |= {*_GPT2_DROPOUTS} if kind == "gpt2" else {"rope_theta", "rope_scaling", "rope_parameters"}
    _expect_width(path, config, fields)
    changed = [*_changes(config, kind, {**fields, **given}, own)]
    for field, read in (("dropout", _dropout), ("rope_theta", _rope_theta)):
        if field not in given:
            try:
                fields |= read(config, kind)
            except InputError as error:
                changed.append(str(error))
    if changed:
        _report_changes(path, changed, planned=planned)
    return fields


def _report_changes(path: Path, changed: list[str], *, planned: bool) -> None:
    told = f"{path}: no model here does what it says: {'; '.join(changed)}"
    if planned:
        warnings.warn(f"{told}; planned without", stacklevel=4)
        return
    raise InputError(
        f"--model {told}. Another model would be trained. If that is intended, remove the key from the file, or set it "
        "to the value of the model here"
    )


def read_object(path: Path, named: str, *, largest: int = _LARGEST_FILE) -> dict[str, object]:
    """Return the object in a config file, or an empty one if the file holds anything else. Messages call it `named`.

    Raises `InputError` for a file that cannot be read, has over `largest` bytes, or is not JSON.
    """
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):  # to open a pipe waits for whoever writes to it
            raise InputError(f"{named}: no regular file; expected a Hugging Face config.json")
        with path.open("rb") as file:
            text = file.read(largest + 1)
        if len(text) > largest:
            raise InputError(f"{named}: over {largest:,} bytes, which no model's config.json has")
        config = json.loads(text)
    except OSError as error:
        raise InputError(f"{named}: {error.strerror}; expected a Hugging Face config.json") from error
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"{named}: not JSON ({error}); expected a Hugging Face config.json") from error
    return config if isinstance(config, dict) else {}


def _expect_width(path: Path, config: Mapping[str, object], fields: Fields) -> None:
    head_dim = fields["hidden"] / fields["num_heads"]  # type: ignore[operator]
    if config.get("head_dim") not in (None, head_dim):
        raise InputError(
            f"--model {str(path)!r}: head_dim is {config['head_dim']!r}; expected hidden_size / num_attention_heads, "
            f"{head_dim:g}: other widths are not modelled"
        )


def _changes(config: Mapping[str, object], kind: str, fields: Mapping[str, object], own: set[str]) -> Iterator[str]:
    """Yield descriptions of the settings that are not honoured and would change the model."""
    if kind in _LEFT_OUT:
        yield f"model_type {kind}, whose {_LEFT_OUT[kind]}"
    # Mistral's window is on unless the file says null; Qwen's is off unless `use_sliding_window` says true.
    window = config.get("sliding_window", 4096) if kind == "mistral" else None
    if isinstance(window, int) and window < fields["seq_len"]:  # type: ignore[operator]
        yield f"sliding_window {window}, below seq_len {fields['seq_len']} (seq_len={window} behind the file is within)"
    windowed = {"sliding_window", "max_window_layers", "layer_types"}
    if isinstance(types := config.get("layer_types"), list) and set(types) - {"full_attention"}:
        yield f"layer_types {', '.join(sorted(map(str, set(types))))} (here: full_attention)"
    for key, value in config.items():
        if key in _UNCHANGING:
            if not _among(value, same := _UNCHANGING[key]):
                yield f"{key} {json.dumps(value)[:60]} (here: {' or '.join(json.dumps(one) for one in same[-2:])})"
        elif key not in own | windowed | SILENT:
            near = difflib.get_close_matches(key, own | windowed | SILENT | _UNCHANGING.keys(), n=1)
            yield f"{key} {json.dumps(value)[:60]}, which is not known" + (f" (is {near[0]} meant?)" if near else "")


def _among(value: object, same: tuple[object, ...]) -> bool:
    """Return whether `value` equals one of `same`. Booleans and numbers differ, as in JSON; 0 and 0.0 are equal."""
    return any(value == one and isinstance(value, bool) is isinstance(one, bool) for one in same)


def _dropout(config: Mapping[str, object], kind: str) -> Fields:
    """Return no fields, or raise `InputError` if dropout is on. GPT-2's default in Transformers is 0.1."""
    rates = {key: config.get(key, 0.1) for key in (_GPT2_DROPOUTS if kind == "gpt2" else ())}
    if any(not _among(rate, _OFF) for rate in rates.values()):
        told = ", ".join(f"{key} {json.dumps(rate)[:60]}" for key, rate in rates.items())
        raise InputError(f"{told} (here: 0; add dropout=0 after the file to accept that, or dropout=0.1 for all)")
    return {}


def _rope_theta(config: Mapping[str, object], kind: str) -> Fields:
    """Return the base of plain rotary positions.

    Transformers before version 5 has `rope_theta` and `rope_scaling`; later versions have `rope_parameters`. Raises
    `InputError` for scaled positions.
    """
    if kind == "gpt2":
        return {}
    said = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(said, dict):
        raise InputError(f"rope_scaling {json.dumps(said)[:60]} (here: none)")
    scaling = said.get("rope_type", said.get("type", "default"))
    others = {key: value for key, value in said.items() if key not in ("rope_type", "type", "rope_theta")}
    if scaling != "default" or others:
        raise InputError(f"rope_scaling {json.dumps(said)[:100]} (here: none)")
    theta = said.get("rope_theta", config.get("rope_theta", 10000.0))
    if not _is_number(theta):
        raise InputError(f"rope_theta {json.dumps(theta)[:60]} (here: a number)")
    return {"rope_theta": float(theta)}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _entry(path: Path, config: Mapping[str, object], key: str, usual: object) -> float:
    value = config.get(key, usual)
    where = f"--model {str(path)!r}: {key} is {str(value)[:40]}"
    expected, holds = _EXPECTED.get(key, (f"a whole number from 1 to {LARGEST:,}", _is_dimension))
    if not holds(value):
        raise InputError(f"{where}, expected {expected}")
    return value  # type: ignore[return-value]


def _is_dimension(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LARGEST


def _is_above_zero(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


_EXPECTED: dict[str, tuple[str, Callable[[object], bool]]] = {
    "tie_word_embeddings": ("true or false", lambda value: isinstance(value, bool)),
    **dict.fromkeys(("initializer_range", "rms_norm_eps", "layer_norm_epsilon"), ("a number above 0", _is_above_zero)),
}
