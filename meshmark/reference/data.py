"""Real text, and the global batches cut from it.

A batch is a function of (seed, step) alone: every rank builds the whole of it and trains on its part, so that no
layout can see other data than another. Shape suffixes: B sequences, T tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshmark.errors import CorpusError
from meshmark.reference.initial import random_bits
from meshmark.spec.workload import Workload

IGNORED = -100
"""Target of a masked position; `torch.nn.functional.cross_entropy` leaves it out by default."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Some sequences of one global batch."""

    tokens_BT: Tensor
    """int64 inputs."""
    targets_BT: Tensor
    """int64 next tokens; `IGNORED` where masked."""
    num_tokens: int
    """Unmasked targets of the *global* batch, whichever part of it this is: what the loss is the mean over."""
    skipped_block: int | None = None
    """A block of the model that this step leaves out."""

    def rows(self, start: int, stop: int) -> Batch:
        return dataclasses.replace(self, tokens_BT=self.tokens_BT[start:stop], targets_BT=self.targets_BT[start:stop])

    def shard(self, rank: int, num_ranks: int) -> Batch:
        """The sequences of data-parallel `rank`: a contiguous 1/num_ranks of them."""
        size = len(self.tokens_BT) // num_ranks
        return self.rows(rank * size, (rank + 1) * size)

    def micro_batches(self, count: int) -> Iterator[Batch]:
        for i in range(count):
            yield self.shard(i, count)

    def to(self, device: torch.device) -> Batch:
        return dataclasses.replace(self, tokens_BT=self.tokens_BT.to(device), targets_BT=self.targets_BT.to(device))


def standard_text() -> bytes:
    """The documentation topics inside Python's standard library: English text of some 470 kB on every machine."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics)).encode()


def read_corpus(path: str | None) -> bytes:
    """The bytes to train on. Raises `CorpusError` when the file is missing, unreadable or empty."""
    if path is None:
        return standard_text()
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise CorpusError(f"corpus {path!r} cannot be read: {error.strerror}; name an existing file") from error
    if not text:
        raise CorpusError(f"corpus {path!r} is empty; name a file with text in it")
    return text


@functools.lru_cache(maxsize=2)
def load_corpus(path: str | None, at_least: int) -> Tensor:
    """The corpus as uint8 [number of bytes]. Raises `CorpusError` when it is shorter than `at_least` bytes."""
    text = read_corpus(path)
    if len(text) < at_least:
        raise CorpusError(f"corpus {path!r} has {len(text)} bytes; one sequence takes {at_least}: name a longer file")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def on_corpus(workload: Workload, path: str | None) -> Workload:
    """`workload` on the text at `path`, named after it: its file's stem, in characters that need no quotes in a shell,
    and a digest of its bytes, for two texts may share a name. Raises `CorpusError` when it cannot be read."""
    if path is None:
        return workload
    stem = re.sub(r"[^A-Za-z0-9]+", "_", Path(path).stem).strip("_")[:20]
    digest = hashlib.sha256(read_corpus(path)).hexdigest()[:8]
    name = ".".join(part for part in (workload.name, stem, digest) if part)
    return dataclasses.replace(workload, name=name, corpus=path)


def _uniform(name: str, count: int, bound: int, *, seed: int) -> Tensor:
    """`count` integers in [0, bound), int64 [count], by (seed, name) alone."""
    return (random_bits(name, (count,), seed=seed) & (2**63 - 1)).remainder(bound)


def check_corpus(workload: Workload) -> None:
    """Raise `CorpusError` now rather than in every rank, when the workload's corpus or vocabulary cannot serve."""
    load_corpus(workload.corpus, workload.model.seq_len + 1)
    if workload.model.vocab_size < 256:
        raise CorpusError(
            f"model {workload.model.name!r} has a vocabulary of {workload.model.vocab_size}; byte-level data needs 256"
        )


def make_batch(workload: Workload, step: int) -> Batch:
    """Global batch `step` of a workload, on the CPU: tokens and targets [global_batch, seq_len].

    With `masked`, each sequence keeps a random 1/4 to all of its targets, so that token counts differ between rows.
    """
    B, T = workload.global_batch, workload.model.seq_len
    corpus = load_corpus(workload.corpus, T + 1)
    start_B = _uniform(f"offsets/{step}", B, len(corpus) - T, seed=workload.seed)
    window_BT = corpus[start_B[:, None] + torch.arange(T + 1)].long()
    targets_BT = window_BT[:, 1:].clone()
    if workload.masked:
        length_B = T // 4 + _uniform(f"lengths/{step}", B, T - T // 4 + 1, seed=workload.seed)
        targets_BT[torch.arange(T) >= length_B[:, None]] = IGNORED
    return Batch(
        tokens_BT=window_BT[:, :-1].contiguous(),
        targets_BT=targets_BT,
        num_tokens=int((targets_BT != IGNORED).sum()),
        skipped_block=workload.skipped_at(step),
    )
