"""One line about the origin of a prediction's rates, and the measurements that validate them."""

from __future__ import annotations

from meshmark.plan.rates import Rates
from meshmark.spec.hardware import Gpu

VALIDATED_ON: dict[tuple[str, str], str] = {
    ("h100", "h100-nanotron"): "the 1B and 8B sweep",
    ("h100", "h100-sweep"): "the 1B and 8B sweep",
    ("h100", "h100"): "runs of torchtitan and fms-fsdp",
    ("h100", "h100-composer"): "runs of llm-foundry",
    ("a100-80", "a100-composer"): "runs of llm-foundry",
    ("a100-40", "a100-composer"): "runs of llm-foundry",
    ("h100", "h100-megatron-core"): "runs of NeMo and Megatron-Bridge; MaxText's and Pax's differ more",
    ("gb200-nvl72", "h100-megatron-core"): "runs of NeMo and Megatron-Bridge",
    ("gb300-nvl72", "h100-megatron-core"): "runs of Megatron-Bridge",
    ("b200", "h100-megatron-core"): "runs of Megatron-Bridge",
    ("tpu-v4", "a100"): "a run of MaxText",
    ("tpu-v5e", "a100"): "runs of MaxText",
    ("tpu-v5p", "a100"): "runs of MaxText",
    ("a800-80", "a100"): "a run of ColossalAI",
    ("h100-96", "h100"): "runs of torchtitan",
    ("a100-80", "a100"): "published runs of Megatron, BLOOM, torchtitan, fms-fsdp and InternEvo",
}
"""Runs that reports/validation.md predicts with these rates, by GPU and rates."""


def provenance(gpu: Gpu, rates: Rates) -> str:
    """Return the origin of the rates, and the measurements on this GPU that validate them."""
    runs = VALIDATED_ON.get((gpu.name, rates.name), "")
    held = f"held to {runs} (reports/validation.md)" if runs else f"held to no run on {gpu.name}"
    return f"Rates: {rates.name} ({rates.origin}), {held}."
