"""Parse models that a user describes by dimensions or by the `config.json` of a Hugging Face checkpoint."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import cast

from meshmark.errors import InputError
from meshmark.models.hub_config import LARGEST, Fields, read_config
from meshmark.models.planned_config import planned_model, planned_type
from meshmark.models.transformer import TEXT_FAMILIES, Family, ModelSpec

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
    "rope_theta": "rope_theta",
    "norm_eps": "norm_eps",
}
"""Keys of a description, and the `ModelSpec` field that each one sets."""
_NUMBERS = ("dropout", "init_std", "rope_theta", "norm_eps")
"""Keys that take any number, whose range `ModelSpec` checks."""


def is_description(text: str) -> bool:
    """Return whether `text` describes a model, as opposed to naming a preset."""
    return "=" in text or text.partition(",")[0].endswith(".json")


def described_model(text: str, *, planned: bool = False) -> ModelSpec:
    """Return the model of `KEY=VALUE,...` or of `FILE.json,KEY=VALUE,...`.

    The family defaults to GPT. `heads`, `kv_heads` and `ffn_hidden` default to the family's usual proportions. A
    setting in the file that no model here implements raises `InputError`; if the model is only `planned`, it is a
    warning. Also raises `InputError` for text that cannot be parsed, with its position and what was expected.
    """
    first, comma, rest = text.partition(",")
    if "=" in first:
        return _model(text, _options(text, text, 1))
    given = _options(text, rest, len(first) + 2) if comma else {}
    if kind := planned_type(Path(first), planned=planned, seq_len=given.get("seq_len")):
        if not planned:
            raise InputError(f"--model {first!r}: {kind} is planned, by `plan` and `predict`, and not trained here")
        return planned_model(Path(first), given)
    return _model(text, read_config(Path(first), given, planned=planned) | given)


def describe(model: ModelSpec) -> str:
    """Return a description from which `described_model` reads the same dimensions."""
    values = {key: getattr(model, field) for key, field in KEYS.items()}
    return ",".join(f"{key}={int(value) if isinstance(value, bool) else value}" for key, value in values.items())


def _options(whole: str, text: str, position: int) -> Fields:
    """Return the fields that `text` sets. `text` starts at `position` of `whole`, which errors refer to."""
    fields: Fields = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        where = f"--model {whole!r}: {part!r} at character {position}"
        if not equals or key not in KEYS:
            raise InputError(f"{where}: expected KEY=VALUE, with a KEY of {', '.join(KEYS)}")
        if KEYS[key] in fields:
            raise InputError(f"{where}: {key} is given twice")
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
    if key in _NUMBERS:
        try:
            return float(text)
        except ValueError:
            raise InputError(f"{where}: expected a number") from None
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(LARGEST)) and 1 <= int(text) <= LARGEST):
        raise InputError(f"{where}: expected a whole number from 1 to {LARGEST:,}")
    return int(text)


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
    """Return the default number of heads: 64 dimensions each, or fewer heads if the width does not divide evenly."""
    most = max(1, hidden // 64)
    return next((n for n in range(most, 1, -1) if hidden % (2 * n) == 0), 1)


def _name(model: ModelSpec) -> str:
    """Return a name that differs from that of any other model of the family."""
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
    name += f"d{model.dropout:.9g}" if model.dropout != plain.dropout else ""
    name += f"t{model.rope_theta:.9g}" if model.rope_theta != plain.rope_theta else ""
    name += f"e{model.norm_eps:.9g}" if model.norm_eps != plain.norm_eps else ""
    return name + (f"i{model.init_std:.9g}" if model.init_std != plain.init_std else "")
