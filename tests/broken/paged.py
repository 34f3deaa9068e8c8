"""The paged engine with one defect each: what the inference suite must catch."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshmark.adapters.paged import Paged
from meshmark.adapters.paged.blocks import BlockPool
from meshmark.adapters.paged.engine import PagedEngine, Sample
from meshmark.adapters.paged.model import Batch, PagedLlama, Span
from meshmark.inference.contract import Emitted, Engine, EngineOptions, Request
from meshmark.inference.quantized import unpack


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedMutant:
    """One defect, and the variant of the suite that is sure to show it."""

    name: str
    text: str
    variant: str = "plain"
    tp: int = 1
    precision: str = "fp32"
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Methods of `PagedLlama` that are replaced."""
    pool: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    engine: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def target(self) -> str:
        """The adapter, as "module:Class"."""
        return f"{__name__}:{self.name}"


# --- The model: positions, cache, attention, ranks.


def _positions_after_a_block(self: PagedLlama, span: Span) -> Tensor:
    where = PagedLlama.positions(self, span)
    return where + (where >= self._block_size)


def _positions_after_eviction(self: PagedLlama, span: Span) -> Tensor:
    """A chunk that begins anew in a long sequence is turned from 1 on."""
    return PagedLlama.positions(self, span) + (1 if span.start == 0 and len(span.blocks) == 3 else 0)


def _positions_stop(self: PagedLlama, span: Span) -> Tensor:
    return PagedLlama.positions(self, span).clamp(max=127)


def _write_one_late(self: PagedLlama, layer: int, span: Span, k: Tensor, v: Tensor) -> None:
    """Values of the first token of each block are not written: what lay there before stays."""
    old = self.cache[layer, 1, span.blocks[-1], 0].clone()
    PagedLlama.write(self, layer, span, k, v)
    if span.start and span.start % self._block_size == 0 and len(span.tokens) == 1:
        self.cache[layer, 1, span.blocks[-1], 0] = old


def _scale_of_hidden(self: PagedLlama) -> float:
    return float((self.config["hidden_size"] / self.config["num_attention_heads"]) ** -0.5)


def _other_kv_head(self: PagedLlama, held: Tensor) -> Tensor:
    return held.repeat(1, 1, self.heads // self.kv_heads, 1)


def _attend(self: PagedLlama, layer: int, span: Span, q: Tensor, mask: Tensor) -> Tensor:
    end = span.start + len(span.tokens)
    held = self.cache[layer][:, torch.tensor(span.blocks)].flatten(1, 2)[:, :end].to(self.dtype)
    k, v = self.spread(held).transpose(1, 2)
    out: Tensor = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], attn_mask=mask, scale=self.scale
    )
    return out[0].transpose(0, 1)


def _mask_one_too_far(self: PagedLlama, layer: int, span: Span, q: Tensor) -> Tensor:
    """In every chunk but the first, a token sees the next one."""
    end = span.start + len(span.tokens)
    after = torch.arange(span.start, end)[:, None] + (span.start > 0)
    return _attend(self, layer, span, q, torch.arange(end) <= after)


def _forgets_first_block(self: PagedLlama, layer: int, span: Span, q: Tensor) -> Tensor:
    """Ignore the first block of a sequence with more than six."""
    end = span.start + len(span.tokens)
    mask = torch.arange(end) <= torch.arange(span.start, end)[:, None]
    if len(span.blocks) > 6 and span.start:
        mask[:, : self._block_size] = False
    return _attend(self, layer, span, q, mask)


def _one_reduction_missing(self: PagedLlama, x: Tensor, layer: int, part: str) -> Tensor:
    return x if (layer, part) == (self.num_layers - 1, "mlp") else PagedLlama.reduce(self, x, layer, part)


def _reduces_the_mean(self: PagedLlama, x: Tensor, layer: int, part: str) -> Tensor:
    if (layer, part) == (0, "attention"):
        dist.all_reduce(x)
        return x / self.tp
    return PagedLlama.reduce(self, x, layer, part)


