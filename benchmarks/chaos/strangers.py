"""`python -m benchmarks.chaos.strangers HOST PORT HOW`: somebody who may reach node 0's port, and has no secret.

HOW is `flood` (as many connections as this process may have, each with junk in it, again and again) or `drip` (one byte
a second on each of some connections). Ends when it is killed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time

_FLOOD = 300
_DRIPS = 20


def connect(host: str, port: int) -> socket.socket | None:
    with contextlib.suppress(OSError):
        return socket.create_connection((host, port), timeout=1.0)
    return None


def flood(host: str, port: int) -> None:
    while True:
        held = [peer for _ in range(_FLOOD) if (peer := connect(host, port))]
        for peer in held:
            with contextlib.suppress(OSError):
                peer.sendall(os.urandom(64))
        time.sleep(0.2)
        for peer in held:
            peer.close()


def drip(host: str, port: int) -> None:
    held: list[socket.socket] = []
    while True:
        held += [peer for _ in range(_DRIPS - len(held)) if (peer := connect(host, port))]
        for peer in list(held):
            try:
                peer.sendall(b"\0")
            except OSError:
                held.remove(peer)
        time.sleep(1.0)


if __name__ == "__main__":
    {"flood": flood, "drip": drip}[sys.argv[3]](sys.argv[1], int(sys.argv[2]))
