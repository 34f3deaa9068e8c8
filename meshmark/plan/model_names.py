"""Models of the published tables, in addition to the project's presets, and models of a given size."""

from __future__ import annotations

import difflib
import math
import re
from typing import TypedDict

from meshmark.errors import InputError, UnknownNameError
from meshmark.models.model_text import described_model, is_description
from meshmark.models.planned_model import PlannedModel
from meshmark.models.transformer import MODELS, Dimensions, Family, ModelSpec, gpt, llama


class _Vocabulary(TypedDict):
    vocab_size: int
    tied_embeddings: bool


class _Tokens(TypedDict):
    vocab_size: int
    seq_len: int


_MEGATRON: _Vocabulary = {"vocab_size": 51200, "tied_embeddings": True}
_BLOOM: _Vocabulary = {"vocab_size": 250880, "tied_embeddings": True}
_LLAMA3: Dimensions = {"num_kv_heads": 8, "vocab_size": 128256, "seq_len": 8192}
_SWEEP: _Tokens = {"vocab_size": 131072, "seq_len": 4096}


def _planned(name: str, sizes: tuple[int, ...], **others: bool | int) -> PlannedModel:
    """Return a model that is planned and not trained here.

    `sizes` are layers, hidden, heads, kv_heads, ffn_hidden, vocab and seq_len.
    """
    layers, hidden, heads, kv_heads, ffn_hidden, vocab, seq_len = sizes
    return PlannedModel(
        name=name,
        family=Family.LLAMA,
        num_layers=layers,
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn_hidden=ffn_hidden,
        vocab_size=vocab,
        seq_len=seq_len,
        **others,  # type: ignore[arg-type]
    )


def _experts(name: str, sizes: tuple[int, ...], *, experts: tuple[int, int, int], **others: int) -> PlannedModel:
    """Return a mixture of experts: how many there are, how many a token goes through, and the width of each."""
    count, chosen, width = experts
    return _planned(name, sizes, num_experts=count, experts_per_token=chosen, expert_ffn=width, **others)


def _gemma(name: str, sizes: tuple[int, ...], *, head_width: int, window: int = 0, every: int = 1) -> PlannedModel:
    """Return a Gemma, by the config.json of its checkpoint. All layers but every `every`th have windows."""
    return _planned(
        name,
        (*sizes, 8192),
        tied_embeddings=True,
        head_width=head_width,
        window=window,
        windowed_layers=sizes[0] - sizes[0] // every if window else 0,
        norms=4 if window else 2,
    )


