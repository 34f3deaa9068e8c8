"""Models that a user describes: by their dimensions, or by the `config.json` of a Hugging Face checkpoint."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import cast

from meshmark.errors import InputError
from meshmark.spec.model_spec import TEXT_FAMILIES, Family, ModelSpec

KEYS = {
    "family": "family",
    "layers": "num_layers",
    "hidden": "hidden",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "ffn_hidden": "ffn_hidden",
    "vocab": "vocab_size",
    "seq_len": "seq_len",
    "tied_embeddings": "tied_embeddings",
    "causal": "causal",
    "dropout": "dropout",
    "init_std": "init_std",
}
"""What a description may say, and the field of `ModelSpec` that it fills."""
Fields = dict[str, Family | float]
"""Of a `ModelSpec`, by name."""
_LARGEST = 10**7
"""Of any dimension: beyond, a unit is wrong."""
_LARGEST_FILE = 2**20

# By `model_type`: the key of each field in config.json, and its value where that is left out (None: it may not be).
_LLAMA_KEYS: dict[str, tuple[str, object]] = {
    "num_layers": ("num_hidden_layers", None),
    "hidden": ("hidden_size", None),
    "num_heads": ("num_attention_heads", None),
    "ffn_hidden": ("intermediate_size", None),
    "vocab_size": ("vocab_size", None),
    "seq_len": ("max_position_embeddings", 2048),
    "tied_embeddings": ("tie_word_embeddings", False),
    "init_std": ("initializer_range", 0.02),
}
_GPT2_KEYS: dict[str, tuple[str, object]] = {
    "num_layers": ("n_layer", 12),
    "hidden": ("n_embd", 768),
    "num_heads": ("n_head", 12),
    "vocab_size": ("vocab_size", 50257),
    "seq_len": ("n_positions", 1024),
    "tied_embeddings": ("tie_word_embeddings", True),
    "init_std": ("initializer_range", 0.02),
}
_LEFT_OUT = {
    "mistral": "its sliding window is not trained: attention is over the whole sequence",
    "qwen2": "the biases of its queries, keys and values are left out",
    "qwen3": "the norms of its queries and keys are left out",
}
"""By `model_type`: what this project's model of that family does not have."""


def is_description(text: str) -> bool:
    """Whether `text` describes a model, where presets have names."""
    return "=" in text or text.partition(",")[0].endswith(".json")


def described_model(text: str) -> ModelSpec:
    """The model of `KEY=VALUE,...` or of `FILE.json,KEY=VALUE,...`; warns of what it leaves out of the file's.

    A GPT, unless family says another; heads, kv_heads and ffn_hidden have the family's usual proportions where they are
    left out. Raises `InputError` with the position of what cannot be read, and what was expected.
    """
    first, comma, rest = text.partition(",")
    if "=" in first:
        return _model(text, _options(text, text, 1))
    return _model(text, _from_config(Path(first)) | (_options(text, rest, len(first) + 2) if comma else {}))


def describe(model: ModelSpec) -> str:
    """The description that `described_model` reads the same dimensions from."""
    values = {key: getattr(model, field) for key, field in KEYS.items()}
    return ",".join(f"{key}={int(value) if isinstance(value, bool) else value}" for key, value in values.items())


def _options(whole: str, text: str, position: int) -> Fields:
    """What `text`, which begins at a position of `whole`, says."""
    fields: Fields = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        where = f"--model {whole!r}: {part!r} at character {position}"
        if not equals or key not in KEYS:
            raise InputError(f"{where}: expected KEY=VALUE, with a KEY of {', '.join(KEYS)}")
        if KEYS[key] in fields:
            raise InputError(f"{where}: {key} stands there already")
        fields[KEYS[key]] = _value(where, key, value)
        position += len(part) + 1
    return fields


def _value(where: str, key: str, text: str) -> Family | float:
    if key == "family":
        if text not in TEXT_FAMILIES:
            raise InputError(f"{where}: expected {' or '.join(sorted(TEXT_FAMILIES))}")
        return Family(text)
    if key in ("tied_embeddings", "causal"):
        if text not in ("true", "false", "0", "1"):
            raise InputError(f"{where}: expected true or false")
        return text in ("true", "1")
    if key in ("dropout", "init_std"):
        try:
            return float(text)
        except ValueError:
            raise InputError(f"{where}: expected a number") from None
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(_LARGEST)) and 1 <= int(text) <= _LARGEST):
        raise InputError(f"{where}: expected a whole number from 1 to {_LARGEST:,}")
    return int(text)


