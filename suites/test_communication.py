"""Does a layout send what it should? Calls and bytes by kind and group of ranks, against theory."""

from meshmark.pytest_plugin.expect import expect
from meshmark.records.record import Record
from meshmark.regression.baseline_gate import BaselineGate


def test_communication(observed: Record, baseline: BaselineGate | None) -> None:
    """What the framework asked PyTorch's communication layer for in the metered step: to the byte what the closed form
    and declared exceptions say, over the same ranks, in as many calls. Every other step sends the same."""
    expect(observed, "communication", baseline)
