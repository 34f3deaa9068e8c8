"""Choose the measured rates of a prediction: those of a software stack on a kind of GPU.

Rates depend on the framework as much as on the GPU: its kernels, what it overlaps, and what it stalls on. A problem of
one framework on one cluster (launch floors, stalls, polling) is only in that stack's rates.
"""

from __future__ import annotations

import dataclasses
from enum import StrEnum

from meshmark.plan.rates import NCCL, REACHED, Rates, rates
from meshmark.spec.hardware import Gpu, gpu


class Stack(StrEnum):
    """A group of frameworks with the same kernels and communication."""

    NANOTRON = "nanotron"
    """Nanotron, as in the sweep on one cluster of H100, with its floors and stalls."""
    MEGATRON_CORE = "megatron-core"
    """Transformer Engine's fused kernels and attention. NeMo runs on it."""
    MEGATRON_2021 = "megatron-2021"
    """Megatron-LM of the papers of 2021 and 2022, and frameworks built on it at that time."""
    PYTORCH = "pytorch"
    """PyTorch's own kernels: FSDP, DDP, torchtitan, DeepSpeed."""
    XLA = "xla"
    """JAX's compiler: MaxText and Pax. On GPUs its products and attention are cuBLASLt's and cuDNN's."""
    COMPOSER = "composer"
    """FSDP of 2023 with llm-foundry's own attention, the first FlashAttention in Triton."""


_STACKS = {
    "nanotron": Stack.NANOTRON,
    "megatron-core": Stack.MEGATRON_CORE,
    "fsdp-fused-loss": Stack.COMPOSER,
    "xla": Stack.XLA,
    **dict.fromkeys(("megatron", "megatron-deepspeed", "megatron-deepspeed-bf16", "mixed20"), Stack.MEGATRON_2021),
}
"""Stacks by recipe. All other recipes use PyTorch's."""
_FITTED: dict[tuple[str, Stack], str] = {
    ("h100", Stack.COMPOSER): "h100-composer",
    ("a100", Stack.COMPOSER): "a100-composer",
    ("h100", Stack.MEGATRON_CORE): "h100-megatron-core",
    ("h100", Stack.MEGATRON_2021): "h100-megatron-core",
    ("h100", Stack.XLA): "h100-megatron-core",
}
"""Names of rates by GPU and stack. All others are named after the GPU."""
_OWN: dict[str, frozenset[Stack]] = {
    "h100": frozenset({Stack.PYTORCH}),
    "h100-megatron-core": frozenset({Stack.MEGATRON_CORE}),
    "h100-composer": frozenset({Stack.COMPOSER}),
    "a100-composer": frozenset({Stack.COMPOSER}),
    "a100": frozenset({Stack.MEGATRON_2021, Stack.PYTORCH}),
    "cpu": frozenset(),
}
"""Stacks whose runs define the width of the interval, by rates."""
_BORROWED = 1.17
"""Factor by which intervals widen for borrowed rates.

It is how much worse llm-foundry's runs on H100 are predicted by the A100's rates, and vice versa.
"""


def stack_of(recipe_name: str) -> Stack:
    """Return the stack that a recipe's frameworks run on."""
    return _STACKS.get(recipe_name, Stack.PYTORCH)


def is_modern(there: Gpu) -> bool:
    """Return whether a GPU is newer than the A100, that is, has 8-bit products, as all have since Hopper."""
    return "fp8" in there.peak_flops


def rates_for(
    there: Gpu, stack: Stack = Stack.PYTORCH, *, as_measured: bool = False, nearest: str | None = None
) -> Rates:
    """Return the rates of a stack on a GPU.

    They are fitted if there were measurements. Otherwise they are those of the nearest GPU (or of the one that
    `nearest` names), with bandwidths scaled by the two datasheets. `as_measured` selects, for nanotron on the sweep's
    cluster, the build that polls for pipeline messages.
    """
    if stack is Stack.NANOTRON and there == gpu("h100"):
        return rates("h100-sweep" if as_measured else "h100-nanotron")
    # Only what was measured under this stack, on this chip, is this stack's own.
    nearest = nearest or ("cpu" if there.name == "cpu" else "h100" if is_modern(there) else "a100")
    given, known = rates(_FITTED.get((nearest, stack), nearest)), gpu(nearest)
    if stack is Stack.XLA:  # hiding tensor-parallel collectives is Transformer Engine's
        # XLA assigns buffers before a step runs: nothing of PyTorch's caching allocator lies between them.
        given = given.moved({"network.tensor_overlap": 0.0, "memory.fragmentation": 0.0})
    given = contended(given, stack, there)
    own = stack in _OWN[given.name] and there.peak_flops == known.peak_flops
    return scaled(given if own else _borrowed(given), known, there)


def contended(given: Rates, stack: Stack, there: Gpu) -> Rates:
    """Return rates with the costs of NCCL's collectives: they slow computation down, and take longer among many ranks.

    On TPUs these costs are zero, because links move data without the cores. The rates of nanotron, of Megatron of 2021
    and of a calibrated CPU are returned as given, because the runs that gave them include these costs.
    """
    if stack in (Stack.NANOTRON, Stack.MEGATRON_2021) or there.name == "cpu":
        return given
    return given.moved(dict.fromkeys(NCCL, 0.0) if there.is_tpu else NCCL)


def _borrowed(given: Rates) -> Rates:
    """Return rates with a wider interval, because those of another GPU or stack are less certain.

    Where no run says how wide it is, that stays unknown.
    """
    spread = given.spread
    if spread.slower <= 1.0:
        return given
    wider = dataclasses.replace(spread, faster=spread.faster / _BORROWED, slower=spread.slower * _BORROWED)
    return dataclasses.replace(given, spread=wider)


def scaled(given: Rates, known: Gpu, there: Gpu) -> Rates:
    """Return the rates of `known` on another GPU, or with other links and another network.

    The efficiency of matrix products, of attention and of element-wise kernels scales with the share of the peak, or of
    the memory bandwidth, that one program measured on both GPUs. Attention without one scales as products do.

    Bandwidth of collectives scales in proportion to faster links. Slower links may be the limit: collectives then
    reach `REACHED` of them, but no more than on the faster ones. A low share of a fast fabric does not imply a low
    share of a slower one.
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
    better = _ratio(there.matmul_share, known.matmul_share)
    attends = _ratio(there.attention_share, known.attention_share, better)
    moves = _ratio(there.memory_share, known.memory_share)
    kernels = dataclasses.replace(
        given.kernels,
        gemm_efficiency=min(1.0, given.kernels.gemm_efficiency * better),
        attention_efficiency=min(1.0, given.kernels.attention_efficiency * attends),
        memory_efficiency=min(1.0, given.kernels.memory_efficiency * moves),
    )
    return dataclasses.replace(given, network=made, kernels=kernels)


def _ratio(there: float | None, known: float | None, otherwise: float = 1.0) -> float:
    """Return one share over the other, or `otherwise` if one of them is unknown."""
    return there / known if there and known else otherwise


def _reached(known: float, ratio: float, peak: float) -> float:
    """Return bytes per second of a collective over links `ratio` times as fast as those that reached `known`."""
    return known * ratio if ratio >= 1.0 else max(known * ratio, min(known, REACHED * peak))
