"""Canonical names and megatron-core's: what is one tensor here and several there, or the other way round.

Shape suffixes: R rows of a weight or a bias, G groups of query heads, D head width.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshmark.adapters.expert_ranks import expert_numbers
from meshmark.models.mixture import MixtureSpec
from meshmark.models.module import initial_value, parameter_shapes
from meshmark.models.transformer import Family, ModelSpec
from meshmark.spec.workload import Workload

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_OUTSIDE = {
    "embedding.word_embeddings.weight": "embedding.tokens.weight",
    "embedding.position_embeddings.weight": "embedding.positions.weight",
    "decoder.final_layernorm.weight": "head.norm.weight",
    "decoder.final_layernorm.bias": "head.norm.bias",
    "output_layer.weight": "head.output.weight",
}
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_INSIDE = {
    "input_layernorm": ("attention_norm",),
    "self_attention.linear_qkv": ("attention.q", "attention.k", "attention.v"),
    "self_attention.linear_proj": ("attention.out",),
    "pre_mlp_layernorm": ("feed_forward_norm",),
    "mlp.linear_fc1": ("feed_forward.up",),
    "mlp.linear_fc2": ("feed_forward.down",),
    "mlp.router": ("feed_forward.gate",),
}


@dataclass(frozen=True, kw_only=True)
class Fused:
    """A tensor of megatron-core: which of the model's tensors it contains, and how ranks split it."""

    names: tuple[str, ...]
    """Canonical."""
    dim: int | None
    """Dim along which tensor-parallel ranks split it. None: each rank has all of it."""
    of_experts: bool = False
    """Whether it is one expert's, of which every rank that shares experts has another: `names` are of these ranks."""


def fused_of(workload: Workload, name: str, first_layer: int, parameter: nn.Parameter) -> Fused:
    """Return the description of the parameter that a chunk beginning with block `first_layer` calls `name`."""
    dim = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None  # type: ignore[attr-defined]
    if name in _OUTSIDE:
        return Fused(names=(_OUTSIDE[name],), dim=dim)
    found = _LAYER.fullmatch(name)
    assert found, f"megatron-core has a parameter that is in no layer: {name}"
    block, inner = f"blocks.{first_layer + int(found[1])}", found[2]
    if expert := _EXPERT.fullmatch(inner):
        assert isinstance(workload.model, MixtureSpec)
        own = expert_numbers(workload.model, int(expert[1]))
        rest = _names(f"mlp.{expert[2]}", workload)[0].removeprefix("feed_forward.")
        return Fused(names=tuple(f"{block}.feed_forward.experts.{i}.{rest}" for i in own), dim=None, of_experts=True)
    return Fused(names=tuple(f"{block}.{part}" for part in _names(inner, workload)), dim=dim)


def _names(inner: str, workload: Workload) -> list[str]:
    """Return a block's names of what megatron-core's layer calls `inner`."""
    module, _, kind = inner.rpartition(".")
    parts = _INSIDE[module]
    if module == "mlp.linear_fc1" and dense(workload).family is Family.LLAMA:
        parts = ("feed_forward.gate", *parts)
    return [f"{part}.{kind}" for part in parts]


def partly_frozen(workload: Workload) -> list[str]:
    """Return the frozen parameters that are in one tensor of megatron-core's with others that are trained."""
    if not workload.frozen:
        return []
    found = list[str]()
    for index in range(dense(workload).num_layers):
        for module in ("self_attention.linear_qkv", "mlp.linear_fc1"):
            for kind in ("weight", "bias"):
                names = [f"blocks.{index}.{part}" for part in _names(f"{module}.{kind}", workload)]
                frozen = [name for name in names if not workload.trains(name)]
                found += frozen if len(frozen) < len(names) else []
    return found


def split(spec: ModelSpec, fused: Fused, shards: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the model's tensors, by canonical name, that all ranks' `shards` of one megatron-core tensor contain."""
    if len(fused.names) == 1:
        whole = shards[0] if fused.dim is None else torch.cat([*shards], fused.dim)
        return {fused.names[0]: whole}
    if len(fused.names) == 2:  # every rank's gates stand before what they gate
        gates, ups = zip(*(shard.chunk(2) for shard in shards), strict=True)
        return dict(zip(fused.names, (torch.cat(gates), torch.cat(ups)), strict=True))
    whole_R = torch.cat([*shards])
    by_group = whole_R.view(spec.num_kv_heads, -1, spec.head_dim, *whole_R.shape[1:])
    parts = by_group[:, :-2], by_group[:, -2], by_group[:, -1]
    return {
        name: part.reshape(-1, *whole_R.shape[1:]).contiguous() for name, part in zip(fused.names, parts, strict=True)
    }


def shard(spec: ModelSpec, fused: Fused, values: Callable[[str], Tensor], rank: int, num_ranks: int) -> Tensor:
    """Return a rank's part of one megatron-core tensor, made from the model's `values`. `split` is the inverse."""
    parts = [values(name) for name in fused.names]
    if len(parts) == 3:  # by group of heads that share a key: its queries, then the key, then the value
        by_group = [part.view(spec.num_kv_heads, -1, spec.head_dim, *part.shape[1:]) for part in parts]
        parts = [torch.cat(by_group, 1).flatten(0, 2)]
    own = [part if fused.dim is None else part.chunk(num_ranks, fused.dim)[rank] for part in parts]
    return torch.cat(own)


def dense(workload: Workload) -> ModelSpec:
    """Return the dimensions of a workload's GPT or LLaMA; of a mixture of experts, those of its dense layers."""
    model = workload.text_model
    return model.dense if isinstance(model, MixtureSpec) else model


def initial_values(spec: ModelSpec | MixtureSpec, seed: int) -> Callable[[str], Tensor]:
    """Return a function from canonical names to the workload's whole initial tensors."""
    shapes: Mapping[str, Sequence[int]] = parameter_shapes(spec)
    return lambda name: initial_value(spec, name, shapes[name], seed=seed)
