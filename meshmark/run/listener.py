"""Where node 0 listens for the others."""

from __future__ import annotations

import ipaddress
import socket

from meshmark.errors import ClusterError

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


def listen(host: str, port: int) -> socket.socket:
    """A socket at the address of `--rdzv` alone. Raises `ClusterError` when that cannot be had, or is one that no other
    node reaches."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family)
    except OSError as error:
        raise ClusterError(
            f"node 0 cannot listen at {host}:{port}: {error.strerror}; --rdzv takes an address of node 0 and "
            "a free port there"
        ) from error
    if host not in LOOPBACK and ipaddress.ip_address(address[0]).is_loopback:
        listener.close()
        raise ClusterError(
            f"{host} is {address[0]} on node 0 itself, which no other node reaches: give --rdzv an IP address"
        )
    return listener
