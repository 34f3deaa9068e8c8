"""What the instrumented pass of a case computed: what its untouched pass must compute as well."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ObservedPath:
    """What the instrumented pass computed, which the untouched one must compute as well."""

    losses: list[float]
    """By step: of those that were judged, and of those that the same calls made of them, up to the last that was
    timed."""
    digests: list[str]
    """A hash of every parameter's bits, before the first step and after each that was judged."""
    later: dict[int, str] = field(default_factory=dict)
    """The same after more steps than these, by steps done."""
    left_out: int = 0
    """Of as many first steps as are judged, those that loss scaling left out."""
    repeats: bool | None = None
    """Whether another such pass computed the same bits; None where nobody needed to know."""

    def digest(self, done: int) -> str | None:
        """After so many steps; None where nobody looked."""
        return self.digests[done] if done < len(self.digests) else self.later.get(done)

    @property
    def num_judged(self) -> int:
        """Steps."""
        return len(self.digests) - 1

    def differences(self, losses: list[float], digests: dict[int, str]) -> list[str]:
        """Where an untouched pass computed other bits; `digests` are by steps done."""
        judged = "where it was judged", "where the calls that were judged went on"
        found = [
            f"the loss of step {step} is {own!r}, and {other!r} {judged[step >= self.num_judged]}"
            for step, (own, other) in enumerate(zip(losses, self.losses, strict=False))
            if own != other
        ]
        return found + [
            f"the parameters after {done} steps are others than {judged[done > self.num_judged]}"
            for done, own in digests.items()
            if self.digest(done) not in (None, own)
        ]
