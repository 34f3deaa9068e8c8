"""Read what a DeepSpeed engine stores of each parameter, and observe how it clips.

ZeRO keeps fp32 weights in flat tensors, one for each group of the optimizer. A rank holds a range of each. Their
gradients are set shortly before the optimizer's step.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshmark.check.pieces import CannotTellError, Piece, layers, named_parameters, whole_shape

Places = dict[str, tuple[Any, slice, Piece]]


def engine_in(module: nn.Module) -> Any | None:  # noqa: ANN401
    """Return the DeepSpeed engine that `module` is or wraps, or None."""
    return next((layer for layer in layers(module) if type(layer).__name__ == "DeepSpeedEngine"), None)


def refuse_unseen(engine: Any) -> None:  # noqa: ANN401
    """Raise `CannotTellError` if a part of the engine's work cannot be observed."""
    zero = engine.optimizer
    offload = engine._config.zero_config.offload_optimizer
    reasons = {
        "fp16, whose loss scale it keeps to itself": engine.fp16_enabled(),
        "bf16 without ZeRO, whose master weights are in another place": engine.bfloat16_enabled()
        and not engine.zero_optimization(),
        "an optimizer that reduces gradients itself": not engine.enable_backward_allreduce,
        "tensor parallelism": engine.autotp_size() > 1,
        "sequence parallelism, in which ranks share rows": engine.sequence_parallel_size > 1,
        "experts that ranks share": engine.has_moe_layers,
        "ZenFlow, which updates later than its step": bool(engine.zenflow),
        "states on a disk (NVMe)": offload is not None and offload.device == "nvme",
        "no optimizer": zero is None,
    }
    for reason, found in reasons.items():
        if found:
            raise CannotTellError(f"a DeepSpeed engine with {reason}")


def zero_pieces(engine: Any) -> Places:  # noqa: ANN401
    """Return, by name, what the engine's ZeRO optimizer stores of each parameter on this rank.

    The values are as those of `pieces.flat_pieces`. Without ZeRO there are none.
    """
    names = {id(p): name for name, p in named_parameters(engine).items()}
    found: Places = {}
    partitioned = engine.zero_optimization_partition_weights()
    for parameter, flat, place, piece in (_stage_3 if partitioned else _stages_1_and_2)(engine):
        name = names[id(parameter)]
        found[name] = flat, place, Piece(name=name, **piece)
    return found


_Place = tuple[Tensor, Tensor, slice, dict[str, Any]]


def _stages_1_and_2(engine: Any) -> Iterator[_Place]:  # noqa: ANN401
    """Yield the range of each parameter that this rank updates.

    Parameters are views of one tensor a group, which is divided evenly. Addresses tell where a parameter lies in it,
    in whichever order ZeRO has put them.
    """
    zero = engine.optimizer
    names = ("bit16_groups", "parallel_partitioned_bit16_groups", "single_partition_of_fp32_groups")
    if hasattr(zero, "bf16_groups"):  # stage 1 in bf16
        names = ("bf16_groups", "bf16_partitioned_groups", "fp32_groups_flat_partition")
    stored = [getattr(zero, name, []) for name in (*names, "real_dp_process_group")]
    for group, partitions, flat, process_group in zip(*stored, strict=True):
        ranks = _ranks(process_group)
        own = partitions[ranks.index(engine.global_rank)]
        for parameter in group:
            begin = (parameter.data_ptr() - own.data_ptr()) // parameter.element_size()
            low, high = max(0, begin), min(own.numel(), begin + parameter.numel())
            piece = {"shape": whole_shape(parameter), "offset": None, "ranks": ranks}
            if low < high:
                yield parameter, flat, slice(low, high), piece | {"start": low - begin}
            else:
                yield parameter, flat, slice(0, 0), piece


def _stage_3(engine: Any) -> Iterator[_Place]:  # noqa: ANN401
    zero = engine.optimizer
    for parameter in engine.module.parameters():
        ranks = _ranks(parameter.ds_process_group)
        size = parameter.ds_tensor.ds_numel
        start = size * ranks.index(engine.global_rank)
        own = max(0, min(size, parameter.ds_numel - start))  # the last part is padded
        piece = {"shape": whole_shape(parameter), "offset": None, "start": start if own else 0, "ranks": ranks}
        if parameter.requires_grad:
            group, begin, _ = zero.grad_position[zero.get_param_id(parameter)]
            yield parameter, zero.fp32_partitioned_groups_flat[group], slice(begin, begin + own), piece
        else:
            yield parameter, parameter.ds_tensor, slice(0, own), piece


