"""Transformer models: dimensions and derived sizes. Does not import torch, so that planners start fast."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, TypedDict, Unpack

from meshmark.errors import InputError, UnknownNameError
from meshmark.models.config import Dataset, ModelConfig
from meshmark.models.config import Family as Family

_MOST = {
    "num_layers": 10_000,
    "hidden": 2**20,
    "num_heads": 2**16,
    "num_kv_heads": 2**16,
    "ffn_hidden": 2**22,
    "vocab_size": 2**24,
    "seq_len": 2**27,
}
"""Upper bounds, well above every published model. Beyond them the planner would overflow 64-bit integers or take
minutes.
"""
_WIDEST = 100.0
"""Upper bound for `init_std`. Beyond it, the first softmax selects a single element."""
TEXT_FAMILIES = frozenset({Family.GPT, Family.LLAMA})
"""Families of transformers over tokens."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec(ModelConfig):
    """Dimensions of a decoder-only transformer, or of an encoder of the same blocks.

    Raises `InputError` when the dimensions contradict each other.
    """

    kind: ClassVar[str] = "transformer"
    module: ClassVar[str] = "meshmark.models.transformer.module:Transformer"
    theory: ClassVar[str] = "meshmark.theory.model_theory:TransformerTheory"
    family: Family
    num_layers: int
    """Transformer blocks; the embedding and the head are not counted."""
    hidden: int
    """Width of the residual stream."""
    num_heads: int
    num_kv_heads: int
    """Key and value heads; fewer than `num_heads` means grouped-query attention."""
    ffn_hidden: int
    """Inner width of the feed-forward network."""
    vocab_size: int
    seq_len: int
    """Tokens in a training sequence; also the number of learned positions."""
    tied_embeddings: bool = False
    """True if the head uses the token embedding's weight."""
    dropout: float = 0.0
    """Dropout probability, applied to embeddings, attention weights and both residual branches."""
    init_std: float = 0.02
    """Standard deviation of initial weights. Residual projections use init_std / sqrt(2 num_layers)."""
    causal: bool = True
    """True if every token sees only those before it. False for an encoder, as BERT is (arXiv:1810.04805)."""
    rope_theta: float = 10_000.0
    """Base of the frequencies of LLaMA's rotary positions (arXiv:2104.09864, section 3.2.2)."""
    norm_eps: float = 1e-5
    """Epsilon added to the variance, or to the mean square, in every norm."""

    def __post_init__(self) -> None:
        if self.family not in TEXT_FAMILIES:
            raise InputError(
                f"model {self.name!r}: family {self.family} is not decoder-only; see `VisionSpec` and `MixtureSpec`"
            )
        for field, most in _MOST.items():
            if not 1 <= (got := getattr(self, field)) <= most:
                raise InputError(f"model {self.name!r}: {field} is {got}, expected at least 1 and at most {most:,}")
        if self.hidden % self.num_heads:
            raise InputError(
                f"model {self.name!r}: hidden {self.hidden} is not divisible by num_heads {self.num_heads}"
            )
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"model {self.name!r}: num_heads {self.num_heads} is not divisible by num_kv_heads {self.num_kv_heads}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise InputError(f"model {self.name!r}: dropout is {self.dropout}, expected 0 <= dropout < 1")
        if not 0.0 < self.init_std <= _WIDEST:  # which nan is not
            raise InputError(
                f"model {self.name!r}: init_std is {self.init_std}, expected a number above 0, at most {_WIDEST:g}"
            )
        for field in ("rope_theta", "norm_eps"):
            if not 0.0 < (number := getattr(self, field)) < math.inf:
                raise InputError(f"model {self.name!r}: {field} is {number}, expected a finite number above 0")
        if self.family is Family.LLAMA and self.head_dim % 2:
            raise InputError(f"model {self.name!r}: rotary positions need an even head_dim, got {self.head_dim}")

    @property
    def datasets(self) -> frozenset[Dataset]:
        """Causal models predict the next token; encoders predict masked tokens."""
        return frozenset({Dataset.TEXT if self.causal else Dataset.MASKED_TEXT})

    def stages_of(self, num_stages: int, names: Iterable[str]) -> dict[str, int]:
        """Return the pipeline stage, of `num_stages`, of each named parameter."""
        stage_of = self.stage_of_layers(num_stages)

        def layer(name: str) -> int:
            if name.startswith("embedding."):
                return 0
            return int(name.split(".")[1]) + 1 if name.startswith("blocks.") else self.num_layers + 1

        return {name: stage_of[layer(name)] for name in names}

    @property
    def outputs_per_row(self) -> int:
        return self.seq_len * self.vocab_size

    @property
    def widest(self) -> int:
        """Largest number of values a layer handles per position."""
        return max(self.ffn_hidden, 4 * self.hidden, self.num_heads * self.seq_len, self.vocab_size)

    @property
    def head_dim(self) -> int:
        return self.hidden // self.num_heads

    @property
    def kv_hidden(self) -> int:
        """Width of the keys and of the values."""
        return self.num_kv_heads * self.head_dim

    @property
    def query_hidden(self) -> int:
        """Width of the queries: `hidden`, unless a head has a width of its own."""
        return self.num_heads * self.head_dim

    @property
    def attention_width(self) -> float:
        """Width that a token's scores and their product with the values cost, halved."""
        return float(self.query_hidden)

    @property
    def active_ffn(self) -> float:
        """Inner width of the feed-forward networks that one token goes through."""
        return float(self.ffn_hidden)

    @property
    def saved_attention(self) -> float:
        """Width of what attention keeps of a token: queries, keys, values and its output."""
        return 2.0 * self.query_hidden + 2.0 * self.kv_hidden

    @property
    def layer_norms(self) -> int:
        """Norms of a layer."""
        return 2

    @property
    def latent_weights(self) -> float:
        """Matrix weights of a layer that make queries, keys and values of their latents. 0 without latent attention."""
        return 0.0

    @property
    def latent_outputs(self) -> float:
        """Width of what those make."""
        return 0.0

    @property
    def adapted_widths(self) -> float:
        """Sum of the inputs and outputs of a layer's linear layers: parameters of its LoRA adapters of rank one.

        Queries, keys and values are one linear layer, and so are a gate and what it gates, as in Megatron-Bridge
        (`linear_qkv`, `linear_proj`, `linear_fc1`, `linear_fc2`; arXiv:2106.09685 section 4.1).
        """
        gated = 1 if self.family is Family.GPT else 2
        attention = self.hidden + self.query_hidden + 2 * self.kv_hidden + self.query_hidden + self.hidden
        return float(attention + self.hidden + (gated + 1) * self.ffn_hidden + self.hidden)

    @property
    def routed_ffn(self) -> float:
        """Inner width of the routed experts that one token goes through, on average over layers: part of
        `active_ffn`.
        """
        return 0.0

    @property
    def shared_experts_ffn(self) -> float:
        """The same of the shared experts."""
        return 0.0

    @property
    def routing_share(self) -> float:
        """Share of the layers that have experts."""
        return 0.0

    @property
    def layer_matrix_weights(self) -> float:
        """Matrix weights of one layer that one token is multiplied with."""
        matrices = 2 if self.family is Family.GPT else 3
        return 2 * self.hidden * (self.query_hidden + self.kv_hidden) + matrices * self.hidden * self.ffn_hidden

    @property
    def routed_weights(self) -> float:
        """Those of them that belong to experts."""
        return 0.0

    @property
    def routed_width(self) -> float:
        """Inner width of one expert; 0 without experts."""
        return 0.0

    @property
    def dispatched(self) -> float:
        """Copies of a token that a layer sends to experts."""
        return 0.0

    @property
    def expert_parameters(self) -> float:
        """Parameters of all experts of one layer."""
        return 0.0

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token embedding and of a GPT's learned positions."""
        positions = self.seq_len if self.family is Family.GPT else 0
        return (self.vocab_size + positions) * self.hidden

    @property
    def block_parameters(self) -> int:
        """Parameters of one transformer block: norms, attention, feed-forward."""
        h, kv, f = self.hidden, self.kv_hidden, self.ffn_hidden
        if self.family is Family.GPT:
            attention = 2 * h * h + 2 * h * kv + 2 * h + 2 * kv
            return attention + 2 * h * f + f + h + 4 * h
        return 2 * h * h + 2 * h * kv + 3 * h * f + 2 * h

    @property
    def head_parameters(self) -> int:
        """Parameters of the final norm and, unless tied, of the output projection, which has no bias."""
        norm = 2 * self.hidden if self.family is Family.GPT else self.hidden
        return norm + (0 if self.tied_embeddings else self.vocab_size * self.hidden)

    @property
    def num_parameters(self) -> int:
        """Number of trainable parameters. A tied weight counts once."""
        return self.embedding_parameters + self.num_layers * self.block_parameters + self.head_parameters

    @property
    def gathers(self) -> tuple[tuple[int, int], ...]:
        """The tied weight, which both the embedding and the head read."""
        return ((self.vocab_size * self.hidden, 2),) if self.tied_embeddings else ()

    def misfits(self, *, tp: int, num_stages: int, cp: int) -> list[str]:
        """Return why the model cannot be split this way, one reason each."""
        problems = []
        if self.num_heads % tp or self.num_kv_heads % tp:
            problems.append(f"tp {tp} does not divide {self.num_heads} heads and {self.num_kv_heads} kv heads")
        if self.vocab_size % tp:
            problems.append(f"tp {tp} does not divide a vocabulary of {self.vocab_size}")
        if self.ffn_hidden % tp:
            problems.append(f"tp {tp} does not divide ffn_hidden {self.ffn_hidden}")
        if num_stages > self.num_layers:
            problems.append(f"pp {num_stages} stages are more than {self.num_layers} layers")
        if self.seq_len % cp:
            problems.append(f"cp {cp} does not divide a sequence of {self.seq_len}")
        return problems


