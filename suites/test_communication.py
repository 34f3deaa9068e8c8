"""Does a layout send what it should? Calls and bytes by kind and group of ranks, against theory."""

from meshmark.pytest_plugin.plugin import expect
from meshmark.records.record import Record
from meshmark.regression.baseline_gate import BaselineGate


def test_communication(observed: Record, baseline: BaselineGate | None) -> None:
    """The framework sends what theory and its declared exceptions say: as many bytes and calls, over the same ranks, at
    PyTorch's communication layer. Every step is compared."""
    expect(observed, "communication", baseline)
