"""Schedule requests on a paged KV cache: continuous batching, prefill in chunks, shared blocks, eviction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from meshmark.adapters.paged.blocks import BlockPool
from meshmark.adapters.paged.model import Batch, PagedLlama, Span
from meshmark.adapters.paged.ranks import Ranks
from meshmark.inference.contract import CacheUse, Emitted, Engine, EngineOptions, Request


@dataclass(kw_only=True, eq=False)
class Sample:
    """One sequence: a prompt and what was generated so far."""

    request: Request
    copy: int
    tokens: list[int]
    computed: int = 0
    """Tokens whose keys and values are in the cache."""
    blocks: list[int] = field(default_factory=list)
    draws: torch.Generator | None = None
    prompt_logprobs: list[float] = field(default_factory=list)
    waits_for_copies: bool = False
    """True until the prompt is computed, if parallel samples or beams are to follow it."""
    logprobs: list[float] = field(default_factory=list)
    """Log probabilities of the tokens that a beam has generated."""
    row: Tensor | None = None
    """Log probabilities of a beam's next token, until all beams of its request have theirs."""

    @property
    def size(self) -> int:
        """Sequences that this one stands for in a batch."""
        return self.request.num_sequences if self.waits_for_copies else 1


class PagedEngine(Engine):
    """The engine. Requests run in the order in which they came; the last to come is evicted first."""

    model_type: ClassVar[type[PagedLlama]] = PagedLlama
    pool_type: ClassVar[type[BlockPool]] = BlockPool

    def __init__(self, model: Path, options: EngineOptions) -> None:
        self.options = options
        self.pool = self.pool_type(options.num_blocks, options.block_size)
        self._ranks = Ranks(self.model_type, model, options)
        self._waiting, self._running = list[Sample](), list[Sample]()
        self._copies = list[tuple[int, int]]()
        self._preemptions = self._cached = 0

    def submit(self, request: Request) -> None:
        limit, vocabulary = self.options.context_limit, self._ranks.model.config["vocab_size"]
        if not 0 < len(request.prompt) < limit:
            raise ValueError(f"a prompt of {len(request.prompt)} tokens; expected 1 to {limit - 1}")
        if not 0 <= min(request.prompt) <= max(request.prompt) < vocabulary:
            wrong = next(token for token in request.prompt if not 0 <= token < vocabulary)
            raise ValueError(f"token {wrong} is not in the vocabulary of {vocabulary}")
        if request.beams > 1 and (request.temperature or request.stop or request.copies > 1):
            raise ValueError("beams with a temperature, stop tokens or copies; expected none of them")
        needed = request.beams * self._blocks_for(min(limit, len(request.prompt) + request.max_new_tokens - 1))
        if needed > self.options.num_blocks:
            raise ValueError(f"a request that needs {needed} blocks; the cache has {self.options.num_blocks}")
        sample = Sample(
            request=request, copy=0, tokens=list(request.prompt), waits_for_copies=request.num_sequences > 1
        )
        sample.draws = self.draws(request, 0)
        self._waiting.append(sample)

    def draws(self, request: Request, copy: int) -> torch.Generator | None:
        """Return the random numbers of one sample, or None for the most probable tokens."""
        return torch.Generator().manual_seed((request.seed or 0) + copy) if request.temperature else None

    def step(self, emit: Callable[[Emitted], None]) -> None:
        chosen = self._schedule()
        spans = tuple(
            Span(
                tokens=tuple(sample.tokens[sample.computed : sample.computed + count]),
                start=sample.computed,
                blocks=tuple(sample.blocks),
                all_rows=sample.request.wants_prompt and sample.computed < len(sample.request.prompt),
            )
            for sample, count in chosen
        )
        copies, self._copies = tuple(self._copies), []
        found = self._ranks.logprobs(Batch(spans=spans, copies=copies))
        for (sample, count), rows in zip(chosen, found, strict=True):
            self._note_prompt(sample, rows)
            sample.computed += count
            self.remember(sample)
            if sample.computed == len(sample.tokens):
                if sample.request.beams > 1:
                    sample.row = rows[-1]
                    self._advance_beams(sample.request, emit)
                    continue
                forks = self.fork(sample) if sample.waits_for_copies else []
                for each in (sample, *forks):
                    self._advance(each, rows[-1], emit)

    # --- What runs, and in which blocks.

    def _schedule(self) -> list[tuple[Sample, int]]:
        """Return the sequences of a step and how many tokens of each are computed."""
        chosen, budget, evicted = list[tuple[Sample, int]](), self.options.max_step_tokens, False
        for sample in tuple(self._running):
            count = min(len(sample.tokens) - sample.computed, budget)
            while sample in self._running and not self._reserve(sample, count):
                self.evict(self._running.pop())
                evicted = True
            if count and sample in self._running:
                chosen.append((sample, count))
                budget -= count
        while self._waiting and budget and not evicted:
            sample = self._waiting[0]
            if sum(each.size for each in self._running) + sample.size > max(self.options.max_batch, sample.size):
                break
            self._reuse(sample)
            count = min(len(sample.tokens) - sample.computed, budget)
            if not self._reserve(sample, count):
                self.release(sample)
                break
            self._cached += min(sample.computed, len(sample.request.prompt))
            self._running.append(self._waiting.pop(0))
            chosen.append((sample, count))
            budget -= count
        return chosen

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.options.block_size)

    def _reserve(self, sample: Sample, count: int) -> bool:
        """Give a sequence blocks of its own for its next tokens. Returns False if there are too few."""
        first = sample.computed // self.options.block_size
        shared = self.shared(sample, first) if count else []
        new = self._blocks_for(sample.computed + count) - len(sample.blocks)
        if len(shared) + new > self.pool.num_free:
            return False
        for index in shared:
            old, sample.blocks[index] = sample.blocks[index], self.pool.take()
            self._copies.append((old, sample.blocks[index]))
            self.pool.release(old)
        sample.blocks += [self.pool.take() for _ in range(new)]
        return True

    def shared(self, sample: Sample, first: int) -> list[int]:
        """Return the indices of blocks from `first` on that others own too: they are copied before a write."""
        return [i for i in range(first, len(sample.blocks)) if self.pool.is_shared(sample.blocks[i])]

    def _reuse(self, sample: Sample) -> None:
        """Begin a sequence with blocks that hold its first tokens already, all but the last token at most."""
        if self.options.prefix_caching and not sample.request.wants_prompt:
            for key in self.pool.keys(sample.tokens[:-1]):
                if (block := self.pool.find(key)) is None:
                    break
                sample.blocks.append(self.pool.share(block))
            sample.computed = len(sample.blocks) * self.options.block_size

    def remember(self, sample: Sample) -> None:
        """Make a sequence's full blocks known by what they hold."""
        if self.options.prefix_caching:
            for block, key in zip(sample.blocks, self.pool.keys(sample.tokens[: sample.computed]), strict=False):
                self.pool.remember(block, key)

    def fork(self, sample: Sample) -> list[Sample]:
        """Return the other parallel samples of a computed prompt, which share its blocks."""
        sample.waits_for_copies = False
        forks = [
            Sample(
                request=sample.request,
                copy=copy,
                tokens=list(sample.tokens),
                computed=sample.computed,
                blocks=[self.pool.share(block) for block in sample.blocks],
                draws=self.draws(sample.request, copy),
                prompt_logprobs=list(sample.prompt_logprobs),
            )
            for copy in range(1, sample.request.copies)
        ]
        at = self._running.index(sample) + 1
        self._running[at:at] = forks
        return forks

    def evict(self, sample: Sample) -> None:
        """Take a sequence's blocks away. It is computed again, with what it has generated, when there is room."""
        self._preemptions += 1
        sample.row = None
        self.release(sample)
        self._waiting.insert(0, sample)

    def release(self, sample: Sample) -> None:
        """Give up all blocks of a sequence."""
        for block in sample.blocks:
            self.pool.release(block)
        sample.blocks, sample.computed = [], 0

    # --- What comes out.

    def _note_prompt(self, sample: Sample, rows: Tensor) -> None:
        """Keep log probabilities of the prompt's next tokens, given the rows after the tokens that were computed."""
        if sample.request.wants_prompt:
            known = len(sample.prompt_logprobs)  # more than what is computed, if the sequence was evicted
            told = sample.request.prompt[known + 1 : sample.computed + 1 + len(rows)]
            new = rows[known - sample.computed :]
            sample.prompt_logprobs += [float(row[token]) for row, token in zip(new, told, strict=False)]

    def _advance(self, sample: Sample, row: Tensor, emit: Callable[[Emitted], None]) -> None:
        """Choose a sequence's next token, and end the sequence if it is the last."""
        request, is_first = sample.request, len(sample.tokens) == len(sample.request.prompt)
        token = self.choose(sample, row)
        sample.tokens.append(token)
        finish = self.finish(sample)
        emit(
            Emitted(
                request=request.name,
                copy=sample.copy,
                tokens=(token,),
                logprobs=(float(row[token]),),
                prompt_logprobs=tuple(sample.prompt_logprobs) if is_first and request.wants_prompt else None,
                finish=finish,
            )
        )
        if finish:
            self._running.remove(sample)
            self.release(sample)

    def _advance_beams(self, request: Request, emit: Callable[[Emitted], None]) -> None:
        """Choose the next tokens of a request's beams, once each has its log probabilities."""
        beams = [each for each in (*self._running, *self._waiting) if each.request is request]
        if any(beam.row is None for beam in beams):
            return
        chosen = [
            Sample(
                request=request,
                copy=copy,
                tokens=[*parent.tokens, token],
                computed=parent.computed,
                blocks=[self.pool.share(block) for block in parent.blocks],
                logprobs=[*parent.logprobs, logprob],
            )
            for copy, (parent, token, logprob) in enumerate(self.best(beams, request.beams))
        ]
        at = min(self._running.index(beam) for beam in beams)
        for beam in beams:
            self._running.remove(beam)
            self.release(beam)
        finish = self.finish(chosen[0])
        for beam in chosen:
            if finish:
                generated = tuple(beam.tokens[len(request.prompt) :])
                emit(
                    Emitted(
                        request=request.name,
                        copy=beam.copy,
                        tokens=generated,
                        logprobs=tuple(beam.logprobs),
                        finish=finish,
                    )
                )
                self.release(beam)
        if not finish:
            self._running[at:at] = chosen

    def best(self, beams: list[Sample], count: int) -> list[tuple[Sample, int, float]]:
        """Return the `count` most probable continuations of beams by a token: beam, token and its log probability."""
        scores = torch.stack([sum(beam.logprobs) + beam.row.double() for beam in beams])  # type: ignore[union-attr]
        order = scores.flatten().topk(count).indices.tolist()
        pairs = [divmod(index, scores.shape[1]) for index in order]
        return [(beams[beam], token, float(beams[beam].row[token])) for beam, token in pairs]

    def choose(self, sample: Sample, row: Tensor) -> int:
        """Return a sequence's next token, from log probabilities of shape (vocabulary,)."""
        if sample.draws is None:
            return int(row.argmax())
        return int(torch.multinomial((row / sample.request.temperature).softmax(-1), 1, generator=sample.draws))

    def finish(self, sample: Sample) -> str:
        """Return why a sequence ends with its last token, or an empty text."""
        request = sample.request
        if sample.tokens[-1] in request.stop:
            return "stop"
        limit = min(len(request.prompt) + request.max_new_tokens, self.options.context_limit)
        return "length" if len(sample.tokens) >= limit else ""

    # --- What Meshmark asks.

    def is_busy(self) -> bool:
        return bool(self._waiting or self._running)

    def used_blocks(self) -> int:
        return self.pool.num_used

    def cache(self) -> CacheUse:
        return CacheUse(
            block_size=self.options.block_size,
            num_blocks=self.options.num_blocks,
            bytes_by_rank=self._ranks.cache_bytes,
        )

    def preemptions(self) -> int:
        return self._preemptions

    def cached_tokens(self) -> int:
        return self._cached

    def close(self) -> None:
        self._ranks.close()