def _rows_mixed(self: PagedLlama, batch: Batch) -> list[Tensor]:
    """Where a request joins others that decode, the rows of two of them change places."""
    found = PagedLlama.logprobs(self, batch)
    decoding = [i for i, span in enumerate(batch.spans) if span.start and len(span.tokens) == 1]
    if len(decoding) > 1 and len(decoding) < len(batch.spans):
        found[decoding[0]], found[decoding[1]] = found[decoding[1]], found[decoding[0]]
    return found


def _no_copies(self: PagedLlama, batch: Batch) -> list[Tensor]:
    return PagedLlama.logprobs(self, dataclasses.replace(batch, copies=()))


def _truncates(self: PagedLlama, x: Tensor) -> Tensor:
    """Round towards zero where the cache is narrower."""
    nearest = PagedLlama.narrow(self, x)
    return torch.where(nearest.float().abs() > x.abs(), nearest.float() * (1 - 2.0**-4), nearest.float()).to(
        self.cache.dtype
    )


def _truncates_chunks(self: PagedLlama, layer: int, span: Span, k: Tensor, v: Tensor) -> None:
    """Round keys and values of a prompt's later chunks towards zero."""
    if span.start and len(span.tokens) > 1:
        k, v = (_truncates(self, x).float() for x in (k, v))
    PagedLlama.write(self, layer, span, k, v)


def _other_format(self: PagedLlama, x: Tensor) -> Tensor:
    return x.to(torch.float8_e5m2).to(self.cache.dtype)


def _weight_of_next_scale(self: PagedLlama, name: str) -> Tensor:
    """The groups of one layer's first output have one another's scales."""
    weight = PagedLlama.weight(self, name)
    scale = self._weights.get(name + ".weight_scale")
    if scale is not None and name.endswith("0.mlp.down_proj"):
        groups = weight.view(*scale.shape, -1)
        groups[0] *= (scale.roll(1, -1) / scale)[0][:, None]
    return weight


def _weight_of_offset(self: PagedLlama, name: str) -> Tensor:
    """Numbers of one layer are one too large."""
    weight = PagedLlama.weight(self, name)
    scale = self._weights.get(name + ".weight_scale")
    if scale is not None and name.endswith("1.self_attn.v_proj"):
        weight = (weight.view(*scale.shape, -1) + scale[..., None]).view(weight.shape)
    return weight


def _lowest_code_is_next(self: PagedLlama, name: str) -> Tensor:
    """The lowest code of 4 bits, which has no positive counterpart, is taken for the next one."""
    packed, scale = (self._weights.get(f"{name}.weight_{part}") for part in ("packed", "scale"))
    if packed is None or scale is None:
        return PagedLlama.weight(self, name)
    codes = unpack(packed, self._weight_bits).clamp(min=1 - 2 ** (self._weight_bits - 1)).to(self.dtype)
    return (codes.view(*scale.shape, -1) * scale[..., None]).view(len(codes), -1)


# --- Blocks.


def _take_keeps_key(self: BlockPool) -> int:
    block: int = next(iter(self._free))
    return self.share(block)


def _keys(tokens: Sequence[int], size: int, key: Callable[[bytes, Sequence[int]], bytes]) -> list[bytes]:
    keys, before = list[bytes](), b""
    for start in range(0, len(tokens) - size + 1, size):
        before = key(before, tokens[start : start + size])
        keys.append(before)
    return keys


def _keys_without_what_came_before(self: BlockPool, tokens: Sequence[int]) -> list[bytes]:
    return _keys(tokens, self.block_size, lambda before, held: hashlib.sha256(str(list(held)).encode()).digest())


def _keys_of_any_order(self: BlockPool, tokens: Sequence[int]) -> list[bytes]:
    return _keys(tokens, self.block_size, lambda before, held: before + str(sum(held)).encode() + b",")


def _keys_of_last_token(self: BlockPool, tokens: Sequence[int]) -> list[bytes]:
    return _keys(tokens, self.block_size, lambda before, held: before + str(held[1:]).encode())


def _keys_without_last_tokens(self: BlockPool, tokens: Sequence[int]) -> list[bytes]:
    return _keys(tokens, self.block_size, lambda before, held: before + str(held[:-1]).encode())


def _keys_of_third_blocks_alone(self: BlockPool, tokens: Sequence[int]) -> list[bytes]:
    right = BlockPool.keys(self, tokens)
    return [*right[:2], *_keys_without_what_came_before(self, tokens)[2:]]


