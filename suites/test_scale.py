"""What would a rank of a world hold that you have not got? Single ranks of any `--world`, each alone in one process:
the framework's real steps over collectives that are over at once. Asked for by `--scale`."""

from meshmark.pytest_plugin.expect import expect
from meshmark.records.record import Record


def test_scale(alone: Record) -> None:
    """The first and the last rank (of a long pipeline one in the middle too) hold what the plan says, and ask for the
    collectives of theory. Losses and gradients mean nothing there, and are not judged."""
    expect(alone, "memory")
    expect(alone, "communication")
