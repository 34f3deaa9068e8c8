"""Does the framework train correctly? Loss, gradients and parameters against the float64 single-process truth."""

from meshmark.pytest_plugin.plugin import expect
from meshmark.records.record import Record
from meshmark.regression.baseline_gate import BaselineGate


def test_equivalence(observed: Record, baseline: BaselineGate | None) -> None:
    """Five steps with unequal token counts, accumulation and active clipping; every tensor within its noise."""
    expect(observed, "equivalence", baseline)
