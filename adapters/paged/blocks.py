"""Give out the blocks of a KV cache: who owns each, and which hold the start of a known sequence."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


class BlockPool:
    """Blocks by number. A block may have several owners, who then must not write to it."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._owners = [0] * num_blocks
        self._free = dict.fromkeys(range(num_blocks))  # in the order in which they are taken
        self._key_of, self._block_of = dict[int, bytes](), dict[bytes, int]()

    @property
    def num_free(self) -> int:
        """Blocks without an owner."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks with an owner."""
        return len(self._owners) - len(self._free)

    def is_shared(self, block: int) -> bool:
        """Return whether a block has several owners."""
        return self._owners[block] > 1

    def take(self) -> int:
        """Return a block that nobody owns, and forget what it held. The one that was freed first goes first."""
        block: int = next(iter(self._free))
        self.share(block)
        if (key := self._key_of.pop(block, None)) is not None:
            del self._block_of[key]
        return block

    def share(self, block: int) -> int:
        """Give a block one more owner. Returns it."""
        self._free.pop(block, None)
        self._owners[block] += 1
        return block

    def release(self, block: int) -> None:
        """Take an owner from a block. A block without owners keeps its contents until it is taken."""
        self._owners[block] -= 1
        if self._owners[block] == 0:
            self._free[block] = None

    def keys(self, tokens: Sequence[int]) -> list[bytes]:
        """Return a key for each full block of a sequence: a hash of its tokens and of all that come before it."""
        keys, before = list[bytes](), b""
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            held = ",".join(map(str, tokens[start : start + self.block_size]))
            before = hashlib.sha256(before + held.encode()).digest()
            keys.append(before)
        return keys

    def remember(self, block: int, key: bytes) -> None:
        """Note that a full block holds what `key` stands for."""
        if key not in self._block_of and block not in self._key_of:
            self._key_of[block], self._block_of[key] = key, block

    def find(self, key: bytes) -> int | None:
        """Return the block that holds what `key` stands for, or None."""
        return self._block_of.get(key)
