"""Judge what an engine served: against float64, against what correct engines round, and against itself."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from scipy.stats import chi2, poisson
from torch import Tensor

from meshmark.inference.contract import Completion, Request, Served
from meshmark.inference.model import FOLLOWED, PRECISIONS, Narrow, Shape, Truth
from meshmark.records.judged_case import CaseVerdict

FACTOR = 3.0
"""An engine may round this many times as much as the noisiest of the ways in which Transformers computes the same.
Of 240 correct runs (benchmarks/inference_alarms.py) the largest was 1.75 times as noisy."""
BINS = 8
RARE = 1e-6
"""Share of correct engines whose draws fail one of the tests."""
RARE_PARTINGS = 3e-3
"""The same of drawn sequences that part, if two runs round to opposite sides at every token."""


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How far rounding alone moves log probabilities, over all tokens: root mean square and largest."""

    rms: float
    largest: float

    @property
    def tolerance(self) -> float:
        """The smallest error of one token's log probability that is seen."""
        return FACTOR * self.largest

    @property
    def unexplained(self) -> float:
        """The error that roundings which could go either way are not looked for to explain: none that fails."""
        return min(FOLLOWED, self.tolerance)


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """Two runs' completions of one request."""

    request: Request
    runs: tuple[Completion, Completion]
    common: int | None
    """Number of tokens before the first that differs. None if all are the same."""

    @property
    def compared(self) -> int:
        """Tokens that are compared: up to the first that differs, which is among them."""
        shorter = min(len(run.tokens) for run in self.runs)  # a stop token may end one of them
        return shorter if self.common is None else self.common + 1


