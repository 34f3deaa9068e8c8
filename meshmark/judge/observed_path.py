"""The values that a case's instrumented pass computed, and that its untouched pass must also compute."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshmark.spec.algorithm import Algorithm


@dataclass(frozen=True, kw_only=True)
class ObservedPath:
    """The values that the instrumented pass computed, and that the untouched pass must also compute."""

    losses: list[float]
    """Losses by step, up to the last timed step: of judged steps, and of later steps by the same calls."""
    digests: list[str]
    """A hash of every parameter's bits before the first step and after each judged step."""
    later: dict[int, str] = field(default_factory=dict)
    """The same hashes after more steps than these, by steps done."""
    left_out: int = 0
    """Number of steps that loss scaling skipped, among as many first steps as are judged."""
    repeats: bool | None = None
    """True if another such pass computed the same bits. None if that was not needed."""

    def digest(self, done: int) -> str | None:
        """Return the hash after `done` steps, or None if there is none."""
        return self.digests[done] if done < len(self.digests) else self.later.get(done)

    @property
    def num_judged(self) -> int:
        """Number of judged steps."""
        return len(self.digests) - 1

    def is_left_to_tolerance(self, algorithm: Algorithm) -> bool:
        """Return whether an untouched pass that computed other bits is judged by the tolerance model of losses.

        True if two passes of the engine differed, and under a parameter server: there chance decides which replica
        comes first, so that two passes that agree prove nothing.
        """
        return self.repeats is False or (self.repeats is not None and algorithm.steps_until_chance is not None)

    def differences(self, losses: list[float], digests: dict[int, str]) -> list[str]:
        """Return where an untouched pass computed other bits. `digests` is by steps done."""
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
