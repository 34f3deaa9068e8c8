"""Does the framework train correctly? Loss, gradients and parameters against the float64 single-process truth."""

from meshmark.expect import expect
from meshmark.regression.baseline_gate import BaselineGate
from meshmark.run.record import Record


def test_equivalence(observed: Record, baseline: BaselineGate | None) -> None:
    """Five steps with unequal token counts, accumulation and active clipping; every tensor within its noise."""
    expect(observed, "equivalence", baseline)
