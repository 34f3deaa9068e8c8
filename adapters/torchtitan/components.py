"""What torchtitan's Trainer is configured with: its own Llama of a workload's size, and a loader of its rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset

from meshmark.adapter.loop import GlobalRows, collate
from meshmark.adapters.torchtitan.stand_ins import sum_gradients
from meshmark.models.transformer import ModelSpec
from meshmark.reference.data import Batch


def llama(spec: ModelSpec) -> Any:  # noqa: ANN401
    """Return torchtitan's specification of its Llama 3 of these dimensions, with what it is parallelised by.

    Positions turn halves of a head against each other, as the reference has it, not neighbours (`ComplexRoPE`).
    Attention is torchtitan's dense one: FlexAttention has no backward pass on a CPU. No initial value is drawn, for
    Meshmark's are filled in when the Trainer is built.
    """
    from torchtitan.distributed.pipeline_parallel import pipeline_llm
    from torchtitan.models.common import CosSinRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
    from torchtitan.models.common.param_init import skip_param_init
    from torchtitan.models.llama3 import parallelize_llama
    from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
    from torchtitan.protocols.model_spec import ModelSpec as TitanSpec

    none = {"weight": skip_param_init}

    def norm() -> Any:  # noqa: ANN401
        return RMSNorm.Config(normalized_shape=spec.hidden, eps=spec.norm_eps, param_init=none)

    def layer() -> Any:  # noqa: ANN401
        return Llama3TransformerBlock.Config(
            attention_norm=norm(),
            ffn_norm=norm(),
            attention=make_gqa_config(
                dim=spec.hidden,
                n_heads=spec.num_heads,
                n_kv_heads=spec.num_kv_heads,
                wqkv_param_init=none,
                wo_param_init=none,
                inner_attention=ScaledDotProductAttention.Config(),
                rope=CosSinRoPE.Config(dim=spec.head_dim, max_seq_len=spec.seq_len, theta=spec.rope_theta),
            ),
            feed_forward=make_ffn_config(
                dim=spec.hidden, hidden_dim=spec.ffn_hidden, w1_param_init=none, w2w3_param_init=none
            ),
        )

    return TitanSpec(
        name="llama3",
        flavor=spec.name,
        model=Llama3Model.Config(
            dim=spec.hidden,
            vocab_size=spec.vocab_size,
            tok_embeddings=Embedding.Config(num_embeddings=spec.vocab_size, embedding_dim=spec.hidden, param_init=none),
            norm=norm(),
            lm_head=Linear.Config(in_features=spec.hidden, out_features=spec.vocab_size, param_init=none),
            layers=[layer() for _ in range(spec.num_layers)],
        ),
        parallelize_fn=lambda model, **kwargs: sum_gradients(parallelize_llama(model, **kwargs)),
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )


class Rows(IterableDataset[Batch]):
    """Every `num_ranks`-th row from the `rank`-th on, with the state that torchtitan saves: how many were read."""

    def __init__(self, rows: GlobalRows, rank: int, num_ranks: int) -> None:
        self.rows, self.rank, self.num_ranks = rows, rank, num_ranks
        self.num_read = 0

    def __iter__(self) -> Iterator[Batch]:
        while True:
            row = self.rows[self.num_read * self.num_ranks + self.rank]
            self.num_read += 1
            yield row

    def state_dict(self) -> dict[str, int]:
        return {"num_read": self.num_read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_read = state["num_read"]


def row_loader(rows: GlobalRows) -> Any:  # noqa: ANN401
    """Return the configuration of torchtitan's loader over the workload's rows."""
    from torchtitan.components.dataloader import ParallelAwareDataloader

    class RowLoader(ParallelAwareDataloader):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(ParallelAwareDataloader.Config):  # type: ignore[misc]
            def to_dict(self) -> dict[str, Any]:
                """Return what is logged."""
                return {"rows": len(rows)}

        def __init__(
            self,
            config: Any,  # noqa: ANN401
            *,
            dp_rank: int,
            dp_world_size: int,
            local_batch_size: int,
            **_: Any,  # noqa: ANN401
        ) -> None:
            own = Rows(rows, dp_rank, dp_world_size)
            super().__init__(own, dp_rank, dp_world_size, batch_size=local_batch_size, collate_fn=_collate)

    return RowLoader.Config()


def _collate(rows: Sequence[Batch]) -> tuple[dict[str, Tensor], Tensor]:
    batch = collate(rows)
    return {"input": batch.inputs}, batch.targets


def no_tokenizer() -> Any:  # noqa: ANN401
    """Return the configuration of a tokenizer that is never asked: rows are tokens already."""
    from torchtitan.components.tokenizer import BaseTokenizer

    class NoTokenizer(BaseTokenizer):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):  # type: ignore[misc]
            pass

        def __init__(self, config: Any, **_: Any) -> None:  # noqa: ANN401
            super().__init__()

        def _refuse(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            raise NotImplementedError("rows are tokens already")

        encode = decode = get_vocab_size = _refuse

    return NoTokenizer.Config()


_CANONICAL = {
    "tok_embeddings": "embedding.tokens",
    "layers": "blocks",
    "qkv_linear.wq": "q",
    "qkv_linear.wk": "k",
    "qkv_linear.wv": "v",
    "wo": "out",
    "w1": "gate",
    "w2": "down",
    "w3": "up",
    "ffn_norm": "feed_forward_norm",
    "lm_head": "head.output",
}


def canonical(name: str) -> str:
    """Return the reference's name of a parameter of torchtitan's Llama."""
    if name == "norm.weight":
        return "head.norm.weight"
    dotted = f".{name}"
    for theirs, ours in _CANONICAL.items():
        dotted = dotted.replace(f".{theirs}.", f".{ours}.")
    return dotted[1:]
