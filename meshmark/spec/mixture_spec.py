"""What a mixture of experts is: its dimensions and what follows from them. No torch, as in `model_spec`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from meshmark.errors import InputError
from meshmark.spec.model_config import Dataset, ModelConfig
from meshmark.spec.model_spec import Family, ModelSpec, gpt


@dataclass(frozen=True, kw_only=True)
class MixtureSpec(ModelConfig):
    """Dimensions of a GPT whose feed-forward networks are mixtures of experts (arXiv:1701.06538, arXiv:2401.04088
    section 2.1): a gate without bias scores every expert, each token goes through the two that score highest, and their
    outputs are weighed by the softmax of these two scores. No expert has a capacity: every token is kept. There is no
    loss that balances them.

    Raises `InputError` when the dimensions contradict each other.
    """

    kind: ClassVar[str] = "mixture-of-experts"
    module: ClassVar[str] = "meshmark.reference.mixture:MixtureTransformer"
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
        """The same GPT with one expert in the place of the gate and all of them. Raises what it does."""
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
    def head_dim(self) -> int:
        return self.hidden // self.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads

    @property
    def kv_hidden(self) -> int:
        return self.hidden

    @property
    def expert_parameters(self) -> int:
        """Of one: two matrices and their biases."""
        return 2 * self.hidden * self.ffn_hidden + self.ffn_hidden + self.hidden

    @property
    def embedding_parameters(self) -> int:
        return self.dense.embedding_parameters

    @property
    def block_parameters(self) -> int:
        """One block: a GPT's, the gate, and all experts but one more."""
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
        """That one token meets: all but the experts that it is not sent to."""
        idle = self.num_experts - self.experts_per_token
        return self.num_parameters - self.num_layers * idle * self.expert_parameters

    @property
    def block_tensors(self) -> int:
        """Two norms and four projections with biases, the gate, and of every expert two matrices with biases."""
        return 2 * 2 + 2 * 4 + 1 + 4 * self.num_experts

    @property
    def num_tensors(self) -> int:
        """Two embeddings; norm (two) and head."""
        return 2 + self.num_layers * self.block_tensors + 3

    @property
    def widest(self) -> int:
        """Numbers at a position that a layer works on."""
        inner = self.experts_per_token * self.ffn_hidden
        return max(inner, 4 * self.hidden, self.num_heads * self.seq_len, self.vocab_size)

    @property
    def forward_flops(self) -> float:
        """Of one token: matrix products, a multiply-add counted as two, of the experts that it is sent to alone."""
        h, f = self.hidden, self.ffn_hidden
        block = 4 * h**2 + h * self.num_experts + self.experts_per_token * 2 * h * f + 2 * self.seq_len * h
        return 2.0 * (self.num_layers * block + self.vocab_size * h)

    def misfits(self, *, tp: int, num_stages: int, cp: int) -> list[str]:
        """Why the model cannot be split so, one reason each."""
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
"""`gpt-mini` with four experts; a gate's scores are then far apart for most tokens."""
