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

from meshmark.inference import quantized
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
    "llama-tiny-2k": {"model_type": "llama", **_COMMON, "max_position_embeddings": 2048},
    "qwen2-tiny": {"model_type": "qwen2", **_COMMON},
    "qwen3-tiny": {"model_type": "qwen3", **_COMMON},
}
"""Configs by name. Qwen2 has biases of queries, keys and values; Qwen3 has norms of queries and keys."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Formats of an engine's numbers."""

    dtype: torch.dtype
    """Data type of the computation; also of weights and the KV cache, unless they are narrower."""
    weight_bits: int = 0
    """Bits of weights of linear layers in blocks: whole multiples of a scale. 0 if they are of `dtype`."""
    cache_dtype: torch.dtype | None = None
    """Data type of keys and values in the cache, if it differs. They are rounded to it without a scale."""


PRECISIONS = {
    "fp32": Precision(dtype=torch.float32),
    "bf16": Precision(dtype=torch.bfloat16),
    "fp8-cache": Precision(dtype=torch.float32, cache_dtype=torch.float8_e4m3fn),
    "int8-weights": Precision(dtype=torch.float32, weight_bits=8),
    "int4-weights": Precision(dtype=torch.float32, weight_bits=4),
    "bf16-int4-weights": Precision(dtype=torch.bfloat16, weight_bits=4),
}
GROUP_SIZE = 32
"""Inputs that share a scale where weights have 4 bits; where they have 8, all inputs of an output do."""
TIE_ROOM = 1e-5
"""Error of a key or value in float32, relative to the largest of its head: rotary angles of late positions are off
by as much. Values nearer than this to the middle of two numbers of a narrow cache may be rounded either way."""
FOLLOWED = 1e-5
"""Error of a log probability that roundings of ties are not looked for to explain, where the noise is not known yet: a
few times that of float32."""
AT_ONCE, WORTHWHILE = 0.1, 0.95
"""Shares of a sum of squared errors. A rounding that leaves less than the first is taken at once. One that leaves more
than the second explains nothing: many leave a little less by chance."""
_GAIN = 1.6
"""Gain of queries and keys; the deviation of attention scores is its square."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The dimensions that determine the size of a KV cache."""

    layers: int
    kv_heads: int
    head_dim: int

    def token_bytes(self, precision: str, tp: int = 1) -> int:
        """Return the bytes of one token's keys and values on one of `tp` ranks."""
        formats = PRECISIONS[precision]
        dtype = formats.cache_dtype or formats.dtype
        return 2 * self.layers * (self.kv_heads // tp) * self.head_dim * dtype.itemsize


def shape_of(name: str) -> Shape:
    """Return what the KV cache of a model follows from."""
    config = MODELS[name]
    return Shape(
        layers=config["num_hidden_layers"], kv_heads=config["num_key_value_heads"], head_dim=config["head_dim"]
    )


def write_model(name: str, folder: Path, seed: int = 0, weight_bits: int = 0) -> Path:
    """Write a model's config and weights to a folder, as `from_pretrained` reads them. Returns the folder.

    With `weight_bits` it is a checkpoint of packed integers and scales (`quantized`), which engines decode themselves.
    """
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
    written |= {"torch_dtype": "float32", "dtype": "float32"}
    if weight_bits:
        from safetensors.torch import load_file, save_file

        weights = folder / "model.safetensors"
        save_file(quantized.quantize(load_file(weights), weight_bits, GROUP_SIZE), weights, {"format": "pt"})
        written["quantization_config"] = quantized.config(weight_bits, GROUP_SIZE)
    (folder / "config.json").write_text(json.dumps(written))
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
    """Return the model in a folder, for evaluation. Integer weights become what they stand for."""
    import transformers

    if "quantization_config" in json.loads((folder / "config.json").read_text()):
        from safetensors.torch import load_file

        config = transformers.AutoConfig.from_pretrained(folder)
        del config.quantization_config
        loaded = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attention
        )
        loaded.load_state_dict(quantized.dequantize(load_file(folder / "model.safetensors")))
    else:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=attention
        )
    model: nn.Module = loaded.to(dtype).eval()
    return model