def _release_twice(self: BlockPool, block: int) -> None:
    """A block that several own is free when the first gives it up."""
    self._owners[block] = 0
    self._free[block] = None


def _never_release_shared(self: BlockPool, block: int) -> None:
    if self._owners[block] > 1:
        return
    BlockPool.release(self, block)


# --- The engine.


def _remember_too_much(self: PagedEngine, sample: Sample) -> str:
    """A block is known once its last token is chosen, before that token's keys are computed."""
    if self.options.prefix_caching:
        for block, key in zip(sample.blocks, self.pool.keys(sample.tokens), strict=False):
            self.pool.remember(block, key)
    return PagedEngine.finish(self, sample)


def _reuse_last_partial(self: PagedEngine, sample: Sample) -> None:
    """One token more than what blocks hold counts as computed."""
    PagedEngine._reuse(self, sample)
    if sample.computed and sample.computed < len(sample.tokens) - 1:
        sample.blocks += [self.pool.take()] if self.pool.num_free else []
        sample.computed += len(sample.blocks) * self.options.block_size > sample.computed


def _shares_written_blocks(self: PagedEngine, sample: Sample, first: int) -> list[int]:
    return []


def _fork_copies_all(self: PagedEngine, sample: Sample) -> list[Sample]:
    """Parallel samples have blocks of their own for the whole prompt."""
    forks = PagedEngine.fork(self, sample)
    for fork in forks:
        for index, block in enumerate(fork.blocks):
            if self.pool.num_free:
                fork.blocks[index] = self.pool.take()
                self._copies.append((block, fork.blocks[index]))
                self.pool.release(block)
    return forks


def _release_early(self: PagedEngine, sample: Sample, row: Tensor, emit: Callable[[Emitted], None]) -> None:
    """A sequence's first block is given up one token before its end, for others to take."""
    PagedEngine._advance(self, sample, row, emit)
    left = sample.request.max_new_tokens - (len(sample.tokens) - len(sample.request.prompt))
    if left == 4 and len(sample.blocks) > 1:
        self.pool.release(sample.blocks[0])
        sample.blocks[0] = self.pool.share(sample.blocks[1])


def _leaks(self: PagedEngine, sample: Sample) -> None:
    """A block that was begun by the last token is not given back."""
    if sample.computed % self.options.block_size == 1 and len(sample.blocks) > 1:
        sample.blocks.pop()
    PagedEngine.release(self, sample)


def _evicts_all_but_one(self: PagedEngine, sample: Sample) -> None:
    """An evicted sequence keeps its last block."""
    if len(sample.blocks) > 2:
        sample.blocks.pop()
    PagedEngine.evict(self, sample)


def _keeps_block_of_refused(self: PagedEngine, request: Request) -> None:
    """A block is taken before the request is looked at."""
    block = self.pool.take()
    PagedEngine.submit(self, request)
    self.pool.release(block)


def _never_in_chunks(self: PagedEngine) -> list[tuple[Sample, int]]:
    given, self.options = self.options, dataclasses.replace(self.options, max_step_tokens=10**6)
    chosen = PagedEngine._schedule(self)
    self.options = given
    return chosen


def _batch_without_limit(self: PagedEngine) -> list[tuple[Sample, int]]:
    given, self.options = self.options, dataclasses.replace(self.options, max_batch=10**6)
    chosen = PagedEngine._schedule(self)
    self.options = given
    return chosen


def _no_prompt_logprobs(self: PagedEngine, sample: Sample, rows: Tensor) -> None:
    """Log probabilities of prompts are not told."""


def _one_seed(self: PagedEngine, request: Request, copy: int) -> torch.Generator | None:
    """All requests draw from one generator."""
    if not hasattr(self, "_generator"):
        self._generator = torch.Generator().manual_seed(0)  # type: ignore[attr-defined]
    return self._generator if request.temperature else None  # type: ignore[attr-defined]


def _same_seed_of_copies(self: PagedEngine, request: Request, copy: int) -> torch.Generator | None:
    return PagedEngine.draws(self, request, 0)