PLAN_MODELS: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        # The Ultra-Scale Playbook's sweep: many heads for wide tensor parallelism, a large vocabulary.
        llama("sweep-1b", 16, 2048, 32, 8192, tied_embeddings=True, **_SWEEP),
        llama("sweep-8b", 32, 4096, 32, 14336, **_SWEEP),
        # Llama 3, arXiv:2407.21783 table 3.
        llama("llama-8b", 32, 4096, 32, 14336, **_LLAMA3),
        llama("llama-70b", 80, 8192, 64, 28672, **_LLAMA3),
        llama("llama-405b", 126, 16384, 128, 53248, **_LLAMA3),
        # Llama 2, arXiv:2307.09288 table 1 and appendix A.2.1 (in torchtitan's tables).
        llama("llama2-7b", 32, 4096, 32, 11008, seq_len=4096),
        llama("llama2-13b", 40, 5120, 40, 13824, seq_len=4096),
        llama("llama2-70b", 80, 8192, 64, 28672, num_kv_heads=8, seq_len=4096),
        # Megatron-LM 2019, arXiv:1909.08053 table 1.
        gpt("megatron-1.2b", 40, 1536, 16, seq_len=1024, **_MEGATRON),
        gpt("megatron-2.5b", 54, 1920, 20, seq_len=1024, **_MEGATRON),
        gpt("megatron-4.2b", 64, 2304, 24, seq_len=1024, **_MEGATRON),
        gpt("megatron-8.3b", 72, 3072, 32, seq_len=1024, **_MEGATRON),
        # Megatron-LM SC21, arXiv:2104.04473 table 1.
        gpt("megatron-1.7b", 24, 2304, 24, **_MEGATRON),
        gpt("megatron-3.6b", 30, 3072, 32, **_MEGATRON),
        gpt("megatron-7.5b", 36, 4096, 32, **_MEGATRON),
        gpt("megatron-18b", 40, 6144, 48, **_MEGATRON),
        gpt("megatron-39b", 48, 8192, 64, **_MEGATRON),
        gpt("megatron-76b", 60, 10240, 80, **_MEGATRON),
        gpt("megatron-145b", 80, 12288, 96, **_MEGATRON),
        gpt("megatron-175b", 96, 12288, 96, **_MEGATRON),
        gpt("megatron-310b", 96, 16384, 128, **_MEGATRON),
        gpt("megatron-530b", 105, 20480, 128, **_MEGATRON),
        gpt("megatron-1t", 128, 25600, 160, **_MEGATRON),
        # Korthikanti et al., arXiv:2205.05198 table 3 (the others are Megatron's).
        gpt("megatron-22b", 48, 6144, 64, **_MEGATRON),
        # ZeRO, arXiv:1910.02054 table 4 (heads are in its appendix; 64 dimensions a head, 128 from 8B, are assumed).
        # 40B is printed with a width of 4096, which is 18B; 6144 fits.
        gpt("zero-1.5b", 48, 1600, 25, seq_len=1024),
        gpt("zero-8b", 72, 3072, 24, seq_len=1024),
        gpt("zero-13b", 62, 4096, 32, seq_len=1024),
        gpt("zero-40b", 88, 6144, 48, seq_len=1024),
        gpt("zero-60b", 75, 8192, 64, seq_len=1024),
        gpt("zero-80b", 100, 8192, 64, seq_len=1024),
        gpt("zero-100b", 125, 8192, 64, seq_len=1024),
        gpt("zero-140b", 175, 8192, 64, seq_len=1024),
        gpt("zero-170b", 212, 8192, 64, seq_len=1024),
        # GPipe's Transformer, arXiv:1811.06965 tables 1 to 3, by its number of layers; embedding and head apart
        # (2 V d: 282.2M with three layers).
        *(
            gpt(f"gpipe-transformer-{n}", n, 2048, 32, vocab_size=32000, seq_len=1024)
            for n in (3, 13, 24, 48, 103, 415, 1663)
        ),
        # Gemma, arXiv:2403.08295, 2408.00118 and 2503.19786.
        _gemma("gemma-7b", (28, 3072, 16, 16, 24576, 256000), head_width=256),
        _gemma("gemma2-9b", (42, 3584, 16, 8, 14336, 256000), head_width=256, window=4096, every=2),
        _gemma("gemma2-27b", (46, 4608, 32, 16, 36864, 256000), head_width=128, window=4096, every=2),
        _gemma("gemma3-12b", (48, 3840, 16, 8, 15360, 262208), head_width=256, window=1024, every=6),
        _gemma("gemma3-27b", (62, 5376, 32, 16, 21504, 262208), head_width=128, window=1024, every=6),
        # Nemotron-4, arXiv:2402.16819 table 1 and 2406.11704 table 1, whose feed-forward network has no gate.
        gpt("nemotron4-15b", 32, 6144, 48, num_kv_heads=8, vocab_size=256000, seq_len=4096),
        gpt("nemotron4-340b", 96, 18432, 96, num_kv_heads=8, vocab_size=256000, seq_len=4096),
        # Mixtures of experts, by the config.json of their checkpoints. (Grok-1: github:xai-org/grok-1.)
        _experts("mixtral-8x7b", (32, 4096, 32, 8, 14336, 32000, 4096), experts=(8, 2, 14336)),
        _experts("mixtral-8x22b", (56, 6144, 48, 8, 16384, 32768, 4096), experts=(8, 2, 16384)),
        _experts("qwen3-30b-a3b", (48, 2048, 32, 4, 6144, 151936, 4096), experts=(128, 8, 768), head_width=128),
        _experts("qwen3-235b-a22b", (94, 4096, 64, 4, 12288, 151936, 4096), experts=(128, 8, 1536), head_width=128),
        _experts("grok-1", (64, 6144, 48, 8, 32768, 131072, 8192), experts=(8, 2, 32768)),
        _experts(
            "deepseek-v3",
            (61, 7168, 128, 128, 18432, 129280, 4096),
            experts=(256, 8, 2048),
            shared_ffn=2048,
            dense_layers=3,
            query_rank=1536,
            kv_rank=512,
            rotary_width=64,
            head_width=128,
            value_width=128,
        ),
        # BLOOM-176B, arXiv:2211.05100 table 3.
        gpt("bloom-176b", 70, 14336, 112, **_BLOOM),
    )
}