class Judge:
    """Judges engines that serve one model in one precision, and round keys and values in one way."""

    def __init__(self, folder: Path, precision: str, rounding: str = "nearest") -> None:
        self.truth = Truth(folder, PRECISIONS[precision].cache_dtype, rounding)
        self._narrow, self._folder = Narrow(folder, precision, rounding), folder
        self._precision, self._rounding = precision, rounding

    def noise(self, requests: Sequence[Request], completions: Sequence[Completion]) -> Noise:
        """Measure the noise at the tokens that an engine produced."""
        pairs = _pairs(requests, completions)
        sequences = [[*r.prompt, *c.tokens] for r, c in pairs]
        rms, largest = [], []
        for rows in self._narrow.logprobs(sequences, [len(r.prompt) for r, _ in pairs]).values():
            off = np.concatenate(
                [
                    np.abs(told - _taken(self.truth.logprobs(tokens, told.tolist()), tokens))
                    for told, tokens in zip(map(_taken, rows, sequences), sequences, strict=True)
                ]
            )
            rms.append(float(np.sqrt(np.mean(off**2))))
            largest.append(float(off.max()))
        return Noise(rms=max(rms), largest=max(largest))

    def logprobs(self, requests: Sequence[Request], completions: Sequence[Completion], noise: Noise) -> CaseVerdict:
        """Judge log probabilities of prompts and of generated tokens, at the run's own tokens."""
        off, worst = list[float](), ("", 0, 0.0)
        for request, completion in _pairs(requests, completions):
            if not completion.tokens:
                text = f"{request.name}: no tokens; {completion.error or completion.finish or 'it did not end'}"
                return CaseVerdict(name="log probabilities", passed=False, text=text)
            tokens = [*request.prompt, *completion.tokens]
            told = [*completion.prompt_logprobs, *completion.logprobs]
            exact = _taken(self.truth.logprobs(tokens, told, noise.unexplained), tokens)
            if not request.wants_prompt:
                exact = exact[len(request.prompt) - 1 :]
            if len(told) != len(exact):
                text = f"{request.name}: {len(told)} log probabilities of {len(exact)} tokens"
                return CaseVerdict(name="log probabilities", passed=False, text=text)
            errors = np.abs(np.array(told) - exact)
            errors[~np.isfinite(errors)] = math.inf
            off += errors.tolist()
            position = int(errors.argmax()) + len(tokens) - len(exact)
            if errors.max() > worst[2]:
                worst = (request.name, position, float(errors.max()))
        rms = float(np.sqrt(np.mean(np.square(off)))) if off else math.inf
        passed = rms <= FACTOR * noise.rms and worst[2] <= noise.tolerance
        text = f"{worst[2]:.1e} at most (noise {noise.largest:.1e}), {rms:.1e} in the mean (noise {noise.rms:.1e})"
        where = "" if passed else f"; the worst is token {worst[1]} of {worst[0]}"
        numbers = {"largest": worst[2], "rms": rms, "noise": noise.largest, "detects": noise.tolerance}
        return CaseVerdict(name="log probabilities", passed=passed, text=text + where, numbers=numbers)

    def cache_rounding(
        self, requests: Sequence[Request], completions: Sequence[Completion], told: CaseVerdict
    ) -> CaseVerdict:
        """Judge that keys and values in a narrower cache are the nearest to what was computed.

        `told`: what `logprobs` says of the same completions, with the engine's own rounding.
        """
        found = told
        if self._rounding != "nearest":
            nearest = Judge(self._folder, self._precision)
            found = nearest.logprobs(requests, completions, nearest.noise(requests, completions))
        text = f"log probabilities from keys and values rounded to the nearest: {found.text}"
        if not found.passed and told.passed:
            text = f"keys and values are rounded {self._rounding}; {text}"
        return dataclasses.replace(found, name="rounding of the KV cache", text=text)

    def greedy(self, requests: Sequence[Request], completions: Sequence[Completion], noise: Noise) -> CaseVerdict:
        """Judge that every token is the most probable one, or as near to it as noise can move both."""
        wrong, same, total = list[str](), 0, 0
        for request, completion in _pairs(requests, completions):
            rows = self._followed_rows(request, completion, noise)
            for index, (row, token) in enumerate(zip(rows, completion.tokens, strict=True)):
                behind = float(row.max() - row[token])
                total, same = total + 1, same + (behind == 0)
                if behind > 2 * noise.tolerance:
                    wrong.append(f"{request.name}: token {index} is {behind:.1e} less probable than the first")
        passed = not wrong and total > 0
        text = wrong[0] if wrong else f"{same} of {total} are float64's; others are within noise of it"
        return CaseVerdict(name="greedy tokens", passed=passed, text=text, numbers={"same": same, "total": total})

    def same(self, name: str, requests: Sequence[Request], runs: tuple[Served, Served], noise: Noise) -> CaseVerdict:
        """Judge that two runs of the same requests agree: tokens, up to near ties, and log probabilities.

        Rounding may make a sequence go another way. A greedy token may be another where both runs' tokens are within
        noise of the most probable one. Drawn tokens may be others as often as `partings` allows. From there on the
        two are not compared: each is held against float64 at its own tokens.
        """
        ones = {(c.request, c.copy): c for c in runs[0].completions}
        worst, bits, drawn = 0.0, 0, list[_Pair]()
        parted = list[_Pair]()
        for request, other in _pairs(requests, runs[1].completions):
            one = ones[other.request, other.copy]
            bits += (one.tokens, one.logprobs) != (other.tokens, other.logprobs)
            if (one.finish, len(one.tokens)) != (other.finish, len(other.tokens)) and not request.stop:
                ends = f"{len(one.tokens)} tokens ({one.finish}), then {len(other.tokens)} ({other.finish})"
                text = f"{request.name}: {ends}"
                return CaseVerdict(name=name, passed=False, text=text)
            common = next((i for i, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=False)) if a != b), None)
            pair = _Pair(request=request, runs=(one, other), common=common)
            if request.temperature:
                drawn.append(pair)
            if common is not None:
                parted.append(pair)
            for of, a, b in (
                ("", one.logprobs, other.logprobs),
                (" of its prompt", one.prompt_logprobs, other.prompt_logprobs),
            ):
                if len(a) != len(b) and not (request.stop and not of):
                    text = f"{request.name}: {len(a)}, then {len(b)} log probabilities{of}"
                    return CaseVerdict(name=name, passed=False, text=text)
            pairs = [
                *list(zip(one.logprobs, other.logprobs, strict=False))[:common],
                *zip(one.prompt_logprobs, other.prompt_logprobs, strict=True),
            ]
            apart = [abs(a - b) for a, b in pairs]
            worst = max([worst, *(value if math.isfinite(value) else math.inf for value in apart)])
        numbers = {"apart": worst, "bits": bits, "tokens": len(parted)}
        text = f"{worst:.1e} apart at most; bits differ in {bits} of {len(runs[1].completions)}"
        text += f", tokens in {len(parted)}"
        passed = worst <= 2 * noise.tolerance
        if not passed and self.truth.rounds_cache:  # the runs may round ties differently: each is held against float64
            passed = all(self.logprobs(requests, run.completions, noise).passed for run in runs)
        for pair in parted:
            if wrong := self._wrong_after_parting(pair, noise):
                return CaseVerdict(name=name, passed=False, text=wrong, numbers=numbers)
        if number := sum(pair.common is not None for pair in drawn):
            expected = self.partings(drawn, noise)
            chance = float(poisson.sf(number - 1, expected))
            passed = passed and chance >= RARE_PARTINGS
            text += f"; {number} of {len(drawn)} drawn sequences part, {expected:.1e} expected at most of rounding"
        return CaseVerdict(name=name, passed=passed, text=text, numbers=numbers)

    def _wrong_after_parting(self, pair: _Pair, noise: Noise) -> str:
        """Return what is wrong with two sequences that go apart, each by itself, or an empty text."""
        for completion in pair.runs:
            told = self.logprobs([pair.request], [completion], noise)
            if not told.passed:
                return f"after token {pair.common} is another: {told.text}"
            if not pair.request.temperature:
                greedy = self.greedy([pair.request], [completion], noise)
                if not greedy.passed:
                    return f"token {pair.common} is another: {greedy.text}"
        return ""

    def partings(self, pairs: Sequence[_Pair], noise: Noise) -> float:
        """Return how many of these sequences, drawn twice with the same random numbers, may part by rounding alone.

        An engine does not say how it makes a token of a random number, so it cannot be known of one parting whether
        rounding explains it. Their number can be bounded. At each compared position the chance that two slightly
        different distributions give two tokens is `chance_of_parting`, here of float64 and of each way of
        Transformers'. It grows in proportion to the difference, so that it is scaled by what the engine's own log
        probabilities are off from float64, relative to the way's, in each of the two runs. Until a sequence parts, its
        partings are a counting process whose compensator is the sum of these chances. So their number has at most
        the tail of a Poisson distribution with this mean.
        """
        pairs = [pair for pair in pairs if pair.compared]
        expected, off, own = dict.fromkeys(Narrow.WAYS, 0.0), dict.fromkeys(Narrow.WAYS, 0.0), 0.0
        engine = 0.0
        sequences = [[*pair.request.prompt, *pair.runs[0].tokens[: pair.compared]] for pair in pairs]
        narrow = self._narrow.logprobs(sequences, [len(pair.request.prompt) for pair in pairs])
        for index, (pair, tokens) in enumerate(zip(pairs, sequences, strict=True)):
            first, temperature = len(pair.request.prompt) - 1, pair.request.temperature
            for way, rows in narrow.items():
                told = _taken(rows[index], tokens)
                exact, found = self.truth.logprobs(tokens, told.tolist()), rows[index]
                off[way] += float(np.square(told - _taken(exact, tokens))[first:].mean())
                chances = map(chance_of_parting, exact[first:-1] / temperature, found[first:-1] / temperature)
                expected[way] += sum(chances)
            ones, others = (self._followed_rows(pair.request, run, noise) for run in pair.runs)
            for followed, run in zip((ones, others), pair.runs, strict=True):
                taken = followed.numpy()[np.arange(len(followed)), run.tokens]
                engine += float(np.square(np.array(run.logprobs) - taken).mean())
            if self.truth.rounds_cache:  # the two runs may have rounded keys and values to two sides
                both = zip(ones[: pair.compared], others[: pair.compared], strict=True)
                own += sum(chance_of_parting(one / temperature, other / temperature) for one, other in both)
        # `engine` has twice as many terms as `off`.
        scaled = (expected[way] * math.sqrt(engine / 2 / off[way]) for way in off if off[way])
        return 2 * max(scaled, default=0.0) + own

    def _followed_rows(self, request: Request, completion: Completion, noise: Noise) -> Tensor:
        """Return float64's log probabilities before each generated token, by the roundings that the run took."""
        told = [*completion.prompt_logprobs, *completion.logprobs]
        rows = self.truth.logprobs([*request.prompt, *completion.tokens], told, noise.unexplained)
        return rows[len(request.prompt) - 1 : -1]

    def beams(self, request: Request, completions: Sequence[Completion], noise: Noise) -> CaseVerdict:
        """Judge beams: those that a beam search in float64 finds, in its order.

        Where float64 itself is within noise of another choice, they must only differ and be in order of their scores.
        """
        ordered = sorted(completions, key=lambda c: c.copy)
        found = [tuple(c.tokens) for c in ordered]
        expected, gap = self.search(request)
        tolerance = 2 * noise.tolerance * request.max_new_tokens
        decided = gap > tolerance
        room = 0.0 if decided else tolerance  # an engine orders by sums of its own, which round in another way
        scores = [sum(c.logprobs) for c in ordered]
        passed = found == expected if decided else len(set(found)) == request.beams
        passed = passed and all(one >= other - room for one, other in pairwise(scores))
        same = sum(one == other for one, other in zip(found, expected, strict=False))
        text = f"{same} of {request.beams} beams are float64's; its nearest other choice is {gap:.1e} less probable"
        if not decided:
            text += f", within noise of {tolerance:.1e}: which beams they are is not judged"
        numbers = {"same": same, "gap": gap, "decided": float(decided)}
        return CaseVerdict(name="beams", passed=passed, text=text, numbers=numbers)

    def search(self, request: Request) -> tuple[list[tuple[int, ...]], float]:
        """Return the beams of a search in float64, and the smallest lead of a choice over the next candidate."""
        gap = math.inf
        beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        for _ in range(request.max_new_tokens):
            candidates = sorted(
                (
                    (score + float(row[token]), (*tokens, token))
                    for score, tokens in beams
                    for row in [self.truth.logprobs([*request.prompt, *tokens])[-1]]
                    for token in row.topk(request.beams + 1).indices.tolist()
                ),
                reverse=True,
            )
            beams = candidates[: request.beams]
            scores = [score for score, _ in candidates[: request.beams + 1]]
            gap = min([gap, *(one - other for one, other in pairwise(scores))])
        return [tokens for _, tokens in beams], gap

    def draws(self, requests: Sequence[Request], completions: Sequence[Completion]) -> CaseVerdict:
        """Judge the first two tokens that each request drew, against float64 at the run's own tokens.

        In the order of their probabilities, tokens divide the numbers from 0 to 1 into intervals. A drawn token becomes
        a number at random in its own interval. These numbers must be uniform (chi-square), and those of first and
        second tokens independent. The second token is the first one again no more often than by chance. Improbable
        tokens must be drawn too: the largest number shows a cut-off by probability or rank.
        """
        drawn = np.random.default_rng(0)
        where, again, chance = list[list[float]](), 0, 0.0
        for request, completion in _pairs(requests, completions):
            if len(completion.tokens) < 2:
                text = f"{request.name}: {len(completion.tokens)} tokens, expected 2"
                return CaseVerdict(name="temperature", passed=False, text=text)
            first, second = completion.tokens[:2]
            rows = self.truth.logprobs([*request.prompt, first, second])[len(request.prompt) - 1 : -1]
            expected = (rows / request.temperature).softmax(-1)
            above = [float(row[row > row[token]].sum()) for row, token in zip(expected, (first, second), strict=True)]
            sizes = [float(row[token]) for row, token in zip(expected, (first, second), strict=True)]
            where.append([low + size * drawn.random() for low, size in zip(above, sizes, strict=True)])
            again, chance = again + (first == second), chance + float(expected[1, first])
        bins = np.minimum((np.array(where) * BINS).astype(int), BINS - 1)
        coarse = bins // (BINS // 4)
        tables = (np.bincount(bins[:, 0], minlength=BINS), np.bincount(bins[:, 1], minlength=BINS))
        off = [
            float(np.square(table - table.mean()).sum() / table.mean())
            for table in (*tables, np.bincount(4 * coarse[:, 0] + coarse[:, 1], minlength=16))
        ]
        limits = [float(chi2.isf(RARE, size - 1)) for size in (BINS, BINS, 16)]
        most = int(poisson.isf(RARE, chance))
        last, least = float(np.max(where)), RARE ** (1 / bins.size)
        passed = all(one <= limit for one, limit in zip(off, limits, strict=True)) and again <= most and last >= least
        shown = ", ".join(f"{one:.1f} ({limit:.1f} fails)" for one, limit in zip(off, limits, strict=True))
        text = (
            f"chi-square of {len(where)} first tokens, second tokens and both together {shown}; "
            f"{again} tokens are drawn twice in a row, at most {most}; the least probable is at {last:.4f} of the "
            f"order, at least {least:.4f}"
        )
        return CaseVerdict(name="temperature", passed=passed, text=text, numbers={"chi_square": max(off)})

    def later_draws(self, requests: Sequence[Request], completions: Sequence[Completion]) -> CaseVerdict:
        """Judge the third token of each request and those after it in the way in which `draws` judges the first two.

        An engine may decode later tokens by other code, such as one that decodes several steps at once.
        """
        drawn, where = np.random.default_rng(0), list[float]()
        for request, completion in _pairs(requests, completions):
            begin = len(request.prompt) + 1
            rows = self.truth.logprobs([*request.prompt, *completion.tokens])[begin:-1]
            for row, token in zip((rows / request.temperature).softmax(-1), completion.tokens[2:], strict=True):
                where.append(float(row[row > row[token]].sum() + row[token] * drawn.random()))
        table = np.bincount(np.minimum((np.array(where) * BINS).astype(int), BINS - 1), minlength=BINS)
        off, limit = float(np.square(table - table.mean()).sum() / table.mean()), float(chi2.isf(RARE, BINS - 1))
        text = f"chi-square of {len(where)} later tokens {off:.1f} ({limit:.1f} fails)"
        return CaseVerdict(name="later draws", passed=off <= limit, text=text, numbers={"chi_square": off})