def _streams_change_places(self: PagedEngine, request: Request, copy: int) -> torch.Generator | None:
    """Parallel samples have one another's random numbers."""
    return PagedEngine.draws(self, request, request.copies - 1 - copy)


def _seed_and_number(self: PagedEngine, request: Request, copy: int) -> torch.Generator | None:
    """Draws depend on how many requests came before."""
    self._drawn = getattr(self, "_drawn", 0) + 1  # type: ignore[attr-defined]
    draws = PagedEngine.draws(self, request, copy)
    return draws and draws.manual_seed(draws.initial_seed() + self._drawn)  # type: ignore[attr-defined]


def _evicts_draws(self: PagedEngine, sample: Sample) -> None:
    """An evicted sequence begins its draws anew."""
    PagedEngine.evict(self, sample)
    sample.draws = self.draws(sample.request, sample.copy)


def _evicts_draws_of_copies(self: PagedEngine, sample: Sample) -> None:
    PagedEngine.evict(self, sample)
    if sample.copy:
        sample.draws = self.draws(sample.request, sample.copy)


def _evicts_scores(self: PagedEngine, sample: Sample) -> None:
    PagedEngine.evict(self, sample)
    sample.unscored = len(sample.logprobs)  # type: ignore[attr-defined]


def _best_without_evicted_scores(self: PagedEngine, beams: list[Sample], count: int) -> list[tuple[Sample, int, float]]:
    """A beam that was evicted is compared by what follows its eviction alone."""
    kept = [beam.logprobs for beam in beams]
    for beam in beams:
        beam.logprobs = beam.logprobs[getattr(beam, "unscored", 0) :]
    found = PagedEngine.best(self, beams, count)
    for beam, logprobs in zip(beams, kept, strict=True):
        beam.logprobs = logprobs
    return found


def _evicts_one_token(self: PagedEngine, sample: Sample) -> None:
    """The token that was generated last is lost with an evicted sequence's blocks, and comes again."""
    PagedEngine.evict(self, sample)
    if len(sample.tokens) > len(sample.request.prompt):
        sample.tokens.pop()


def _seeds_every_token(self: PagedEngine, sample: Sample, row: Tensor) -> int:
    """Each token is drawn with the first random numbers of its seed."""
    sample.draws = self.draws(sample.request, sample.copy)
    return PagedEngine.choose(self, sample, row)


def _temperature_of_first_token(self: PagedEngine, sample: Sample, row: Tensor) -> int:
    is_first = len(sample.tokens) == len(sample.request.prompt)
    return PagedEngine.choose(self, sample, row) if is_first else _ignores_temperature(self, sample, row)


def _temperature_of_batch(self: PagedEngine, sample: Sample, row: Tensor) -> int:
    """All that draw in a step do so at the temperature of the first of them, as if a batch had one."""
    if sample.draws is None:
        return int(row.argmax())
    others = (other.request.temperature for other in self._running if other.request.temperature)
    temperature = next(others, sample.request.temperature)
    return int(torch.multinomial((row / temperature).softmax(-1), 1, generator=sample.draws))


def _draws_for_all(self: PagedEngine, sample: Sample, row: Tensor) -> int:
    """Greedy requests are drawn where another request of the batch is."""
    if sample.draws is None and any(other.request.temperature for other in self._running):
        return int(torch.multinomial(row.softmax(-1), 1))
    return PagedEngine.choose(self, sample, row)


def _temperature_of_first_eight(self: PagedEngine, sample: Sample, row: Tensor) -> int:
    is_early = len(sample.tokens) - len(sample.request.prompt) < 8
    return PagedEngine.choose(self, sample, row) if is_early else _ignores_temperature(self, sample, row)


def _greedy_from_third_token(self: PagedEngine, sample: Sample, row: Tensor) -> int:
    """Later tokens are not drawn, as in a path that decodes several steps at once."""
    is_early = len(sample.tokens) - len(sample.request.prompt) < 2
    return PagedEngine.choose(self, sample, row) if is_early else int(row.argmax())