def _ranks(group: Any) -> tuple[int, ...]:  # noqa: ANN401
    import torch.distributed as dist

    return tuple(dist.get_process_group_ranks(group))


def weights_dtype(engine: Any) -> torch.dtype | None:  # noqa: ANN401
    """Return the dtype in which the engine computes, if its masters have another one."""
    return torch.bfloat16 if engine.bfloat16_enabled() else None


def observe_scaling(engine: Any, saw: Callable[[float], None]) -> None:  # noqa: ANN401
    """Call `saw` with the factor by which the engine multiplies a gradient that enters its outputs.

    It divides by the number of micro-batches if the script calls `loss.backward()`, not `engine.backward(loss)`.
    """
    original = getattr(engine, "_backward_prologue_per_tensor", None)
    if original is None:  # an older DeepSpeed, in which only `engine.backward` can be called
        return

    def observed(gradient: Tensor | None) -> Tensor | None:
        scaled: Tensor | None = original(gradient)
        saw(1.0 if scaled is gradient else 1.0 / engine.gradient_accumulation_steps())
        return scaled

    engine._backward_prologue_per_tensor = observed


SawClip = Callable[[list[tuple[Tensor, Tensor]], float], None]
"""Receives pairs of a tensor that the optimizer holds and its gradient, and the largest norm."""


def observe_clipping(engine: Any, saw: SawClip) -> None:  # noqa: ANN401
    """Call `saw` before the engine clips gradients. It clips each flat tensor for itself, by the norm of all."""
    zero = engine.optimizer
    limit = float(engine.gradient_clipping())
    if not limit:
        return
    if hasattr(zero, "get_grads_for_norm"):  # BF16_Optimizer, before it clips in its step
        _before(
            zero,
            "step",
            lambda *_: saw(
                list(zip(zero.fp32_groups_flat_partition, zero.fp32_groups_gradient_flat_partition, strict=True)), limit
            ),
        )
    elif hasattr(zero, "fp32_partitioned_groups_flat"):

        def stage_3(number: int, *_: Any) -> None:  # noqa: ANN401
            flat = zero.fp32_partitioned_groups_flat[number]
            saw([(flat, flat.grad)], limit)

        _before(zero, "unscale_and_clip_grads", stage_3)
    elif hasattr(zero, "single_partition_of_fp32_groups"):

        def stages_1_and_2(gradients: Any, *_: Any) -> None:  # noqa: ANN401
            flats = [f for f in zero.single_partition_of_fp32_groups if any(f.grad is g for g in gradients)]
            saw([(f, f.grad) for f in flats], limit)

        _before(zero, "unscale_and_clip_grads", stages_1_and_2)
    else:
        _before(
            engine,
            "clip_fp32_gradients",
            lambda *_: saw([(p, p.grad) for p in engine.module.parameters() if p.grad is not None], limit),
        )


def _before(owner: Any, method: str, hook: Callable[..., None]) -> None:  # noqa: ANN401
    original = getattr(owner, method)

    @functools.wraps(original)
    def observed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        hook(*args, *kwargs.values())
        return original(*args, **kwargs)

    setattr(owner, method, observed)


@contextlib.contextmanager
def keeping_activations() -> Iterator[None]:
    """Make `deepspeed.checkpointing.checkpoint` keep activations. `torch.autograd.grad` cannot differentiate it."""

    class Plain:
        @staticmethod
        def apply(function: Callable[..., Any], found: list[Any], *args: Any) -> None:  # noqa: ANN401
            outputs = function(*args)
            found += [outputs] if isinstance(outputs, Tensor) else outputs

    module: Any = sys.modules.get("deepspeed.runtime.activation_checkpointing.checkpointing")
    kept = getattr(module, "CheckpointFunction", None)
    if kept is None:
        yield
        return
    module.CheckpointFunction = Plain
    try:
        yield
    finally:
        module.CheckpointFunction = kept