def chance_of_parting(one: Tensor, other: Tensor) -> float:
    """Return how likely the same random numbers draw different tokens from two distributions, given as logits.

    It is the larger of two ways to draw. One puts tokens side by side on the numbers from 0 to 1, in the order of their
    ids, and takes the one at a random number. The other gives each token a random number of its own, and takes the
    largest sum with its logit (or the first to come in an exponential race, as `torch.multinomial` does). It parts
    at most 2 d / (1 + d) of the draws (arXiv:2408.07978), where d is the total variation distance.

    An engine that puts tokens side by side in the order of their probabilities would part more often: rounding
    reorders tokens that are about as likely, and moves them by more than their size.
    """
    p, q = one.softmax(-1), other.softmax(-1)
    distance = float((p - q).abs().sum() / 2)
    ends, others = p.cumsum(-1), q.cumsum(-1)
    overlap = torch.minimum(ends, others) - torch.maximum(ends - p, others - q)
    return max(2 * distance / (1 + distance), 1 - float(overlap.clamp(min=0).sum()))


def cache_bytes(served: Served, shape: Shape, precision: str, tp: int, num_blocks: int) -> CaseVerdict:
    """Judge the bytes of the KV cache on every rank: blocks x block size x bytes of a token, exactly."""
    use = served.cache
    assert use is not None
    expected = num_blocks * use.block_size * shape.token_bytes(precision, tp)
    passed = use.num_blocks == num_blocks and use.bytes_by_rank == (expected,) * tp
    found = ", ".join(f"{number:,}" for number in use.bytes_by_rank)
    text = f"{found} bytes in {use.num_blocks} blocks of {use.block_size}; closed form {expected:,} in {num_blocks}"
    return CaseVerdict(name="KV cache bytes", passed=passed, text=text, numbers={"bytes": max(use.bytes_by_rank)})


