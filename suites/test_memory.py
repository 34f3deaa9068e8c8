"""Does a layout hold what it should? Bytes of model states and activations on every rank against the closed form."""

from meshmark.expect import expect
from meshmark.regression.gatekeeper import Gatekeeper
from meshmark.run.record import Record


def test_memory(observed: Record, baseline: Gatekeeper | None) -> None:
    """Parameters, gradients, optimizer states and (on a CPU) activations of every rank, within 1 % of plan and
    declared remainders."""
    expect(observed, "memory", baseline)