# Sizes that have a published shape.
_SHAPES = {"gpt-175b": "megatron-175b", "gpt-530b": "megatron-530b", "gpt-1t": "megatron-1t", "gpt-22b": "megatron-22b"}
_LLAMA3_NAME = re.compile(r"llama-?3(?:\.[013])?-(8b|70b|405b)")
_VERSION = re.compile(r"(llama|gemma)-([23]-)")


def known_models() -> dict[str, ModelSpec]:
    """Return all presets by name: the project's and the planner's."""
    return {**MODELS, **PLAN_MODELS}


def plan_model(name: str) -> ModelSpec:
    """Return the preset called `name`, a GPT or LLaMA of the size in a name like `gpt-175b`, or a described model.

    Descriptions are those of `described_model`. Raises `UnknownNameError` with near matches for any other name.
    """
    if is_description(name):
        return described_model(name, planned=True)
    known, name = known_models(), _usual_name(name)
    if name in known:
        return known[name]
    if match := re.fullmatch(r"(gpt|llama)-(\d+(?:\.\d+)?)([bt])", name):
        num_parameters = float(match[2]) * (1e9 if match[3] == "b" else 1e12)
        return model_of_size(num_parameters, family=match[1], name=name)
    raise UnknownNameError("model", name, known)


def _usual_name(name: str) -> str:
    """Return a preset's name for other ways to write it, such as `llama3.1-70b` and `gemma-2-9b`."""
    name = name.lower()
    if match := _LLAMA3_NAME.fullmatch(name):
        return f"llama-{match[1]}"
    return _SHAPES.get(name, _VERSION.sub(r"\1\2", name))


def size_note(name: str) -> str:
    """Describe a model that is named only by its size. Empty for presets and descriptions."""
    if is_description(name) or _usual_name(name) in known_models():
        return ""
    made, near = plan_model(name), difflib.get_close_matches(name, known_models(), n=2)
    shape = f"{made.num_layers} layers, hidden {made.hidden}, {made.num_heads} heads, {made.seq_len} tokens"
    presets = f"; presets near that name: {', '.join(near)}" if near else ""
    return f"{name} is no preset: a {made.family} of that size is planned, of {shape}{presets}"


def model_of_size(num_parameters: float, *, family: str = "gpt", name: str | None = None) -> ModelSpec:
    """Return a transformer of about `num_parameters`, in the proportions of the family's published sizes.

    Depth grows with the cube root of size over 12 h^2, width is a multiple of 1024 (128 for small ones), and heads
    have 128 dimensions. The depth is then chosen to meet the size within half a block.
    """
    if not 1e7 <= num_parameters <= 1e16:
        raise InputError(
            f"a model of {num_parameters:g} parameters is not planned: give the number, at least 1e7 and at most 1e16"
        )
    # GPT-3's table 2.1 and Megatron's table 1 keep h / L between 100 and 200, rising with size.
    ratio = min(200.0, 64.0 * (num_parameters / 1e9) ** 0.12 + 32.0)
    width = (num_parameters * ratio / 12.0) ** (1.0 / 3.0)
    step = 1024 if width > 3000 else 128
    hidden = max(step, round(width / step) * step)
    make = _gpt_of if family == "gpt" else _llama_of
    one, two = (make("", depth, hidden).num_parameters for depth in (1, 2))
    depth = max(1, round((num_parameters - (one - (two - one))) / (two - one)))
    return make(name or f"{family}-{num_parameters / 1e9:.3g}b", depth, hidden)


def _gpt_of(name: str, depth: int, hidden: int) -> ModelSpec:
    return gpt(name, depth, hidden, hidden // 128, **_MEGATRON)


def _llama_of(name: str, depth: int, hidden: int) -> ModelSpec:
    heads = hidden // 128
    dimensions: Dimensions = {**_LLAMA3, "num_kv_heads": math.gcd(heads, 8)}
    return llama(name, depth, hidden, heads, 3584 * math.ceil(hidden / 1024), **dimensions)