class Dimensions(TypedDict, total=False):
    """Dimensions that a family's usual proportions leave open, or that may override them."""

    num_kv_heads: int
    vocab_size: int
    seq_len: int
    tied_embeddings: bool
    init_std: float
    causal: bool


def gpt(name: str, num_layers: int, hidden: int, num_heads: int, **others: Unpack[Dimensions]) -> ModelSpec:
    """Return a GPT with the usual proportions: feed-forward 4x as wide, as many key as query heads."""
    usual: Dimensions = {"num_kv_heads": num_heads, "vocab_size": 50257, "seq_len": 2048}
    return _model(name, Family.GPT, (num_layers, hidden, num_heads, 4 * hidden), {**usual, **others})


def llama(
    name: str, num_layers: int, hidden: int, num_heads: int, ffn_hidden: int, **others: Unpack[Dimensions]
) -> ModelSpec:
    """Return a LLaMA. `num_kv_heads` defaults to `num_heads`."""
    usual: Dimensions = {"num_kv_heads": num_heads, "vocab_size": 32000, "seq_len": 2048}
    return _model(name, Family.LLAMA, (num_layers, hidden, num_heads, ffn_hidden), {**usual, **others})


def _model(name: str, family: Family, sizes: tuple[int, int, int, int], others: Dimensions) -> ModelSpec:
    num_layers, hidden, num_heads, ffn_hidden = sizes
    return ModelSpec(
        name=name,
        family=family,
        num_layers=num_layers,
        hidden=hidden,
        num_heads=num_heads,
        ffn_hidden=ffn_hidden,
        **others,
    )