def _draws_of_most_probable(self: PagedEngine, sample: Sample, row: Tensor) -> int:
    """The last 5 % of the probability are never drawn, as with `top_p` 0.95, which nobody asked for."""
    if sample.draws is not None:
        ordered = (row / sample.request.temperature).softmax(-1).sort(descending=True)
        row = row.clone()
        row[ordered.indices[ordered.values.cumsum(0) - ordered.values >= 0.95]] = -torch.inf
    return PagedEngine.choose(self, sample, row)


def _ignores_temperature(self: PagedEngine, sample: Sample, row: Tensor) -> int:
    if sample.draws is None:
        return int(row.argmax())
    return int(torch.multinomial(row.softmax(-1), 1, generator=sample.draws))


def _second_best(self: PagedEngine, sample: Sample, row: Tensor) -> int:
    """The most probable token is not the one before, so that none repeats."""
    if sample.draws is None:
        best = row.topk(2).indices.tolist()
        return int(best[best[0] in sample.tokens[-2:]])
    return PagedEngine.choose(self, sample, row)


def _one_too_few(self: PagedEngine, sample: Sample) -> str:
    asked = sample.request.max_new_tokens
    is_done = asked > 16 and len(sample.tokens) >= len(sample.request.prompt) + asked - 1
    return PagedEngine.finish(self, sample) or ("length" if is_done else "")


def _no_stop(self: PagedEngine, sample: Sample) -> str:
    return "length" if PagedEngine.finish(self, sample) == "length" else ""


def _no_stop_of_draws(self: PagedEngine, sample: Sample) -> str:
    return PagedEngine.finish(self, sample) if sample.draws is None else _no_stop(self, sample)


def _no_stop_of_copies(self: PagedEngine, sample: Sample) -> str:
    return _no_stop(self, sample) if sample.copy else PagedEngine.finish(self, sample)


def _stops_by_first_alone(self: PagedEngine, sample: Sample) -> str:
    found = PagedEngine.finish(self, sample)
    return "" if found == "stop" and sample.tokens[-1] != sample.request.stop[0] else found


def _never_stops_at_once(self: PagedEngine, sample: Sample) -> str:
    is_first = len(sample.tokens) == len(sample.request.prompt) + 1
    found = PagedEngine.finish(self, sample)
    return "" if found == "stop" and is_first else found


def _stops_in_prompt(self: PagedEngine, sample: Sample) -> str:
    return "stop" if set(sample.request.stop) & set(sample.tokens) else PagedEngine.finish(self, sample)


def _one_token_more(self: PagedEngine, sample: Sample) -> str:
    asked = len(sample.request.prompt) + sample.request.max_new_tokens
    return "" if len(sample.tokens) == asked else PagedEngine.finish(self, sample)


def _no_limit(self: PagedEngine, sample: Sample) -> str:
    given = len(sample.tokens) - len(sample.request.prompt)
    if sample.tokens[-1] in sample.request.stop:
        return "stop"
    return "length" if given >= sample.request.max_new_tokens else ""


def _beams_forget(self: PagedEngine, beams: list[Sample], count: int) -> list[tuple[Sample, int, float]]:
    """Candidates are compared by their last token alone."""
    for beam in beams:
        beam.logprobs, beam.scored = [], [*getattr(beam, "scored", []), *beam.logprobs]  # type: ignore[attr-defined]
    found = PagedEngine.best(self, beams, count)
    for beam in beams:
        beam.logprobs = beam.scored  # type: ignore[attr-defined]
    return found


def _beams_alone(self: PagedEngine, beams: list[Sample], count: int) -> list[tuple[Sample, int, float]]:
    """Each beam goes on with its own best token, once there are enough."""
    if len(beams) < count:
        return PagedEngine.best(self, beams, count)
    return [PagedEngine.best(self, [beam], 1)[0] for beam in beams]


def _beams_change_blocks(self: PagedEngine, beams: list[Sample], count: int) -> list[tuple[Sample, int, float]]:
    """Two beams' blocks change places when they are chosen."""
    if len(beams) > 1:
        beams[0].blocks, beams[1].blocks = beams[1].blocks, beams[0].blocks
    return PagedEngine.best(self, beams, count)


