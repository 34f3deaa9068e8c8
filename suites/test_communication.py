"""Does a layout send what it should? Bytes by kind of collective against theory."""

from meshmark.expect import expect
from meshmark.run.record import Record


def test_communication(observed: Record) -> None:
    """What the framework asked PyTorch's communication layer for in one step, within 1 % of the closed form."""
    expect(observed, "communication")