MODELS: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        # Small enough for a laptop's CPU; wide initial values, so that attention is far from uniform.
        gpt("gpt-tiny", 4, 64, 4, vocab_size=256, seq_len=64, init_std=0.08),
        gpt("gpt-mini", 2, 32, 4, vocab_size=256, seq_len=32, init_std=0.15),
        llama("llama-mini", 2, 32, 4, 88, vocab_size=256, seq_len=32, init_std=0.15),
        llama("llama-tiny", 4, 64, 8, 176, num_kv_heads=4, vocab_size=256, seq_len=64, init_std=0.08),
        # BERT's attention and data on a GPT's blocks, which normalise before, not after.
        gpt("bert-mini", 2, 32, 4, vocab_size=256, seq_len=32, init_std=0.15, causal=False),
        gpt("gpt2-124m", 12, 768, 12, seq_len=1024, tied_embeddings=True),
        # Fills one 80 GB GPU: GPT-3 XL's size with an untied head and a vocabulary padded to a multiple of 128.
        gpt("gpt-1.3b", 24, 2048, 16, vocab_size=50304),
        # GPT-3, arXiv:2005.14165 table 2.1, with its two misprints mended: XL's 24 heads of 128 are not its d_model
        # 2048 (16 are), and 13B's d_model 5140 is not its 40 heads of 128 (5120).
        gpt("gpt3-125m", 12, 768, 12, tied_embeddings=True),
        gpt("gpt3-350m", 24, 1024, 16, tied_embeddings=True),
        gpt("gpt3-760m", 24, 1536, 16, tied_embeddings=True),
        gpt("gpt3-1.3b", 24, 2048, 16, tied_embeddings=True),
        gpt("gpt3-2.7b", 32, 2560, 32, tied_embeddings=True),
        gpt("gpt3-6.7b", 32, 4096, 32, tied_embeddings=True),
        gpt("gpt3-13b", 40, 5120, 40, tied_embeddings=True),
        gpt("gpt3-175b", 96, 12288, 96, tied_embeddings=True),
        # LLaMA, arXiv:2302.13971 table 2.
        llama("llama-7b", 32, 4096, 32, 11008),
        llama("llama-13b", 40, 5120, 40, 13824),
        llama("llama-33b", 60, 6656, 52, 17920),
        llama("llama-65b", 80, 8192, 64, 22016),
    )
}


def model_spec(name: str) -> ModelSpec:
    """Return the preset called `name`. Raises `UnknownNameError` for an unknown name."""
    if name not in MODELS:
        raise UnknownNameError("model", name, MODELS)
    return MODELS[name]
