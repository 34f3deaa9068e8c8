"""A parameter server, as replicas that wait for no one use it (Downpour SGD, Dean et al., NIPS 2012)."""

from __future__ import annotations

from dataclasses import dataclass

from meshmark.errors import InputError


@dataclass(frozen=True, kw_only=True)
class ParameterServer:
    """How often replicas meet it, and what it does with what they push. Raises `InputError` for what means nothing."""

    push_every: int = 1
    """The paper's n_push: steps whose gradients go to the server together; the first step's go alone."""
    fetch_every: int = 1
    """The paper's n_fetch: steps from one copy of the server's parameters to the next."""
    lead: int = 2
    """The bound on staleness: by how many pushes a replica may be ahead of the slowest. The paper has none; a bound by
    clocks is stale-synchronous parallel's (Ho et al., NIPS 2013)."""
    rate: float = 0.01
    """Adagrad's, on the server."""

    def __post_init__(self) -> None:
        for name in ("push_every", "fetch_every"):
            if getattr(self, name) < 1:
                raise InputError(f"parameter server: {name} is {getattr(self, name)}, expected at least 1")
        if self.lead < 1:
            raise InputError(
                f"parameter server: lead is {self.lead}, expected at least 1: somebody must be the first to push"
            )
        if not self.rate > 0:
            raise InputError(f"parameter server: rate is {self.rate}, expected above 0")

    @property
    def id(self) -> str:
        """`p2f3` where every second step is pushed, and every third fetched; with another bound `p2f3l1`."""
        lead = "" if self.lead == type(self).lead else f"l{self.lead}"
        return f"p{self.push_every}f{self.fetch_every}{lead}"

    def pushes_after(self, step: int) -> bool:
        """Return whether a replica pushes what it has gathered, up to and including `step`."""
        return step % self.push_every == 0

    def fetches_after(self, step: int) -> bool:
        """Return whether a replica fetches, and begins the step after `step` with the server's parameters."""
        return (step + 1) % self.fetch_every == 0


SERVERS = (
    ParameterServer(push_every=2, fetch_every=3),
    ParameterServer(),
    ParameterServer(push_every=2, fetch_every=3, lead=1),
)
"""Settings that have a name: one that shows every effect, the paper's, and one whose replicas keep closer together."""
