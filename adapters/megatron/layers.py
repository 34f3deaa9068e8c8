"""megatron-core's layers in the place of the model's, and their initial values.

Shape suffixes: B sequences, T tokens, C hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from meshmark.models.module import Block, drawn_name, initial_value
from meshmark.models.transformer.module import Attention, Transformer, products_of


def split_dim(parameter: nn.Parameter) -> int | None:
    """The dim along which tensor-parallel ranks split a parameter; None for a replica."""
    return parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None  # type: ignore[attr-defined]


def parallelize(model: Transformer, config: Any, group: ProcessGroup) -> None:  # noqa: ANN401
    """Put megatron-core's layers, uninitialised, in the place of the (meta) layers that it has a parallel form of."""
    from megatron.core.tensor_parallel import VocabParallelEmbedding, copy_to_tensor_model_parallel_region

    def enter(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (copy_to_tensor_model_parallel_region(args[0], group=group),)

    for module in list(model.modules()):
        if (products := products_of(module)) is None:
            continue
        columns, row = products
        # Several column-parallel layers read one input: its gradient is reduced once for all of them, as it is for
        # Megatron's fused ones, by entering the parallel region before them and by `disable_grad_reduce` inside.
        module.register_forward_pre_hook(enter)
        if isinstance(module, Attention) and module.dropout:
            _draw_locally(module)
        for name in columns:
            setattr(module, name, _column(getattr(module, name), config, group, disable_grad_reduce=True))
        setattr(module, row, _row(getattr(module, row), config, group))
    assert model.embedding is not None and model.head is not None
    tokens = VocabParallelEmbedding(
        model.spec.vocab_size, model.spec.hidden, init_method=_untouched, config=config, tp_group=group
    )
    _mark_split(tokens.weight, 0)
    model.embedding.tokens = tokens
    model.head.output = _column(model.head.output, config, group)
    if model.spec.tied_embeddings:
        model.head.output.weight = tokens.weight


def _draw_locally(attention: Attention) -> None:
    """Draw dropout of attention weights from this rank's own random state, because every rank has different heads."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    forward = attention.forward

    def draw_locally(x_BTC: Tensor) -> Tensor:
        with get_cuda_rng_tracker().fork():
            return forward(x_BTC)

    attention.forward = draw_locally  # type: ignore[method-assign]


def recompute(block: nn.Module, x_BTC: Tensor) -> Tensor:
    """Run `block` with megatron-core's activation checkpointing.

    PyTorch's would draw different dropout masks when it recomputes, because it does not restore Megatron's random
    states. Megatron's does not restore autocast, and gives no gradients if its input needs none, so both are handled
    here.
    """
    from megatron.core import tensor_parallel

    kind = x_BTC.device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def run(x_BTC: Tensor) -> Tensor:
        with torch.autocast(kind, dtype=dtype, enabled=enabled):
            out: Tensor = block(x_BTC)
        return out

    x_BTC = x_BTC if x_BTC.requires_grad else x_BTC.detach().requires_grad_()
    out: Tensor = tensor_parallel.checkpoint(run, False, x_BTC)
    return out


def _column(layer: nn.Linear, config: Any, group: ProcessGroup, disable_grad_reduce: bool = False) -> Any:  # noqa: ANN401
    """`layer` split along its outputs, which stay split."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    return _split(
        ColumnParallelLinear, 0, layer, config, group, gather_output=False, disable_grad_reduce=disable_grad_reduce
    )


def _row(layer: nn.Linear, config: Any, group: ProcessGroup) -> Any:  # noqa: ANN401
    """Return `layer` split along its inputs, which must be split already. Its outputs are summed over ranks."""
    from megatron.core.tensor_parallel import RowParallelLinear

    return _split(RowParallelLinear, 1, layer, config, group, input_is_parallel=True, skip_bias_add=False)


def _split(kind: Any, dim: int, layer: nn.Linear, config: Any, group: ProcessGroup, **how: bool) -> Any:  # noqa: ANN401
    """A parallel linear layer of that kind, whose weight is split along `dim`, in the place of `layer`."""
    split = kind(
        layer.in_features,
        layer.out_features,
        config=config,
        init_method=_untouched,
        bias=layer.bias is not None,
        tp_group=group,
        **how,
    )
    _mark_split(split.weight, dim)
    split.register_forward_hook(_first)
    return split


def _mark_split(weight: nn.Parameter, dim: int) -> None:
    """Say that `weight` is a shard. megatron-core does so only where it initialises a weight itself; an unmarked one
    passes for a replica, and the global norm then counts the first rank's shard alone."""
    from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

    set_tensor_model_parallel_attributes(weight, True, dim, 1)


def _untouched(weight: Tensor) -> None:
    """Initialisation is ours: `perform_initialization` is off, and this is never called."""


def _first(module: nn.Module, args: Any, output: tuple[Tensor, Tensor | None]) -> Tensor:  # noqa: ANN401
    """The output of a megatron-core layer without the bias that it may leave to its caller."""
    return output[0]


@torch.no_grad()
def initialize(model: Transformer, seed: int, tp: int, tp_rank: int, device: torch.device) -> None:
    """Allocate what is still on the meta device, and fill every replica and shard with its initial values."""
    for module in model.modules():
        if any(p.is_meta for p in module.parameters(recurse=False)):
            module.to_empty(device=device, recurse=False)
    for name, parameter in model.named_parameters():
        full, offset = list(parameter.shape), [0] * parameter.dim()
        if (dim := split_dim(parameter)) is not None:
            offset[dim] = tp_rank * full[dim]
            full[dim] *= tp
        parameter.copy_(
            initial_value(
                model.spec,
                drawn_name(model.spec, name),
                full,
                seed=seed,
                block=Block(shape=parameter.shape, offset=offset),
                device=device,
            )
        )