class Truth:
    """The model in float64, each sequence alone and in one pass.

    With `cache_dtype`, keys and values are rounded to it. Where a value is within float32's error of the middle of two
    numbers of that format, a correct engine may take either, and what follows is judged with the one that it took.
    """

    def __init__(self, folder: Path, cache_dtype: torch.dtype | None = None, rounding: str = "nearest") -> None:
        self._model = load_model(folder, torch.float64, "eager")
        self._cache_dtype, self._rounding = cache_dtype, rounding
        self._kept: dict[tuple[tuple[int, ...], tuple[float, ...], float], Tensor] = {}

    @property
    def rounds_cache(self) -> bool:
        """Whether keys and values are rounded, so that two correct runs may differ by more than noise."""
        return self._cache_dtype is not None

    def logprobs(self, tokens: Sequence[int], told: Sequence[float] = (), room: float = FOLLOWED) -> Tensor:
        """Return log probabilities of shape (len(tokens), vocabulary): row i is of what follows token i.

        `told` is what an engine said of the last tokens. By it roundings are chosen that could go either way, if it is
        off by more than `room`.
        """
        key = (tuple(tokens), tuple(told), room) if self.rounds_cache and told else (tuple(tokens), (), 0.0)
        if key not in self._kept:
            self._kept[key] = self._followed(*key) if key[1] else self._pass(key[0])[0]
        return self._kept[key]

    @torch.no_grad()
    def _pass(self, tokens: Sequence[int], others: frozenset[Place] = frozenset()) -> tuple[Tensor, list[Place]]:
        """Return log probabilities and the places of values that could be rounded either way, the likeliest first."""
        cache = rounded_cache(self._cache_dtype, others, self._rounding) if self._cache_dtype else None
        ids = torch.tensor([tuple(tokens)])
        with InFloat64():
            logits = self._model(input_ids=ids, past_key_values=cache, use_cache=cache is not None).logits
        assert logits.dtype is torch.float64
        return logits[0].log_softmax(-1), [place for _, place in sorted(cache.ties)] if cache else []

    def _followed(self, tokens: Sequence[int], told: Sequence[float], room: float) -> Tensor:
        """Return log probabilities with those roundings of ties by which they are nearest to what an engine told.

        One rounding after the other goes the other way, each time the one that explains most. By each, values in later
        layers and their ties become others. The first that explains anything would not do: about half of all bring a
        few tokens a little nearer, by chance.
        """
        if len(told) >= len(tokens):
            return self._pass(tokens)[0]
        found, at = torch.tensor(told, dtype=torch.float64), torch.arange(len(tokens) - 1)[-len(told) :]
        taken = torch.tensor(tokens)[at + 1]

        def errors(rows: Tensor) -> Tensor:
            return (rows[at, taken] - found).abs()

        others: frozenset[Place] = frozenset()
        rows, ties = self._pass(tokens)
        while len(wrong := (errors(rows) > room).nonzero()):
            least = before = float(errors(rows).square().sum())
            # What is rounded at a position changes nothing before it.
            for place in (tie for tie in ties if tie[2] <= int(at[wrong[-1]])):
                # One that was taken before may be taken back.
                rows_other, ties_other = self._pass(tokens, others ^ {place})
                left = float(errors(rows_other).square().sum())
                if left < least:
                    least, best = left, (others ^ {place}, rows_other, ties_other)
                if least < AT_ONCE * before:
                    break
            if not least < WORTHWHILE * before:
                break
            others, rows, ties = best
        return rows


Place = tuple[int, int, int, int, int]
"""Index of an element in a KV cache: layer, 0 for keys or 1 for values, position, head, index in the head."""


def narrowed(x: Tensor, dtype: torch.dtype, rounding: str = "nearest") -> Tensor:
    """Return numbers of a narrow format in the format of `x`: the nearest, or the next "towards zero"."""
    nearest = x.to(dtype)
    if rounding == "towards zero":
        # Of numbers of one sign the next smaller one has the code before, whatever the exponent.
        further = nearest.to(x.dtype).abs() > x.abs()
        nearest = (nearest.view(torch.uint8) - further.to(torch.uint8)).view(dtype)
    return nearest.to(x.dtype)


def rounded_cache(dtype: torch.dtype, others: frozenset[Place] = frozenset(), rounding: str = "nearest") -> Any:  # noqa: ANN401
    """Return a cache of Transformers that rounds keys and values to a narrow format when they are written.

    In float64 it notes where the rounding could go either way: `ties` has the distance to where it changes and the
    place. It goes the other way at the places in `others`.
    """
    import transformers

    class RoundedCache(transformers.DynamicCache):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.ties: list[tuple[float, Place]] = []

        def update(
            self,
            key_states: Tensor,
            value_states: Tensor,
            layer_idx: int,
            *args: Any,  # noqa: ANN401
            **kwargs: Any,  # noqa: ANN401
        ) -> Any:  # noqa: ANN401
            start = self.get_seq_length(layer_idx)
            both = [self._rounded(x, (layer_idx, i), start) for i, x in enumerate((key_states, value_states))]
            return super().update(*both, layer_idx, *args, **kwargs)

        def _rounded(self, x: Tensor, where: tuple[int, int], start: int) -> Tensor:
            """Round keys or values of shape (rows, heads, tokens, head size)."""
            taken = narrowed(x, dtype, rounding)
            if x.dtype is not torch.float64:
                return taken
            room = TIE_ROOM * x.abs().amax(-1, keepdim=True).expand_as(x)
            low, high = (narrowed(x + sign * room, dtype, rounding) for sign in (-1, 1))
            other = torch.where(taken == low, high, low)
            changes = (low + high) / 2
            if rounding == "towards zero":
                changes = torch.where(low.abs() > high.abs(), low, high)
            distance = (changes - x).abs() / room
            either = low != high
            for at, far in zip(map(tuple, either.nonzero().tolist()), distance[either].tolist(), strict=True):
                place = (*where, start + at[2], at[1], at[3])
                self.ties.append((far, place))
                if place in others:
                    taken[at] = other[at]
            return taken

    return RoundedCache()


class Narrow:
    """The model in a run's own precision, in the ways that correct engines compute it."""

    WAYS = ("one pass", "eager attention", "with a cache", "in a batch")

    def __init__(self, folder: Path, precision: str, rounding: str = "nearest") -> None:
        dtype, self._cache_dtype = PRECISIONS[precision].dtype, PRECISIONS[precision].cache_dtype
        self._rounding = rounding
        self._sdpa, self._eager = load_model(folder, dtype), load_model(folder, dtype, "eager")

    def _cache(self) -> dict[str, Any]:
        """Return what makes a model round keys and values, if the precision does."""
        if self._cache_dtype is None:
            return {"use_cache": False}
        return {"use_cache": True, "past_key_values": rounded_cache(self._cache_dtype, rounding=self._rounding)}

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
        return _log_softmax(model(input_ids=ids, **self._cache()).logits[0])

    @torch.no_grad()
    def _cached(self, ids: Tensor, num_prompt: int) -> Tensor:
        """Return log probabilities of a prompt in one pass and of each further token by its own."""
        out = self._sdpa(input_ids=ids[:, :num_prompt], **{**self._cache(), "use_cache": True})
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
        logits = self._eager(input_ids=ids, attention_mask=mask, position_ids=positions, **self._cache()).logits
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
