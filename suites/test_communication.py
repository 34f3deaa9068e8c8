"""Does a layout send what it should? Calls and bytes by kind and group of ranks, against theory."""

from meshmark.expect import expect
from meshmark.regression.gatekeeper import Gatekeeper
from meshmark.run.record import Record


def test_communication(observed: Record, baseline: Gatekeeper | None) -> None:
    """What the framework asked PyTorch's communication layer for in one step: to the byte what the closed form and
    declared departures say, over the same ranks, in as many calls."""
    expect(observed, "communication", baseline)
