"""Whose measured rates a prediction takes: those of a software stack on a kind of GPU.

What a framework reaches of a GPU is the framework's as much as the GPU's: its kernels, what it overlaps, and what it
stalls on. A pathology of one framework on one cluster (launch floors, stalls, polling) is in that stack's rates alone.
"""

from __future__ import annotations

import dataclasses
from enum import StrEnum

from meshmark.plan.rates import Rates, rates
from meshmark.spec.hardware import Gpu, gpu


class Stack(StrEnum):
    """Kernels and communication that frameworks have in common."""

    NANOTRON = "nanotron"
    """Of the sweep on one cluster of H100, with its floors and stalls."""
    MEGATRON_CORE = "megatron-core"
    """Transformer Engine's fused kernels and attention; NeMo runs on it."""
    MEGATRON_2021 = "megatron-2021"
    """Megatron-LM of the papers of 2021 and 2022, and what was built on it then."""
    PYTORCH = "pytorch"
    """PyTorch's own kernels: FSDP, DDP, torchtitan, DeepSpeed."""
    COMPOSER = "composer"
    """FSDP of 2023 with llm-foundry's own attention, the first FlashAttention in Triton."""


_STACKS = {
    "nanotron": Stack.NANOTRON,
    "megatron-core": Stack.MEGATRON_CORE,
    "fsdp-fused-loss": Stack.COMPOSER,
    **dict.fromkeys(("megatron", "megatron-deepspeed", "megatron-deepspeed-bf16", "mixed20"), Stack.MEGATRON_2021),
}
"""By recipe; the others are PyTorch's."""
_REACHED = 0.9
"""Of a network that limits: an all-reduce of 256 MB over two nodes of 400 GB/s reached 362
(baselines/papers/nanotron_collective_bandwidth.csv)."""
_FITTED: dict[tuple[str, Stack], str] = {
    ("h100", Stack.COMPOSER): "h100-composer",
    ("a100", Stack.COMPOSER): "a100-composer",
    ("h100", Stack.MEGATRON_CORE): "h100-megatron-core",
    ("h100", Stack.MEGATRON_2021): "h100-megatron-core",
}
"""Rates, by the GPU whose they are and the stack; others are called after the GPU."""
_OWN: dict[str, frozenset[Stack]] = {
    "h100": frozenset({Stack.PYTORCH}),
    "h100-megatron-core": frozenset({Stack.MEGATRON_CORE}),
    "h100-composer": frozenset({Stack.COMPOSER}),
    "a100-composer": frozenset({Stack.COMPOSER}),
    "a100": frozenset({Stack.MEGATRON_2021, Stack.PYTORCH}),
    "cpu": frozenset(),
}
"""Stacks whose runs the width of an interval is taken from, by rates."""
_BORROWED = 1.17
"""llm-foundry's runs on H100 by the A100's rates, and on A100 by the H100's, are this much further off."""


def stack_of(recipe_name: str) -> Stack:
    """The stack that a recipe's frameworks run on."""
    return _STACKS.get(recipe_name, Stack.PYTORCH)


def is_modern(there: Gpu) -> bool:
    """Whether a GPU came after the A100: with 8-bit products, as every one since Hopper has them."""
    return "fp8" in there.peak_flops


def rates_for(
    there: Gpu, stack: Stack = Stack.PYTORCH, *, as_measured: bool = False, nearest: str | None = None
) -> Rates:
    """The rates of a stack on a GPU: fitted where there were measurements, else the nearest GPU's (or those of the one
    that `nearest` names), their bandwidths in proportion to the two datasheets'.

    `as_measured` takes, of nanotron on the sweep's cluster, the build that polls for pipeline messages.
    """
    if stack is Stack.NANOTRON and there == gpu("h100"):
        return rates("h100-sweep" if as_measured else "h100-nanotron")
    # Only what was measured under this stack, on this chip, is this stack's own.
    nearest = nearest or ("cpu" if there.name == "cpu" else "h100" if is_modern(there) else "a100")
    given, known = rates(_FITTED.get((nearest, stack), nearest)), gpu(nearest)
    own = stack in _OWN[given.name] and there.peak_flops == known.peak_flops
    return scaled(given if own else _borrowed(given), known, there)


def _borrowed(given: Rates) -> Rates:
    """Rates of another GPU, or of another stack, tell less: their interval is wider."""
    spread = given.spread
    wider = dataclasses.replace(spread, faster=spread.faster / _BORROWED, slower=spread.slower * _BORROWED)
    return dataclasses.replace(given, spread=wider)


def scaled(given: Rates, known: Gpu, there: Gpu) -> Rates:
    """The rates of `known` on another GPU, or with other links and another network.

    Matrix products, in attention too, reach as much more or less of the peak as the best shapes do that one program has
    found on both.

    What collectives reached of faster links is in proportion to them. Slower ones may be what limits: those then reach
    `_REACHED` of themselves, but no more than what was reached of the faster. A fabric of which little was reached
    says nothing of the share that is reached of a narrower one.
    """
    links, nodes = given.network, there.gpus_per_node / known.gpus_per_node
    inside = there.link_bandwidth / known.link_bandwidth
    across = there.network_bandwidth * nodes / known.network_bandwidth
    made = dataclasses.replace(
        links,
        tp_bandwidth=_reached(links.tp_bandwidth, inside, there.link_bandwidth),
        tp_network_bandwidth=links.tp_network_bandwidth * across,
        node_bandwidth=_reached(links.node_bandwidth, across, there.network_bandwidth * there.gpus_per_node),
        p2p_bandwidth=links.p2p_bandwidth * across / nodes,
    )
    better = there.matmul_share / known.matmul_share if there.matmul_share and known.matmul_share else 1.0
    kernels = dataclasses.replace(
        given.kernels,
        gemm_efficiency=min(1.0, given.kernels.gemm_efficiency * better),
        attention_efficiency=min(1.0, given.kernels.attention_efficiency * better),
    )
    return dataclasses.replace(given, network=made, kernels=kernels if better != 1.0 else given.kernels)


def _reached(known: float, ratio: float, peak: float) -> float:
    """Bytes per second of a collective over links `ratio` times as fast as those that reached `known`."""
    return known * ratio if ratio >= 1.0 else max(known * ratio, min(known, _REACHED * peak))