def peak_blocks(served: Served, requests: Sequence[Request], block_size: int) -> CaseVerdict:
    """Judge the blocks at the peak of requests that all run at once: what their tokens need, and none when they end."""
    tokens = [len(r.prompt) + r.max_new_tokens - 1 for r in requests]
    needed = sum(-(-number // block_size) for number in tokens)
    found = max(served.used_blocks)
    waste = 1 - sum(tokens) / (found * block_size) if found else 0.0
    passed = found == needed and served.blocks_after == served.blocks_before
    text = (
        f"{found} at the peak, closed form {needed}, {served.blocks_after} left over; "
        f"{waste:.0%} of their tokens' places are empty"
    )
    return CaseVerdict(name="KV blocks in use", passed=passed, text=text, numbers={"blocks": found, "waste": waste})


def _pairs(requests: Sequence[Request], completions: Sequence[Completion]) -> list[tuple[Request, Completion]]:
    by_name = {request.name: request for request in requests}
    return [(by_name[c.request], c) for c in completions if c.request in by_name]


def _taken(rows: Tensor, tokens: Sequence[int]) -> np.ndarray:
    """Return the log probability of every token but the first."""
    taken: np.ndarray = rows.numpy()[np.arange(len(tokens) - 1), np.array(tokens[1:])]
    return taken
