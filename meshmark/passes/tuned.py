"""Check that a case's tuning is in use, by one more step under PyTorch's profiler. Nothing else is read of that step.

Tuning that is asked for and not in use fails the rank. It never becomes a slower run that is reported as tuned.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile

from meshmark.adapter.engine import Engine
from meshmark.errors import AdapterError
from meshmark.judge.gather import all_gather_json
from meshmark.reference.chunked_loss import ChunkedCrossEntropy
from meshmark.reference.data import make_batch
from meshmark.spec.case import Case
from meshmark.spec.tuning import Attention, Matmul

REGION = "Torch-Compiled Region"
"""Prefix of the name under which PyTorch's profiler shows a compiled graph's forward pass."""
UNFUSED = "unfused optimizer"
ROUNDED = "rounded product"
WIDE = "wide sums"
_FUSED_STEP = "aten::_fused_"
_LOSS = ChunkedCrossEntropy.__name__
_ATTENTION = {
    Attention.FLASH: "aten::_scaled_dot_product_flash_attention",
    Attention.EFFICIENT: "aten::_scaled_dot_product_efficient_attention",
    Attention.CUDNN: "aten::_scaled_dot_product_cudnn_attention",
    Attention.MATH: "aten::_scaled_dot_product_attention_math",
}
"""Prefixes of operator names."""

Seen = Mapping[str, int]
"""How often each item ran on one rank."""


def expect_tuned(engine: Engine, case: Case, device: torch.device, step: int) -> dict[str, str]:
    """Return which parts of the case's tuning ran in `step` on this rank.

    A collective call. Raises `AdapterError` if a part did not run on some rank.
    """
    if not case.tuning:
        return {}
    own = _guards_seen(engine, case, device, step)
    every: list[dict[str, int]] = all_gather_json(own)
    if idle := list(unused(case, every, step)):
        raise AdapterError(
            f"tuning {case.tuning} was asked for, but {'; '.join(idle)}: the adapter is to build by `configure`, "
            "`build_optimizer(..., case.tuning)` and `loss_share`, or to leave it out of `Capabilities.tunings`"
        )
    return {f"tuning {case.tuning}": ", ".join(f"{name} x {count}" for name, count in sorted(own.items()))}


def compile_seconds(case: Case) -> float:
    """Return the seconds that this process has spent compiling."""
    if not case.tuning.compile:
        return 0.0
    from torch._dynamo.utils import calculate_time_spent

    return calculate_time_spent()["total_wall_time"]


def unused(case: Case, every: Sequence[Seen], step: int) -> Iterator[str]:
    """Yield the parts of the case's tuning that did not run, from the counts of every rank."""
    tuning, layout, count = case.tuning, case.layout, case.layout.num_micro_batches
    blocks = (case.workload.model.num_layers - (case.workload.skipped_at(step) is not None)) // layout.pp
    for rank, seen in enumerate(every):
        if tuning.compile and seen.get(REGION, 0) < blocks * count:
            yield (
                f"rank {rank} ran {seen.get(REGION, 0)} compiled regions for {count} micro-batches of at least "
                f"{blocks} blocks"
            )
        if tuning.fused_optimizer and (UNFUSED in seen or _FUSED_STEP not in seen):
            yield f"rank {rank} stepped an optimizer that is not fused"
        kernels = {kernel for kernel, operator in _ATTENTION.items() if operator in seen}
        if tuning.compile and not kernels:  # in a compiled graph, math is no operator of its own
            kernels = {Attention.MATH}
        if tuning.attention and kernels != {tuning.attention}:
            yield f"rank {rank} ran {', '.join(sorted(kernels)) or 'no'} attention"
        if tuning.matmul is Matmul.TF32 and ROUNDED not in seen:
            yield f"rank {rank} multiplies whole float32 numbers"
        if tuning.matmul is Matmul.WIDE_SUMS and WIDE not in seen:
            yield f"rank {rank} allows split products to be summed in 16 bits"
    if tuning.chunked_loss and max(seen.get(_LOSS, 0) for seen in every) < count:
        yield "no rank computed the loss in chunks"


def _guards_seen(engine: Engine, case: Case, device: torch.device, step: int) -> dict[str, int]:
    batch = make_batch(case.workload, step)
    with profile(activities=[ProfilerActivity.CPU]) as profiled, _optimizers() as stepped:
        engine.step(batch)
    starts = (REGION, _FUSED_STEP, *_ATTENTION.values())
    found: Counter[str] = Counter()
    for event in profiled.events() or []:
        found[_LOSS] += event.name == _LOSS
        if "backward" not in event.name:
            found.update(start for start in starts if event.name.startswith(start))
    found[UNFUSED] = sum(not group.get("fused") for group in stepped if group["params"])
    found[ROUNDED] = _rounds_products(device)
    found[WIDE] = not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    return {name: int(count) for name, count in found.items() if count}


@contextlib.contextmanager
def _optimizers() -> Iterator[list[dict[str, Any]]]:
    """Collect the parameter groups of every optimizer that steps within the context, as they are at that time."""
    groups: list[dict[str, Any]] = []

    def note(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:  # noqa: ANN401
        groups.extend(optimizer.param_groups)

    hook = register_optimizer_step_pre_hook(note)
    try:
        yield groups
    finally:
        hook.remove()


def _rounds_products(device: torch.device) -> bool:
    """Return whether a float32 operand loses its last bits in a product, as in TF32.

    The product itself is examined rather than the setting.
    """
    odd = torch.full((256, 256), 1 + 2.0**-12, device=device)
    return not torch.equal(odd @ torch.eye(256, device=device), odd)
