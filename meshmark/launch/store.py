"""The key-value store of a run on several nodes. Node 0 serves it to clients that know the run's secret.

PyTorch's `TCPStore` lets anyone who reaches its port read, write and list every key, and join the collectives that use
it. Here, both sides first prove by HMAC-SHA256 over fresh nonces that they know the secret. After that, messages are
JSON of limited size, and every call has a deadline.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import hmac
import json
import os
import random
import resource
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from meshmark.errors import ClusterError, NodeLostError

_GREETING = b"meshmark store 1"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_MOST_BYTES = 2**30
"""Largest size of one message. Reports of all ranks of a node are a few megabytes."""
_PROVE_SECONDS = 10.0
"""Time limit in seconds for the whole proof, however slowly its bytes arrive."""
_PROVE_ATTEMPTS = 6
_PAUSE_SECONDS = 0.1
"""Scale in seconds of the random pause before another attempt. It doubles with each attempt."""
_MOST_UNPROVEN = 256
"""Most peers that have not yet proven themselves. With more, the oldest are disconnected."""
_RETRY_SECONDS = 0.05
"""Pause in seconds after a connection could not be accepted for lack of files or memory."""
_CALL_SECONDS = 15.0
"""A call that takes longer means that node 0 or the link to it is lost."""
SILENT_SECONDS = 15.0
"""A launcher that gives no sign of life for so long is lost."""
_POLL_SECONDS = (0.002, 0.05)
"""Between two questions of one wait: first, and at most."""


class StoreServer:
    """Serves the store to clients that prove that they know `secret`, with one thread per connection."""

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        self._listener, self._secret = listener, secret
        self._values: dict[str, bytes] = {}
        self._heard: dict[int, float] = {}
        """When each node's launcher last gave a sign of life."""
        self._lock = threading.Lock()
        self._unproven: dict[socket.socket, None] = {}
        """Peers that have not shown that they know the secret, in the order in which they came."""
        self._unproven_lock = threading.Lock()
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most_unproven = _MOST_UNPROVEN if files < 0 else min(_MOST_UNPROVEN, max(files // 4, 1))
        self._closed = False
        self.refused: set[str] = set()
        """Addresses from which somebody came with another secret."""
        self.port: int = listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True, name="meshmark-store").start()

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def _accept(self) -> None:
        """Accept connections until this side closes. A stranger's connection, or one that fails, affects no other."""
        while not self._closed:
            try:
                peer, _ = self._listener.accept()
            except ConnectionAbortedError:  # it left before its turn
                continue
            except OSError:  # no file or memory to spare: the peer waits in the kernel's queue
                time.sleep(_RETRY_SECONDS)
                continue
            with self._unproven_lock:
                self._unproven[peer] = None
            self._drop_unproven()
            try:
                threading.Thread(target=self._serve, args=(peer,), daemon=True, name="meshmark-store-peer").start()
            except RuntimeError:  # no thread to spare
                self._forget(peer)
                peer.close()

    def _drop_unproven(self) -> None:
        """Disconnect the oldest unproven peers, so that strangers cannot keep others out.

        A rank proves itself in milliseconds, and tries again if it was disconnected.
        """
        with self._unproven_lock:
            for peer in list(self._unproven)[: max(len(self._unproven) - self._most_unproven, 0)]:
                del self._unproven[peer]
                with contextlib.suppress(OSError):
                    peer.shutdown(socket.SHUT_RDWR)  # its own thread closes it

    def _forget(self, peer: socket.socket) -> bool:
        """Count `peer` among the unproven no longer. Returns whether it was still one of them."""
        with self._unproven_lock:
            counted = peer in self._unproven
            self._unproven.pop(peer, None)
        return counted

    def _serve(self, peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # such a peer is let go
            try:
                proof = _challenge(peer, self._secret)
            finally:
                kept = self._forget(peer)  # before it is told that it may stay
            if proof is None:
                self.refused.add(str(peer.getpeername()[0]))
            if not (proof and kept):
                return
            peer.sendall(proof)
            peer.settimeout(None)
            while (question := _receive(peer)) is not None:
                with self._lock:
                    answer = self._answer(question)
                _send(peer, answer)

    def _answer(self, question: dict[str, Any]) -> Any:  # noqa: ANN401
        what, key = question["what"], question.get("key", "")
        if what == "set":
            self._values[key] = _bytes(question["value"])
        elif what == "get":
            return _text(self._values[key]) if key in self._values else None
        elif what == "add":
            self._values[key] = str(int(self._values.get(key, b"0")) + int(question["amount"])).encode()
            return int(self._values[key])
        elif what == "check":
            return all(k in self._values for k in question["keys"])
        elif what == "missing":
            return [k for k in question["keys"] if k not in self._values]
        elif what == "get_all":
            return [_text(self._values[k]) for k in question["keys"]]
        elif what == "delete":
            return self._values.pop(key, None) is not None
        elif what == "compare_set":
            expected, held = _bytes(question["expected"]), self._values.get(key)
            if held == expected or (held is None and not expected):
                self._values[key] = _bytes(question["value"])
            return _text(self._values.get(key, expected))
        elif what == "count":
            return len(self._values)
        elif what == "beat":
            self._heard[int(question["node"])] = now = time.monotonic()
            return sorted(node for node, heard in self._heard.items() if now - heard > SILENT_SECONDS)
        elif what == "time":
            return time.time()
        elif what == "leave":
            self._heard.pop(int(question["node"]), None)
        return None


class RunStore(Store):
    """A rank's or a launcher's connection to the store, with the methods that a process group needs.

    The caller must keep it alive, because a process group does not. Raises `NodeLostError` if the server is not there
    or does not reply, and another `ClusterError` if it does not know the secret.
    """

    def __init__(self, host: str, port: int, secret: bytes, timeout: datetime.timedelta) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._where = f"{host}:{port}"
        self._lock = threading.Lock()
        self._peer = self._connect(host, port, secret)
        self._peer.settimeout(_CALL_SECONDS)

    def _connect(self, host: str, port: int, secret: bytes) -> socket.socket:
        for attempt in range(1, _PROVE_ATTEMPTS + 1):
            try:
                peer = socket.create_connection((host, port), timeout=_PROVE_SECONDS)
            except OSError as error:
                raise NodeLostError(f"node 0's store at {self._where} cannot be reached: {error}") from error
            try:
                _prove(peer, secret)
            except (OSError, ValueError) as error:
                peer.close()
                if isinstance(error, ConnectionError) and attempt < _PROVE_ATTEMPTS:  # pushed out by too many others?
                    time.sleep(_PAUSE_SECONDS * 2**attempt * random.random())
                    continue
                raise ClusterError(
                    f"the program at {self._where} is not this run's store, or has a different secret. Is the port "
                    "used by another program? Do all nodes have the same MESHMARK_RDZV_SECRET, or the same home "
                    f"directory? ({error})"
                ) from error
            return peer
        raise AssertionError("the last attempt returns or raises")

    def _ask(self, what: str, **question: Any) -> Any:  # noqa: ANN401
        try:
            with self._lock:
                _send(self._peer, {"what": what, **question})
                answer = _receive(self._peer)
        except (OSError, ValueError) as error:
            self.close()  # a late reply would be taken for the reply to a later request
            raise NodeLostError(f"node 0's store at {self._where} does not answer: {error}") from error
        if answer is None:
            raise NodeLostError(f"node 0's store at {self._where} has closed: did its pytest command end?")
        return answer["answer"]

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key=key, value=_text(value.encode() if isinstance(value, str) else value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return _bytes(self._ask("get", key=key))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key=key, amount=amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", keys=keys))

    def missing(self, keys: list[str]) -> list[str]:
        """Return the keys among `keys` that are not yet written."""
        return [str(key) for key in self._ask("missing", keys=keys)]

    def get_all(self, keys: list[str]) -> list[bytes]:
        """Return the values of existing keys, in one request."""
        return [_bytes(value) for value in self._ask("get_all", keys=keys)]

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """Wait until all `keys` exist. Raises `ClusterError` on a timeout. Other threads may call meanwhile."""
        limit: datetime.timedelta = timeout or self.timeout  # type: ignore[attr-defined]
        seconds = limit.total_seconds()
        deadline, pause = time.monotonic() + seconds, _POLL_SECONDS[0]
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise ClusterError(f"nobody wrote {keys} to the store at {self._where} within {seconds:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, _POLL_SECONDS[1])

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", key=key))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        old, new = (value.encode() if isinstance(value, str) else value for value in (expected, desired))
        return _bytes(self._ask("compare_set", key=key, expected=_text(old), value=_text(new)))

    def num_keys(self) -> int:
        return int(self._ask("count"))

    def beat(self, node: int) -> list[int]:
        """Send a heartbeat of `node`'s launcher. Returns the nodes whose last heartbeat is too old."""
        return [int(silent) for silent in self._ask("beat", node=node)]

    def clock_ahead(self) -> float:
        """Return the seconds by which node 0's clock is ahead of this one's, to within half of the question's round
        trip.
        """
        asked = time.time()
        theirs = float(self._ask("time"))
        return theirs - (asked + time.time()) / 2

    def leave(self, node: int) -> None:
        """Tell the server to expect no more heartbeats of `node`."""
        self._ask("leave", node=node)

    def close(self) -> None:
        self._peer.close()


def run_secret() -> bytes:
    """Return a secret that only the processes of a run know.

    It is `MESHMARK_RDZV_SECRET`, or else a file in the user's home directory, which clusters share between nodes.
    Raises `ClusterError` if others could know it.
    """
    if text := os.environ.get("MESHMARK_RDZV_SECRET"):
        if len(text) < 16:
            raise ClusterError(f"MESHMARK_RDZV_SECRET has {len(text)} characters: expected at least 16, hard to guess")
        return text.encode()
    try:
        home = Path.home()
    except RuntimeError as error:  # neither HOME nor an entry of this user's
        raise ClusterError("this user has no home directory: set the same MESHMARK_RDZV_SECRET on all nodes") from error
    file = home / ".config" / "meshmark" / "rdzv-secret"
    try:
        if not file.exists():
            _create(file, secrets.token_hex(32))
        with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW)) as opened:
            about, text = os.fstat(opened.fileno()), opened.read()
    except UnicodeDecodeError as error:
        raise ClusterError(f"{file} is not text: remove it, a new one is made") from error
    except OSError as error:
        raise ClusterError(f"{file}: {error.strerror}; set the same MESHMARK_RDZV_SECRET on all nodes") from error
    if about.st_uid != os.geteuid() or about.st_mode & 0o077 or len(text) < 64:
        raise ClusterError(f"{file} should be this user's, of mode 0600, with 64 digits: remove it, a new one is made")
    return text.encode()


def _create(file: Path, text: str) -> None:
    """Create a file atomically. If two nodes do so at once, the first one's file stays."""
    file.parent.mkdir(parents=True, exist_ok=True)
    own = file.with_name(f"{file.name}.{secrets.token_hex(8)}")
    with open(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        opened.write(text)
    try:
        with contextlib.suppress(FileExistsError):
            os.link(own, file)
    finally:
        own.unlink()


def _challenge(peer: socket.socket, secret: bytes) -> bytes | None:
    """Check that a client knows the secret, and return the proof that this side does. None if the client does not."""
    deadline, nonce = time.monotonic() + _PROVE_SECONDS, secrets.token_bytes(_NONCE_BYTES)
    peer.settimeout(_PROVE_SECONDS)
    peer.sendall(_GREETING + nonce)
    theirs = _exactly(peer, _NONCE_BYTES, deadline)
    if not hmac.compare_digest(_exactly(peer, _PROOF_BYTES, deadline), _proof(secret, b"client", nonce + theirs)):
        return None
    return _proof(secret, b"server", nonce + theirs)


def _prove(peer: socket.socket, secret: bytes) -> None:
    """Answer `_challenge` as a client. Raises `ValueError` or `OSError` unless the server also knows the secret."""
    deadline = time.monotonic() + _PROVE_SECONDS
    if (greeting := _exactly(peer, len(_GREETING), deadline)) != _GREETING:
        raise ValueError(f"its first message is {greeting!r}")
    theirs, nonce = _exactly(peer, _NONCE_BYTES, deadline), secrets.token_bytes(_NONCE_BYTES)
    peer.sendall(nonce + _proof(secret, b"client", theirs + nonce))
    if not hmac.compare_digest(_exactly(peer, _PROOF_BYTES, deadline), _proof(secret, b"server", theirs + nonce)):
        raise ValueError("its proof is wrong")


def _proof(secret: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, _GREETING + role + nonces, "sha256")


def _send(peer: socket.socket, message: object) -> None:
    text = json.dumps({"answer": message} if not isinstance(message, dict) else message).encode()
    peer.sendall(len(text).to_bytes(8, "big") + text)


def _receive(peer: socket.socket) -> dict[str, Any] | None:
    """Return the next message, or None if the peer has left. Raises `ValueError` if it is too long or not JSON."""
    try:
        size = int.from_bytes(_exactly(peer, 8), "big")
    except ConnectionError:
        return None
    if size > _MOST_BYTES:
        raise ValueError(f"a message of {size} bytes: expected at most {_MOST_BYTES}")
    message = json.loads(_exactly(peer, size))
    if not isinstance(message, dict):
        raise ValueError(f"a message that is a {type(message).__name__}")
    return message


def _exactly(peer: socket.socket, size: int, deadline: float | None = None) -> bytes:
    """Return exactly `size` bytes from `peer`.

    Raises `ConnectionResetError` if the peer disconnects before. Raises `TimeoutError` if they are not there by
    `deadline`, or, without a deadline, if nothing arrives within the socket's timeout.
    """
    parts = bytearray()
    while len(parts) < size:
        try:
            if deadline is not None:
                _wait_until(peer, deadline)
            part = peer.recv(min(size - len(parts), 2**20))
        except TimeoutError as error:
            raise TimeoutError(f"{len(parts)} of {size} bytes came in time") from error
        if not part:
            raise ConnectionResetError("it has closed the connection")
        parts += part
    return bytes(parts)


def _wait_until(peer: socket.socket, deadline: float) -> None:
    """Have `peer` wait until `deadline` at most. Raises `TimeoutError` where that has passed."""
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    peer.settimeout(left)


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
