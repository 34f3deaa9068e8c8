"""The memory of single ranks in a world that you do not have. Each rank of `--world` is alone in one process and takes
the framework's real steps over collectives that end at once. Asked for by `--scale`."""

from meshmark.pytest_plugin.plugin import expect
from meshmark.records.record import Record


def test_scale(alone: Record) -> None:
    """The first and the last rank (of a long pipeline one in the middle too) hold what the plan says, and ask for the
    collectives of theory. Losses and gradients mean nothing there, and are not judged."""
    expect(alone, "memory")
    expect(alone, "communication")
