"""Memory of a KV cache that holds nothing, and what sharing saves, read from an engine's own pool of blocks.

PagedAttention (arXiv:2309.06180, section 6.2 and figure 2) puts the waste of blocks under 4 %, where one contiguous
reservation for each sequence of the longest length wastes most of the memory.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from meshmark.inference.clauses import Serves
from meshmark.inference.contract import EngineOptions, Request, Served
from meshmark.inference.model import Shape, prompts

MEAN_PROMPT, MEAN_NEW, LIMIT = 161, 338, 2048
"""Mean tokens of prompts and of completions in the paper's ShareGPT load (section 6.1), and of the longest sequence."""
NUM_REQUESTS = 32
PREFIX, OWN, NEW, COPIES, SHARING_REQUESTS = 128, 33, 64, 4, 8


def waste_options(block_size: int, prefix_caching: bool = False) -> EngineOptions:
    """Return options by which no request waits, and no prompt is computed in chunks."""
    return EngineOptions(
        block_size=block_size,
        num_blocks=2 * NUM_REQUESTS * (MEAN_PROMPT + MEAN_NEW) // block_size,
        prefix_caching=prefix_caching,
        max_batch=NUM_REQUESTS,
        max_step_tokens=16384,
        context_limit=LIMIT,
    )


def load(number: int = NUM_REQUESTS, scale: float = 1.0, seed: int = 0) -> list[Request]:
    """Return requests whose lengths are exponentially distributed around the means, at once."""
    drawn = random.Random(seed)

    def length(mean: float, most: int) -> int:
        return max(1, min(most, round(drawn.expovariate(1 / (scale * mean)))))

    sizes = [(length(MEAN_PROMPT, LIMIT // 2), length(MEAN_NEW, LIMIT // 2)) for _ in range(number)]
    return [
        Request(name=f"load-{index}", prompt=prompt, max_new_tokens=new, wants_prompt=False)
        for index, (prompt, (_, new)) in enumerate(zip(prompts([size for size, _ in sizes], seed), sizes, strict=True))
    ]


@dataclass(frozen=True, kw_only=True)
class Waste:
    """The KV cache under a load: means over the engine's steps."""

    block_size: int
    reserved_bytes: float
    """Bytes of blocks with an owner."""
    used_bytes: float
    """Bytes of the keys and values that sequences need."""
    contiguous_bytes: float
    """Bytes of one reservation of `LIMIT` tokens for each sequence."""

    @property
    def waste(self) -> float:
        """Share of the reserved bytes that hold nothing."""
        return 1 - self.used_bytes / self.reserved_bytes

    @property
    def contiguous_waste(self) -> float:
        """The same of contiguous reservations."""
        return 1 - self.used_bytes / self.contiguous_bytes


def measure_waste(served: Served, block_size: int, shape: Shape, precision: str = "fp32") -> Waste:
    """Return the waste of a load that was served with `waste_options`.

    Raises `ValueError` at a step whose blocks are not those of each sequence's tokens.
    """
    steps = len(served.live_tokens)
    blocks = [sum(-(-tokens // block_size) for tokens in live) for live in served.live_tokens]
    for step, (found, expected) in enumerate(zip(served.used_blocks, blocks, strict=True)):
        if found != expected:
            raise ValueError(f"{found} blocks of {block_size} in use after step {step}, closed form {expected}")
    each, token = block_size / steps, shape.token_bytes(precision)
    return Waste(
        block_size=block_size,
        reserved_bytes=token * each * sum(served.used_blocks),
        used_bytes=token * sum(map(sum, served.live_tokens)) / steps,
        contiguous_bytes=token * LIMIT * sum(map(len, served.live_tokens)) / steps,
    )


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """Blocks in use at the peak of a load whose sequences have a common beginning."""

    kind: str
    block_size: int
    blocks: int
    closed_form: int
    unshared: int
    """Blocks of the same sequences without sharing."""

    @property
    def saved(self) -> float:
        """Share of the blocks that sharing saves."""
        return 1 - self.blocks / self.unshared


def measure_sharing(plain: Serves, prefix: Serves, block_size: int) -> Iterator[Sharing]:
    """Serve parallel samples on an engine, and prompts with one beginning on another that has a prefix cache."""
    length = PREFIX + OWN
    each = -(-(length + NEW - 1) // block_size)
    asked = {"max_new_tokens": NEW, "wants_prompt": False}
    samples = [
        Request(name=f"s{i}", prompt=p, copies=COPIES, temperature=1.0, seed=100 * i, **asked)  # type: ignore[arg-type]
        for i, p in enumerate(prompts([length] * SHARING_REQUESTS, seed=10))
    ]
    begin = prompts([PREFIX], seed=11)[0]
    alike = [
        Request(name=f"p{i}", prompt=(*begin, *own), arrives=2 * (i > 0), **asked)  # type: ignore[arg-type]
        for i, own in enumerate(prompts([OWN] * NUM_REQUESTS, seed=12))
    ]
    common = length // block_size
    yield Sharing(
        kind=f"{SHARING_REQUESTS} prompts, {COPIES} samples of each",
        block_size=block_size,
        blocks=max(plain.serve(samples).used_blocks),
        closed_form=SHARING_REQUESTS * (common + COPIES * (each - common)),
        unshared=SHARING_REQUESTS * COPIES * each,
    )
    common = PREFIX // block_size
    yield Sharing(
        kind=f"{NUM_REQUESTS} prompts, {PREFIX} of their {length} tokens alike",
        block_size=block_size,
        blocks=max(prefix.serve(alike).used_blocks),
        closed_form=common + NUM_REQUESTS * (each - common),
        unshared=NUM_REQUESTS * each,
    )
