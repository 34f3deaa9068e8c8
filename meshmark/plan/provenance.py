"""Where a prediction's rates come from, and which measurements they were held to, in one line."""

from __future__ import annotations

from meshmark.plan.rates import Rates
from meshmark.spec.hardware import Gpu

VALIDATED_ON: dict[str, tuple[tuple[str, ...], str]] = {
    "h100": (("h100", "h100-sweep"), "the 1B and 8B sweep"),
    "h100-96": (("h100",), "runs of torchtitan"),
    "a100-80": (("a100",), "published runs of Megatron, BLOOM and torchtitan"),
}
"""By GPU: the rates that reports/validation.md predicts measured runs with, and which runs."""


def provenance(gpu: Gpu, rates: Rates) -> str:
    """The rates' origin, and what was measured on this GPU to hold them to."""
    names, runs = VALIDATED_ON.get(gpu.name, ((), ""))
    held = f"held to {runs} (reports/validation.md)" if rates.name in names else f"held to no run on {gpu.name}"
    return f"Rates: {rates.name} ({rates.origin}), {held}."
