"""Models that are planned and not trained here: mixtures of experts, latent attention, windows, heads of any width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from meshmark.errors import InputError
from meshmark.models.transformer import ModelSpec


@dataclass(frozen=True, kw_only=True)
class PlannedModel(ModelSpec):
    """Dimensions of a LLaMA with what Mixtral, Qwen3, DeepSeek and Gemma add. Raises `InputError` if they contradict.

    Layers are planned as equal: where the first have a dense feed-forward network, each holds its share of it.
    """

    kind: ClassVar[str] = "planned"
    num_experts: int = 0
    """Experts of a layer that tokens are routed to. 0 for a dense network of `ffn_hidden`."""
    experts_per_token: int = 0
    expert_ffn: int = 0
    """Inner width of one expert."""
    shared_ffn: int = 0
    """Inner width of the experts that every token goes through, together."""
    dense_layers: int = 0
    """Layers whose feed-forward network is dense, of width `ffn_hidden`."""
    head_width: int = 0
    """Width of a head, if not `hidden / num_heads`."""
    query_rank: int = 0
    """Latent attention's rank of the queries (arXiv:2405.04434 section 2.1). 0 if they have none."""
    kv_rank: int = 0
    """Latent attention's rank of keys and values. 0 for grouped-query attention."""
    rotary_width: int = 0
    """Width of a head's rotary part, with latent attention."""
    value_width: int = 0
    """Width of a head's values, with latent attention."""
    window: int = 0
    """Tokens that a windowed layer attends to. 0 without windows."""
    windowed_layers: int = 0
    norms: int = 2
    """Norms of a layer. Gemma 2 and 3 have four: before and after both halves."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_experts and not (1 <= self.experts_per_token <= self.num_experts and self.expert_ffn >= 1):
            raise InputError(
                f"model {self.name!r}: {self.experts_per_token} experts a token of {self.num_experts}, each "
                f"{self.expert_ffn} wide; expected at least one of each, and no more a token than there are"
            )
        for field in ("dense_layers", "windowed_layers"):
            if not 0 <= (count := getattr(self, field)) <= self.num_layers:
                raise InputError(f"model {self.name!r}: {field} is {count}, of {self.num_layers} layers")

    @property
    def head_dim(self) -> int:
        return self.head_width or self.hidden // self.num_heads

    @property
    def layer_norms(self) -> int:
        return self.norms

    @property
    def routing_share(self) -> float:
        """Share of the layers that have experts."""
        return (self.num_layers - self.dense_layers) / self.num_layers if self.num_experts else 0.0

    @property
    def _attention_weights(self) -> int:
        """Matrix weights of one layer's attention."""
        h, heads = self.hidden, self.num_heads
        if not self.kv_rank:
            return 2 * h * (self.query_hidden + self.kv_hidden)
        wide = self.head_dim + self.rotary_width
        queries = self.query_rank * (h + heads * wide) if self.query_rank else h * heads * wide
        keys = h * (self.kv_rank + self.rotary_width) + self.kv_rank * heads * (self.head_dim + self.value_width)
        return queries + keys + heads * self.value_width * h

    @property
    def saved_attention(self) -> float:
        """With latent attention also the latents: inputs of their norms, and of the products after these."""
        if not self.kv_rank:
            return super().saved_attention
        values = self.num_heads * self.value_width
        return self.latent_outputs + values + 2.0 * (self.query_rank + self.kv_rank) + self.rotary_width

    @property
    def latent_weights(self) -> float:
        if not self.kv_rank:
            return 0.0
        queries = self.query_rank * self.num_heads * (self.head_dim + self.rotary_width)
        return float(queries + self.kv_rank * self.num_heads * (self.head_dim + self.value_width))

    @property
    def latent_outputs(self) -> float:
        """Queries, keys (each with its rotary part) and values."""
        if not self.kv_rank:
            return 0.0
        return float(self.num_heads * (2 * (self.head_dim + self.rotary_width) + self.value_width))

    @property
    def attention_width(self) -> float:
        """Width that a token's scores and their product with the values cost, halved: `hidden` for a LLaMA."""
        wide = float(self.query_hidden)
        if self.kv_rank:
            wide = self.num_heads * (self.head_dim + self.rotary_width + self.value_width) / 2.0
        # A causal window of w tokens costs w - w^2/2s of s/2 pairs.
        seen = min(self.window, self.seq_len) / self.seq_len if self.window else 1.0
        share = self.windowed_layers / self.num_layers
        return wide * (1.0 - share + share * seen * (2.0 - seen))

    @property
    def active_ffn(self) -> float:
        """Inner width of the feed-forward networks that one token goes through, on average over layers."""
        routed = self.experts_per_token * self.expert_ffn + self.shared_ffn
        return (1.0 - self.routing_share) * self.ffn_hidden + self.routing_share * routed

    @property
    def routed_ffn(self) -> float:
        return self.routing_share * self.experts_per_token * self.expert_ffn

    @property
    def shared_experts_ffn(self) -> float:
        return self.routing_share * self.shared_ffn

    @property
    def routed_width(self) -> float:
        """Inner width of one expert, where products are as wide; 0 without experts."""
        return float(self.expert_ffn) if self.num_experts else 0.0

    @property
    def routed_weights(self) -> float:
        """Matrix weights of the experts that one token is routed to, of one layer on average."""
        return 3.0 * self.hidden * self.routing_share * self.experts_per_token * self.expert_ffn

    @property
    def dispatched(self) -> float:
        """Copies of a token that a layer sends to experts, on average."""
        return self.routing_share * self.experts_per_token

    @property
    def layer_matrix_weights(self) -> float:
        router = self.routing_share * self.hidden * self.num_experts
        return self._attention_weights + 3.0 * self.hidden * self.active_ffn + router

    @property
    def expert_parameters(self) -> float:
        """Parameters of all experts of one layer, on average."""
        return 3.0 * self.hidden * self.routing_share * self.num_experts * self.expert_ffn

    @property
    def block_parameters(self) -> int:
        held = self.layer_matrix_weights - self.routed_weights + self.expert_parameters
        return round(held + self.norms * self.hidden)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses."""
        return self.num_parameters - round(self.num_layers * (self.expert_parameters - self.routed_weights))
