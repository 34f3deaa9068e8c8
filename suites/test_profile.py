"""Where does a step's time go? Computing, communicating, neither: asked for by `--profile`."""

from meshmark.pytest_plugin.plugin import expect_ran
from meshmark.records.record import Record


def test_profile(profiled: Record) -> None:
    """Every rank tells, and every step was seen."""
    expect_ran(profiled)
    assert [profile.num_steps for profile in profiled.profiles] == [profiled.steps] * profiled.case.world_size