def _from_config(path: Path) -> Fields:
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise InputError(f"--model {str(path)!r}: over {_LARGEST_FILE:,} bytes, which no model's config.json has")
        config = json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"--model {str(path)!r}: {error.strerror}; expected a Hugging Face config.json") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"--model {str(path)!r}: not JSON ({error}); expected a Hugging Face config.json") from error
    kind = config.get("model_type") if isinstance(config, dict) else None
    keys = {"gpt2": _GPT2_KEYS, **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _LLAMA_KEYS)}
    if not isinstance(kind, str) or kind not in keys:
        raise InputError(f"--model {str(path)!r}: model_type is {kind!r}, expected one of {', '.join(keys)}")
    fields: Fields = {"family": Family.GPT if kind == "gpt2" else Family.LLAMA}
    for field, (key, usual) in keys[kind].items():
        fields[field] = _entry(path, config, key, usual)
    for field, key in (("num_kv_heads", "num_key_value_heads"), ("ffn_hidden", "n_inner")):
        if config.get(key) is not None:
            fields[field] = _entry(path, config, key, None)
    head_dim = fields["hidden"] / fields["num_heads"]  # type: ignore[operator]
    if config.get("head_dim") not in (None, head_dim):
        raise InputError(
            f"--model {str(path)!r}: head_dim is {config['head_dim']!r}; expected hidden_size / num_attention_heads, "
            f"{head_dim:g}: other widths are not modelled"
        )
    if kind in _LEFT_OUT:
        warnings.warn(f"{path}: {_LEFT_OUT[kind]}", stacklevel=2)
    return fields


def _entry(path: Path, config: dict[str, object], key: str, usual: object) -> float:
    value = config.get(key, usual)
    where = f"--model {str(path)!r}: {key} is {str(value)[:40]}"
    if key == "tie_word_embeddings":
        if isinstance(value, bool):
            return value
        raise InputError(f"{where}, expected true or false")
    if key == "initializer_range":
        if isinstance(value, int | float) and value > 0:
            return value
        raise InputError(f"{where}, expected a number above 0")
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _LARGEST:
        return value
    raise InputError(f"{where}, expected a whole number from 1 to {_LARGEST:,}")


def _model(text: str, fields: Fields) -> ModelSpec:
    if missing := [key for key in ("layers", "hidden") if KEYS[key] not in fields]:
        raise InputError(f"--model {text!r}: {' and '.join(missing)} missing; expected at least layers=N,hidden=N")
    hidden, family = cast(int, fields["hidden"]), fields.get("family", Family.GPT)
    heads = fields.get("num_heads", _usual_heads(hidden))
    # A SwiGLU of two thirds of a GPT's width has as many parameters; in sixteens, as kernels like it.
    wide = 4 * hidden if family is Family.GPT else -(-8 * hidden // 48) * 16
    usual: Fields = {"num_heads": heads, "num_kv_heads": heads, "ffn_hidden": wide, "vocab_size": 256, "seq_len": 64}
    described = ModelSpec(name=text, **{"family": family, **usual, **fields})  # type: ignore[arg-type]
    return dataclasses.replace(described, name=_name(described))


def _usual_heads(hidden: int) -> int:
    """Of 64 dimensions, or as few more as divide the width evenly."""
    most = max(1, hidden // 64)
    return next((n for n in range(most, 1, -1) if hidden % (2 * n) == 0), 1)


def _name(model: ModelSpec) -> str:
    """What tells it from any other of its family."""
    plain = ModelSpec(
        name="",
        family=model.family,
        num_layers=model.num_layers,
        hidden=model.hidden,
        num_heads=model.num_heads,
        num_kv_heads=model.num_heads,
        ffn_hidden=model.ffn_hidden,
        vocab_size=model.vocab_size,
        seq_len=model.seq_len,
    )
    name = f"{model.family}-l{model.num_layers}h{model.hidden}a{model.num_heads}"
    name += f"kv{model.num_kv_heads}" if model.num_kv_heads != model.num_heads else ""
    name += f"f{model.ffn_hidden}v{model.vocab_size}s{model.seq_len}"
    name += "tied" if model.tied_embeddings else ""
    name += "" if model.causal else "encoder"
    name += f"d{model.dropout:g}" if model.dropout != plain.dropout else ""
    return name + (f"i{model.init_std:g}" if model.init_std != plain.init_std else "")
