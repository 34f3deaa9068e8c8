"""Does a layout hold what it should? Bytes of model states on every rank against the closed form."""

from meshmark.expect import expect
from meshmark.record import Record


def test_memory(observed: Record) -> None:
    """Parameters, gradients and optimizer states of every rank, within 1 % of plan and declared remainders."""
    expect(observed, "memory")
