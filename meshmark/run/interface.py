"""The network device that leads to a host: gloo asks for its name, and would else take the one that this machine's own
name resolves to, which on many is the loopback device."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915
_NAME_BYTES = 16


def device_towards(host: str) -> str | None:
    """None where nobody knows, as where `host` is reached by IPv6 alone."""
    try:
        address = socket.getaddrinfo(host, 9, socket.AF_INET, socket.SOCK_DGRAM)[0][4]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # which sends nothing
            mine = probe.getsockname()[0]
            names = [name for _, name in socket.if_nameindex() if _address(probe, name) == mine]
    except OSError:
        return None
    return names[0] if names else None


def _address(probe: socket.socket, name: str) -> str | None:
    with contextlib.suppress(OSError):
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[: _NAME_BYTES - 1]))
        return socket.inet_ntoa(answer[20:24])
    return None
