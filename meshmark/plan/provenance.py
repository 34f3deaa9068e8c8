"""One line about the origin of a prediction's rates, and the measurements that validate them."""

from __future__ import annotations

from meshmark.plan.rates import Rates
from meshmark.plan.stacks import Stack, rates_for
from meshmark.spec.hardware import Gpu

VALIDATED_ON: dict[tuple[str, Stack], str] = {
    ("h100", Stack.NANOTRON): "the 1B and 8B sweep",
    ("h100", Stack.MEGATRON_CORE): "runs of NeMo and Megatron-Bridge",
    ("h100", Stack.XLA): "runs of MaxText and Pax",
    ("h100", Stack.PYTORCH): "runs of torchtitan, fms-fsdp and Llama 3",
    ("h100", Stack.COMPOSER): "runs of llm-foundry",
    ("h100-96", Stack.PYTORCH): "runs of torchtitan",
    ("b200", Stack.MEGATRON_CORE): "runs of Megatron-Bridge",
    ("gb200-nvl72", Stack.MEGATRON_CORE): "runs of NeMo and Megatron-Bridge",
    ("gb300-nvl72", Stack.MEGATRON_CORE): "runs of Megatron-Bridge",
    ("a100-80", Stack.MEGATRON_2021): "published runs of Megatron and BLOOM",
    ("a100-80", Stack.PYTORCH): "published runs of torchtitan, fms-fsdp and InternEvo",
    ("a100-80", Stack.COMPOSER): "runs of llm-foundry",
    ("a100-40", Stack.COMPOSER): "runs of llm-foundry",
    ("a800-80", Stack.PYTORCH): "a run of ColossalAI",
    ("tpu-v4", Stack.XLA): "a run of MaxText",
    ("tpu-v5e", Stack.XLA): "runs of MaxText",
    ("tpu-v5p", Stack.XLA): "runs of MaxText",
}
"""Runs that reports/validation.md predicts by the rates of a stack on a GPU."""


def validated_on(gpu: Gpu, rates: Rates, stack: Stack | None) -> str:
    """Return the measured runs of a stack on this GPU that its rates are compared with, or an empty string.

    There are none if the rates are not the stack's own on this GPU.
    """
    if stack is None or (gpu.name, stack) not in VALIDATED_ON:
        return ""
    own = {rates_for(gpu, stack, as_measured=measured).name for measured in (False, True)}
    return VALIDATED_ON[gpu.name, stack] if rates.name in own else ""


def provenance(gpu: Gpu, rates: Rates, stack: Stack | None = None) -> str:
    """Return the origin of the rates, and the measurements of a stack on this GPU that validate them."""
    runs = validated_on(gpu, rates, stack)
    of = f" of {stack}" if stack else ""
    held = f"held to {runs} (reports/validation.md)" if runs else f"held to no run{of} on {gpu.name}"
    return f"Rates: {rates.name} ({rates.origin}), {held}."
