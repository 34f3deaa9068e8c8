"""Does a layout hold what it should? Bytes of model states and activations on every rank against the closed form."""

from meshmark.pytest_plugin.plugin import expect
from meshmark.records.record import Record
from meshmark.regression.baseline_gate import BaselineGate


def test_memory(observed: Record, baseline: BaselineGate | None) -> None:
    """Parameters, gradients, optimizer states and (on a CPU) activations of every rank, within 1 % of plan and
    declared extra memory; after every step no more than that, and nothing that grows."""
    expect(observed, "memory", baseline)
