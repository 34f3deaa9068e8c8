"""What the instrumented pass of a case computed: what its untouched pass must compute as well."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ObservedPath:
    """What the instrumented pass computed, which the untouched one must compute as well."""

    losses: list[float]
    """By step."""
    digests: list[str]
    """A hash of every parameter's bits, before the first step and after each."""
    repeats: bool | None = None
    """Whether another such pass computed the same bits; None where nobody needed to know."""

    def differences(self, losses: list[float], digests: dict[int, str]) -> list[str]:
        """Where an untouched pass computed other bits; `digests` are by steps done."""
        found = [
            f"the loss of step {step} is {own!r}, and {other!r} where it was judged"
            for step, (own, other) in enumerate(zip(losses, self.losses, strict=False))
            if own != other
        ]
        common = [done for done in digests if done < len(self.digests)]
        return found + [
            f"the parameters after {done} steps are others than where they were judged"
            for done in common
            if digests[done] != self.digests[done]
        ]
