"""Which suite, launcher, layout and adapters a session has."""

from __future__ import annotations

from dataclasses import dataclass, replace

_BASES = ("ddp", "fsdp2", "gpipe", "accelerate", "fairscale_oss")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to run a suite."""

    name: str
    share: int
    """How many of 100 sessions have it."""
    suite: str = "throughput"
    bases: tuple[str, ...] = _BASES
    """Adapters, written as in `benchmarks.chaos.adapters`."""
    options: tuple[str, ...] = ()
    """Options of pytest."""
    workload: str = "gpt-mini"
    num_ranks: int = 2
    limit_seconds: float = 12.0
    """Time limit of one case: ten times and more what it takes on two quiet cores."""
    patience_seconds: float = 30.0
    """No wait is longer beyond that limit."""
    spread_seconds: float = 0.7
    """A case is struck within so long from the start of its ranks: about as long as they live."""
    is_forked: bool = True
    """True if ranks are forked from Meshmark's server. False if torchrun starts them."""
    judges: bool = False
    """True if the suite computes noise and verdicts after a case's ranks have ended."""
    takes_rank_faults: bool = True
    """True if each adapter has one pass, so that its record is that of the pass that was struck."""

    def slower(self, factor: float) -> Setting:
        """Return this setting with `factor` times its time limits, for a machine that does other work as well."""
        limit, patience = factor * self.limit_seconds, factor * self.patience_seconds
        return replace(self, limit_seconds=limit, patience_seconds=patience)

    @property
    def latest_seconds(self) -> float:
        """Longest wait for a case's record."""
        return self.limit_seconds + self.patience_seconds


PLAIN = Setting(name="throughput", share=40)
SETTINGS = (
    PLAIN,
    Setting(name="equivalence", share=25, suite="equivalence", limit_seconds=25.0, judges=True),
    Setting(
        name="four ranks",
        share=10,
        bases=("ddp", "fsdp2"),
        options=("--world", "4"),
        num_ranks=4,
        limit_seconds=25.0,
        spread_seconds=1.2,
    ),
    Setting(
        name="torchrun",
        share=10,
        bases=("ddp", "fsdp2"),
        options=("--launcher", "torchrun"),
        limit_seconds=60.0,
        spread_seconds=4.0,
        is_forked=False,
    ),
    Setting(name="Downpour", share=5, bases=("downpour",), workload="gpt-mini-sgd-downpour-p1f1", limit_seconds=25.0),
    Setting(
        name="conformance, with checkpoints",
        share=10,
        suite="conformance",
        bases=("ddp", "fsdp2"),
        options=("-k", "resume"),
        limit_seconds=25.0,
        takes_rank_faults=False,
    ),
)
