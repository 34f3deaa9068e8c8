"""megatron-core's experts: groups of data-parallel ranks share the experts of every layer (arXiv:2006.16668).

Every rank of a group gathers the tokens of all, and the outputs for a token are summed where it came from."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from meshmark.adapter.contract import Feature
from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapters.expert_ranks import EXPERT_RANKS, elements_elsewhere, mixture_of, refusal_of_ranks
from meshmark.adapters.megatron.gpt_model import MegatronGPT
from meshmark.adapters.megatron.on_cpu import route_without_transformer_engine
from meshmark.models.transformer import Family
from meshmark.spec.case import Case
from meshmark.spec.layout import Recompute
from meshmark.spec.precision import Precision
from meshmark.theory.memory import ExtraMemory


class MegatronGPTExperts(MegatronGPT):
    """Every two ranks share the experts of each layer (`expert_model_parallel_size`), which run one after the other."""

    capabilities: ClassVar = dataclasses.replace(
        MegatronGPT.capabilities,
        degrees=frozenset({"dp"}),
        sequence_parallel=False,
        recomputes=frozenset({Recompute.NONE}),
        families=frozenset({Family.MIXTURE}),
        precisions=frozenset({Precision.FP32}),
        lacks={
            **MegatronGPT.capabilities.lacks,
            Feature.RECOMPUTE: "`local_probs` of its dispatcher keeps what was recomputed, which is not understood",
        },
    )

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        return refusal_of_ranks(case) or super().supports(case, device, backend)

    @classmethod
    def plans_traffic(cls, case: Case) -> bool:
        """Which ranks send what for experts is in no closed form of Meshmark's."""
        return False

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        states, elsewhere = cls.recipe(case).states, elements_elsewhere(case)
        widths = {
            "parameters": states.weight_bytes,
            "gradients": states.gradient_bytes,
            "steady": states.gradient_bytes,  # their buffers, which stay
            "optimizer_states": states.moment_bytes,
        }
        others = (
            ExtraMemory(category=name, num_bytes=-width * elsewhere, reason="experts of other ranks")
            for name, width in widths.items()
        )
        return (*super().extra_memory(case, rank), *others)

    def build(self, case: Case, context: RankContext) -> Engine:
        route_without_transformer_engine()
        return super().build(case, context)

    def model_options(self, case: Case) -> dict[str, Any]:
        spec = mixture_of(case)
        return {
            "num_moe_experts": spec.num_experts,
            "expert_model_parallel_size": EXPERT_RANKS,
            "moe_ffn_hidden_size": spec.ffn_hidden,
            "moe_router_topk": spec.experts_per_token,
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
            "moe_token_dispatcher_type": "allgather",
        }