def _takes_negative_tokens(self: PagedEngine, request: Request) -> None:
    vocabulary = self._ranks.model.config["vocab_size"]
    wrapped = tuple(token + vocabulary if -vocabulary <= token < 0 else token for token in request.prompt)
    PagedEngine.submit(self, dataclasses.replace(request, prompt=wrapped))


def _takes_prompts_without_room(self: PagedEngine, request: Request) -> None:
    given, limit = self.options, self.options.context_limit
    if len(request.prompt) == limit:
        self.options = dataclasses.replace(given, context_limit=limit + 1)
    PagedEngine.submit(self, request)
    self.options = given


def _takes_any_token(self: PagedEngine, request: Request) -> None:
    """Unknown tokens become the last one."""
    PagedEngine.submit(self, dataclasses.replace(request, prompt=tuple(min(t, 319) for t in request.prompt)))


MUTANTS: list[PagedMutant] = [
    PagedMutant(
        name="PositionsAfterBlock",
        text="positions are off by one after a block's end",
        model={"positions": _positions_after_a_block},
    ),
    PagedMutant(name="PositionsStop", text="positions stop at 127", model={"positions": _positions_stop}),
    PagedMutant(
        name="StaleSlot", text="a new block's first place keeps what lay there", model={"write": _write_one_late}
    ),
    PagedMutant(
        name="StaleKey",
        text="a block that is taken keeps the key of what it held",
        variant="all-at-once",
        pool={"take": _take_keeps_key},
    ),
    PagedMutant(
        name="WrongWidth", text="scores scaled by the wrong width", model={"scale": property(_scale_of_hidden)}
    ),
    PagedMutant(name="WrongKVHead", text="heads read another KV head", model={"spread": _other_kv_head}),
    PagedMutant(
        name="MaskTooFar",
        text="in later chunks a token sees the next",
        variant="chunked",
        model={"attend": _mask_one_too_far},
    ),
    PagedMutant(
        name="ForgetsFirstBlock", text="of more than 6 blocks the first is lost", model={"attend": _forgets_first_block}
    ),
    PagedMutant(
        name="LastReductionMissing",
        text="the last reduction over tp ranks is missing",
        tp=2,
        model={"reduce": _one_reduction_missing},
    ),
    PagedMutant(name="ReducesMean", text="one reduction takes the mean", tp=2, model={"reduce": _reduces_the_mean}),
    PagedMutant(name="RowsMixed", text="rows change places when a request arrives", model={"logprobs": _rows_mixed}),
    PagedMutant(
        name="KeyWithoutPast",
        text="a block's key leaves out what came before",
        variant="prefix",
        pool={"keys": _keys_without_what_came_before},
    ),
    PagedMutant(
        name="KeyOfSum",
        text="two prompts with one key: the sum of tokens",
        variant="prefix",
        pool={"keys": _keys_of_any_order},
    ),
    PagedMutant(
        name="KeyWithoutLast",
        text="two prompts with one key: all tokens but the last of a block",
        variant="prefix",
        pool={"keys": _keys_without_last_tokens},
    ),
    PagedMutant(
        name="KeyOfThirdAlone",
        text="from the third block on, a block's key leaves out what came before",
        variant="prefix",
        pool={"keys": _keys_of_third_blocks_alone},
    ),
    PagedMutant(
        name="OneTooFew",
        text="long completions end a token early",
        variant="prefix",
        engine={"finish": _one_too_few},
    ),
    PagedMutant(
        name="KeyWithoutFirst",
        text="two prompts with one key: all tokens but the first",
        variant="prefix",
        pool={"keys": _keys_of_last_token},
    ),
    PagedMutant(
        name="KnownTooEarly",
        text="a block is known before its last token is computed",
        variant="prefix",
        engine={"finish": _remember_too_much},
    ),
    PagedMutant(
        name="PartialBlockCounts",
        text="one token of the block after the known ones counts as computed",
        variant="prefix",
        engine={"_reuse": _reuse_last_partial},
    ),
    PagedMutant(
        name="FreedByFirst", text="a shared block is free when its first owner ends", pool={"release": _release_twice}
    ),
    PagedMutant(
        name="FreedEarly", text="a block is freed before its sequence ends", engine={"_advance": _release_early}
    ),
    PagedMutant(name="Leak", text="a block that the last token began is not freed", engine={"release": _leaks}),
    PagedMutant(name="SharedLeak", text="shared blocks are not freed", pool={"release": _never_release_shared}),
    PagedMutant(
        name="WritesShared",
        text="parallel samples write to one block",
        engine={"shared": _shares_written_blocks},
    ),
    PagedMutant(
        name="CopyForgotten", text="copy-on-write takes a block but copies nothing", model={"logprobs": _no_copies}
    ),
    PagedMutant(name="SharesNothing", text="parallel samples share no block", engine={"fork": _fork_copies_all}),
    PagedMutant(
        name="EvictedPosition",
        text="an evicted sequence resumes one position late",
        variant="small-cache",
        model={"positions": _positions_after_eviction},
    ),
    PagedMutant(
        name="EvictedDraws",
        text="an evicted sequence draws from its beginning",
        variant="small-cache",
        engine={"evict": _evicts_draws},
    ),
    PagedMutant(
        name="EvictedDrawsOfCopies",
        text="an evicted parallel sample draws from its beginning, but not the first",
        variant="small-cache",
        engine={"evict": _evicts_draws_of_copies},
    ),
    PagedMutant(
        name="EvictedScore",
        text="an evicted beam forgets its score",
        variant="small-cache",
        engine={"evict": _evicts_scores, "best": _best_without_evicted_scores},
    ),
    PagedMutant(
        name="EvictedToken",
        text="an evicted sequence gives a token twice",
        variant="small-cache",
        engine={"evict": _evicts_one_token},
    ),
    PagedMutant(name="SharedSeed", text="requests share one generator", engine={"draws": _one_seed}),
    PagedMutant(
        name="SharedSeedBf16",
        text="requests share one generator, in bf16",
        precision="bf16",
        engine={"draws": _one_seed},
    ),
    PagedMutant(
        name="SeedAndNumber",
        text="draws depend on how many requests came before, in bf16",
        precision="bf16",
        engine={"draws": _seed_and_number},
    ),
    PagedMutant(
        name="StreamsChangePlaces",
        text="parallel samples have one another's random numbers, in bf16",
        precision="bf16",
        engine={"draws": _streams_change_places},
    ),
    PagedMutant(name="CopiesAlike", text="parallel samples have one seed", engine={"draws": _same_seed_of_copies}),
    PagedMutant(name="NoTemperature", text="temperature is ignored", engine={"choose": _ignores_temperature}),
    PagedMutant(
        name="SeedsEveryToken",
        text="a seed draws the same for each token",
        engine={"choose": _seeds_every_token},
    ),
    PagedMutant(
        name="TemperatureOfFirst",
        text="temperature is ignored after the first token",
        engine={"choose": _temperature_of_first_token},
    ),
    PagedMutant(
        name="TemperatureOfBatch",
        text="a batch has one temperature",
        engine={"choose": _temperature_of_batch},
    ),
    PagedMutant(
        name="DrawsForAll",
        text="greedy requests are drawn beside others that are",
        engine={"choose": _draws_for_all},
    ),
    PagedMutant(
        name="TemperatureOfEight",
        text="temperature is ignored from the ninth token on",
        engine={"choose": _temperature_of_first_eight},
    ),
    PagedMutant(
        name="GreedyFromThird",
        text="the third token and those after it are not drawn",
        engine={"choose": _greedy_from_third_token},
    ),
    PagedMutant(
        name="TopP", text="the last 5 % of the probability are not drawn", engine={"choose": _draws_of_most_probable}
    ),
    PagedMutant(
        name="EvictedLeak",
        text="an evicted sequence keeps a block",
        variant="small-cache",
        engine={"evict": _evicts_all_but_one},
    ),
    PagedMutant(name="RefusedLeak", text="a refused request keeps a block", engine={"submit": _keeps_block_of_refused}),
    PagedMutant(
        name="NeverInChunks",
        text="a step computes more tokens than it may",
        variant="chunked",
        engine={"_schedule": _never_in_chunks},
    ),
    PagedMutant(
        name="BatchWithoutLimit", text="more requests run at once than may", engine={"_schedule": _batch_without_limit}
    ),
    PagedMutant(
        name="NoPromptLogprobs",
        text="log probabilities of prompts are not told",
        engine={"_note_prompt": _no_prompt_logprobs},
    ),
    PagedMutant(name="NotGreedy", text="a token is never taken twice in a row", engine={"choose": _second_best}),
    PagedMutant(name="NoStop", text="stop tokens are ignored", engine={"finish": _no_stop}),
    PagedMutant(
        name="NoStopOfDraws",
        text="stop tokens are ignored where tokens are drawn",
        engine={"finish": _no_stop_of_draws},
    ),
    PagedMutant(
        name="NoStopOfCopies",
        text="parallel samples but the first ignore stop tokens",
        engine={"finish": _no_stop_of_copies},
    ),
    PagedMutant(
        name="StopsByFirst", text="of several stop tokens one is seen", engine={"finish": _stops_by_first_alone}
    ),
    PagedMutant(name="StopNotAtOnce", text="the first token never stops", engine={"finish": _never_stops_at_once}),
    PagedMutant(name="StopsByPrompt", text="a stop token in the prompt ends it", engine={"finish": _stops_in_prompt}),
    PagedMutant(name="OneMore", text="one token more than asked", engine={"finish": _one_token_more}),
    PagedMutant(name="NoLimit", text="the context limit is ignored", engine={"finish": _no_limit}),
    PagedMutant(
        name="CacheTruncates",
        text="keys and values are truncated to 8 bits, not rounded",
        precision="fp8-cache",
        model={"narrow": _truncates},
    ),
    PagedMutant(
        name="ChunksTruncate",
        text="keys and values of a prompt's later chunks are truncated to 8 bits",
        variant="all-at-once",
        precision="fp8-cache",
        model={"write": _truncates_chunks},
    ),
    PagedMutant(
        name="CacheFormat",
        text="keys and values are rounded to e5m2, not e4m3",
        precision="fp8-cache",
        model={"narrow": _other_format},
    ),
    PagedMutant(
        name="ScaleOfNextGroup",
        text="groups of 4-bit weights have another group's scale, for one output",
        precision="int4-weights",
        model={"weight": _weight_of_next_scale},
    ),
    PagedMutant(
        name="WeightOffset",
        text="8-bit weights of one layer are one step too large",
        precision="int8-weights",
        model={"weight": _weight_of_offset},
    ),
    PagedMutant(
        name="LowestCode",
        text="the lowest of 4-bit codes is taken for the next",
        precision="int4-weights",
        model={"weight": _lowest_code_is_next},
    ),
    PagedMutant(name="BeamsForget", text="beams are compared by their last token", engine={"best": _beams_forget}),
    PagedMutant(name="BeamsAlone", text="each beam goes on by itself", engine={"best": _beams_alone}),
    PagedMutant(
        name="BeamsChangeBlocks", text="two beams' blocks change places", engine={"best": _beams_change_blocks}
    ),
    PagedMutant(
        name="NegativeToken", text="a negative token counts from the end", engine={"submit": _takes_negative_tokens}
    ),
    PagedMutant(
        name="NoRoom",
        text="a prompt of exactly the context limit is taken, and one token follows",
        engine={"submit": _takes_prompts_without_room},
    ),
    PagedMutant(name="AnyToken", text="an unknown token is taken for another", engine={"submit": _takes_any_token}),
]
BY_NAME = {mutant.name: mutant for mutant in MUTANTS}


def _classes(mutant: PagedMutant) -> dict[str, type]:
    """Return the model, the pool, the engine and the adapter with a defect, by names that pickle finds here."""
    model = type(f"{mutant.name}Model", (PagedLlama,), {**mutant.model, "__module__": __name__})
    pool = type(f"{mutant.name}Pool", (BlockPool,), dict(mutant.pool))
    engine = type(f"{mutant.name}Engine", (PagedEngine,), {**mutant.engine, "model_type": model, "pool_type": pool})

    def build(self: Paged, folder: Path, options: EngineOptions) -> Engine:
        built: Engine = engine(folder, options)
        return built

    adapter = type(mutant.name, (Paged,), {"build": build, "tp": mutant.tp})
    return {mutant.name: adapter, model.__name__: model}


for _mutant in MUTANTS:
    globals().update(_classes(_mutant))
