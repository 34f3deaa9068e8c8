"""Mixture-of-experts models: dimensions and derived sizes. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from meshmark.errors import InputError
from meshmark.models.config import Dataset, ModelConfig, MultiHead
from meshmark.models.transformer import Family, ModelSpec, gpt


@dataclass(frozen=True, kw_only=True)
class MixtureSpec(MultiHead, ModelConfig):
    """Dimensions of a GPT whose feed-forward networks are mixtures of experts.

    See arXiv:1701.06538 and arXiv:2401.04088 section 2.1. A gate without bias scores every expert. Each token goes
    through the two experts with the highest scores, and the softmax of these two scores weighs their outputs. Experts
    have no capacity limit: no token is dropped. There is no load-balancing loss.

    Raises `InputError` when the dimensions contradict each other.
    """

    kind: ClassVar[str] = "mixture-of-experts"
    module: ClassVar[str] = "meshmark.models.mixture.module:MixtureTransformer"
    theory: ClassVar[str] = "meshmark.theory.model_theory:MixtureTheory"
    routes: ClassVar[bool] = True
    num_layers: int
    """Transformer blocks; the embedding and the head are not counted."""
    hidden: int
    num_heads: int
    ffn_hidden: int
    """Inner width of every expert."""
    num_experts: int
    experts_per_token: int = 2
    vocab_size: int
    seq_len: int
    init_std: float = 0.02

    def __post_init__(self) -> None:
        if not 1 <= self.experts_per_token < self.num_experts:
            raise InputError(
                f"model {self.name!r}: {self.experts_per_token} experts a token of {self.num_experts}, expected at "
                "least one, and fewer than there are"
            )
        self.dense  # noqa: B018

    @property
    def dense(self) -> ModelSpec:
        """The same GPT with one expert in place of the gate and all experts. Raises the same errors as `ModelSpec`."""
        sizes = (self.num_layers, self.hidden, self.num_heads)
        model = gpt(self.name, *sizes, vocab_size=self.vocab_size, seq_len=self.seq_len, init_std=self.init_std)
        if self.ffn_hidden != model.ffn_hidden:
            raise InputError(f"model {self.name!r}: ffn_hidden is {self.ffn_hidden}, expected 4 x hidden")
        return model

    @property
    def family(self) -> Family:
        return Family.MIXTURE

    @property
    def causal(self) -> bool:
        return True

    @property
    def datasets(self) -> frozenset[Dataset]:
        return self.dense.datasets

    @property
    def outputs_per_row(self) -> int:
        return self.dense.outputs_per_row

    @property
    def tied_embeddings(self) -> bool:
        return False

    @property
    def dropout(self) -> float:
        return 0.0

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert: two matrices and their biases."""
        return 2 * self.hidden * self.ffn_hidden + self.ffn_hidden + self.hidden

    @property
    def embedding_parameters(self) -> int:
        return self.dense.embedding_parameters

    @property
    def block_parameters(self) -> int:
        """Parameters of one block: a GPT's block, the gate, and all experts but one."""
        gate = self.hidden * self.num_experts
        return self.dense.block_parameters + gate + (self.num_experts - 1) * self.expert_parameters

    @property
    def head_parameters(self) -> int:
        return self.dense.head_parameters

    @property
    def num_parameters(self) -> int:
        return self.embedding_parameters + self.num_layers * self.block_parameters + self.head_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses: all but the experts that it is not routed to."""
        idle = self.num_experts - self.experts_per_token
        return self.num_parameters - self.num_layers * idle * self.expert_parameters

    @property
    def block_tensors(self) -> int:
        """Tensors of one block: two norms and four projections with biases, the gate, and two matrices with biases per
        expert.
        """
        return 2 * 2 + 2 * 4 + 1 + 4 * self.num_experts

    @property
    def num_tensors(self) -> int:
        """Tensors of the model: two embeddings, the blocks, the final norm (two) and the head."""
        return 2 + self.num_layers * self.block_tensors + 3

    @property
    def widest(self) -> int:
        """Largest number of values a layer handles per position."""
        inner = self.experts_per_token * self.ffn_hidden
        return max(inner, 4 * self.hidden, self.num_heads * self.seq_len, self.vocab_size)

    @property
    def forward_flops(self) -> float:
        """FLOPs of one token: matrix products, a multiply-add counted as two.

        Counts only the experts it is routed to.
        """
        h, f = self.hidden, self.ffn_hidden
        block = 4 * h**2 + h * self.num_experts + self.experts_per_token * 2 * h * f + 2 * self.seq_len * h
        return 2.0 * (self.num_layers * block + self.vocab_size * h)

    def misfits(self, *, tp: int, num_stages: int, cp: int) -> list[str]:
        """Return why the model cannot be split this way, one reason each."""
        return self.dense.misfits(tp=tp, num_stages=num_stages, cp=cp)


MIXTURE_MINI = MixtureSpec(
    name="gpt-moe-mini",
    num_layers=2,
    hidden=32,
    num_heads=4,
    ffn_hidden=128,
    num_experts=4,
    vocab_size=256,
    seq_len=32,
    init_std=0.15,
)
"""`gpt-mini` with four experts. Its wide initial values keep gate scores far apart for most tokens."""
