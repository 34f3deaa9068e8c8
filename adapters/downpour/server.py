"""The parameter server: PyTorch's Adagrad on what replicas push, in the order in which it comes."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshmark.adapter.engine import Holdings
from meshmark.algorithms.downpour.parameter_server import ParameterServer

PATIENCE_SECONDS = 60.0
"""Least seconds that a push waits for the slowest replica. A replica that has not pushed by then has stopped."""
_SLOWER = 10.0
"""How much longer than any replica has taken from push to push it waits, where that is more."""


class Server:
    """Parameter server. Any replica calls its methods, from threads of the RPC framework."""

    def __init__(self, spec: ParameterServer, start: Sequence[Tensor], num_replicas: int) -> None:
        self.spec = spec
        self.weights = [nn.Parameter(x.detach().clone()) for x in start]
        self.optimizer = torch.optim.Adagrad(self.weights, lr=spec.rate)
        self.version = 0
        self.pushes = [0] * num_replicas
        """Applied so far, by replica."""
        self.last_push = [time.monotonic()] * num_replicas
        self.longest = 0.0
        """Seconds from one push of a replica to its next."""
        self.turn = threading.Condition()

    def push(self, replica: int, gradients: list[Tensor]) -> int:
        """Returns the version that it makes."""
        with self.turn:
            self.longest = max(self.longest, time.monotonic() - self.last_push[replica])
            self.wait_for_the_slowest(replica)
            self.apply(replica, gradients)
            self.version += 1
            self.pushes[replica] += 1
            self.last_push[replica] = time.monotonic()
            self.turn.notify_all()
            return self.version

    def fetch(self, replica: int) -> tuple[int, list[Tensor]]:
        """Return the current version and a copy of its weights."""
        with self.turn:
            return self.version, [w.detach().clone() for w in self.weights]

    def apply(self, replica: int, gradients: list[Tensor]) -> None:
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def wait_for_the_slowest(self, replica: int) -> None:
        """Raises `RuntimeError` with the name of a replica that has stopped."""
        while self.pushes[replica] - min(self.pushes) >= self.spec.lead:
            patience = max(PATIENCE_SECONDS, _SLOWER * self.longest)
            if not self.turn.wait(patience):
                slowest = self.pushes.index(min(self.pushes))
                raise RuntimeError(
                    f"replica {slowest} has stopped: after {min(self.pushes)} pushes it sent nothing for "
                    f"{patience:g} seconds, and replica {replica} may be {self.spec.lead} ahead at most"
                )

    def held(self) -> Holdings:
        states = [x for state in self.optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        return Holdings(optimizer_states=[*(w.detach() for w in self.weights), *states])

    def state(self) -> dict[str, Any]:
        return {
            "weights": [w.detach() for w in self.weights],
            "optimizer": self.optimizer.state_dict(),
            "version": self.version,
            "pushes": self.pushes,
        }

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        for weight, saved in zip(self.weights, state["weights"], strict=True):
            weight.copy_(saved)
        self.optimizer.load_state_dict(state["optimizer"])
        self.version, self.pushes = state["version"], state["pushes"]


HERE: dict[str, Server] = {}
"""The servers of this process, by the name that replicas call them by."""


def push(name: str, replica: int, gradients: list[Tensor]) -> int:
    return HERE[name].push(replica, gradients)


def fetch(name: str, replica: int) -> tuple[int, list[Tensor]]:
    return HERE[name].fetch(replica)
