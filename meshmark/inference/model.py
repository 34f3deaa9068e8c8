"""Small causal language models with random weights, and their log probabilities in float64 and in narrower formats.

Weights are larger than Transformers draws them, so that attention is peaked: an engine that reads a wrong position
would otherwise be hidden by its own rounding.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshmark.reference.own_model import InFloat64

_COMMON = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama-tiny": {"model_type": "llama", **_COMMON},
    "qwen2-tiny": {"model_type": "qwen2", **_COMMON},
    "qwen3-tiny": {"model_type": "qwen3", **_COMMON},
}
"""Configs by name. Qwen2 has biases of queries, keys and values; Qwen3 has norms of queries and keys."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_GAIN = 1.6
"""Of queries and keys: the deviation of attention scores is its square."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the size of a KV cache follows from."""

    layers: int
    kv_heads: int
    head_dim: int

    def token_bytes(self, precision: str, tp: int = 1) -> int:
        """Return the bytes of one token's keys and values on one of `tp` ranks."""
        return 2 * self.layers * (self.kv_heads // tp) * self.head_dim * DTYPES[precision].itemsize


def shape_of(name: str) -> Shape:
    """Return what the KV cache of a model follows from."""
    config = MODELS[name]
    return Shape(
        layers=config["num_hidden_layers"], kv_heads=config["num_key_value_heads"], head_dim=config["head_dim"]
    )


def write_model(name: str, folder: Path, seed: int = 0) -> Path:
    """Write a model's config and weights to a folder, as `from_pretrained` reads them. Returns the folder."""
    import transformers

    values = dict(MODELS[name])
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    drawn = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            parameter.copy_(_initial(path, parameter, drawn))
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, "torch_dtype": "float32", "dtype": "float32"}))
    return folder


def _initial(path: str, parameter: Tensor, drawn: torch.Generator) -> Tensor:
    noise = torch.randn(parameter.shape, generator=drawn)
    if parameter.dim() == 1:
        return 0.3 * noise if path.endswith("bias") else 1 + 0.1 * noise
    if "embed_tokens" in path:
        return noise
    gain = _GAIN if "q_proj" in path or "k_proj" in path else 1.0
    scale: float = gain / parameter.shape[1] ** 0.5
    return noise * scale


def load_model(folder: Path, dtype: torch.dtype, attention: str = "sdpa") -> nn.Module:
    """Return the model in a folder, for evaluation."""
    import transformers

    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention
    )
    model: nn.Module = loaded.to(dtype).eval()
    return model


class Truth:
    """The model in float64, each sequence alone and in one pass, without a cache."""

    def __init__(self, folder: Path) -> None:
        self._model = load_model(folder, torch.float64, "eager")
        self._kept: dict[tuple[int, ...], Tensor] = {}

    @torch.no_grad()
    def logprobs(self, tokens: Sequence[int]) -> Tensor:
        """Return log probabilities of shape (len(tokens), vocabulary): row i is of what follows token i."""
        key = tuple(tokens)
        if key not in self._kept:
            with InFloat64():
                logits = self._model(input_ids=torch.tensor([key]), use_cache=False).logits
            assert logits.dtype is torch.float64
            self._kept[key] = logits[0].log_softmax(-1)
        return self._kept[key]


class Narrow:
    """The model in a run's own precision, in the ways that correct engines compute it."""

    WAYS = ("one pass", "eager attention", "with a cache", "in a batch")

    def __init__(self, folder: Path, precision: str) -> None:
        dtype = DTYPES[precision]
        self._sdpa, self._eager = load_model(folder, dtype), load_model(folder, dtype, "eager")

    def logprobs(self, sequences: Sequence[Sequence[int]], num_prompt: Sequence[int]) -> dict[str, list[Tensor]]:
        """Return the log probabilities of each sequence by each way, as `Truth.logprobs` does."""
        alone = [torch.tensor([list(tokens)]) for tokens in sequences]
        return {
            "one pass": [self._of(self._sdpa, ids) for ids in alone],
            "eager attention": [self._of(self._eager, ids) for ids in alone],
            "with a cache": [self._cached(ids, n) for ids, n in zip(alone, num_prompt, strict=True)],
            "in a batch": self._batched(sequences),
        }

    @torch.no_grad()
    def _of(self, model: nn.Module, ids: Tensor) -> Tensor:
        return _log_softmax(model(input_ids=ids, use_cache=False).logits[0])

    @torch.no_grad()
    def _cached(self, ids: Tensor, num_prompt: int) -> Tensor:
        """Return log probabilities of a prompt in one pass and of each further token by its own."""
        out = self._sdpa(input_ids=ids[:, :num_prompt], use_cache=True)
        rows = [out.logits[0]]
        for index in range(num_prompt, ids.shape[1]):
            out = self._sdpa(input_ids=ids[:, index : index + 1], past_key_values=out.past_key_values, use_cache=True)
            rows.append(out.logits[0])
        return _log_softmax(torch.cat(rows))

    @torch.no_grad()
    def _batched(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        longest = max(map(len, sequences))
        ids, mask = left_padded(sequences, longest)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = self._eager(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        return [_log_softmax(row[longest - len(tokens) :]) for row, tokens in zip(logits, sequences, strict=True)]


def left_padded(sequences: Sequence[Sequence[int]], length: int) -> tuple[Tensor, Tensor]:
    """Return token ids of shape (sequences, length), padded on the left with 0, and the mask of what is no padding."""
    ids = torch.tensor([[0] * (length - len(tokens)) + list(tokens) for tokens in sequences])
    mask = torch.tensor([[0] * (length - len(tokens)) + [1] * len(tokens) for tokens in sequences])
    return ids, mask


def _log_softmax(logits: Tensor) -> Tensor:
    """Return log probabilities as engines compute them, in float32."""
    return logits.float().log_softmax(-1).double()


def prompts(lengths: Iterable[int], seed: int = 0, vocabulary: int = 320) -> list[tuple[int, ...]]:
    """Return random prompts of these lengths."""
    drawn = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(4, vocabulary, (n,), generator=drawn).tolist()) for n in lengths]
