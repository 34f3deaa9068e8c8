"""Does a layout send what it should? Calls and bytes by kind and group of ranks, against theory."""

from meshmark.expect import expect
from meshmark.regression.baseline_gate import BaselineGate
from meshmark.run.record import Record


def test_communication(observed: Record, baseline: BaselineGate | None) -> None:
    """What the framework asked PyTorch's communication layer for in the metered step: to the byte what the closed form
    and declared exceptions say, over the same ranks, in as many calls. Every other step sends the same."""
    expect(observed, "communication", baseline)
