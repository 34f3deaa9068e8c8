"""Clauses for engines: requests that show a behaviour, and the verdict on the answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from meshmark.inference.contract import EngineOptions, InferenceAdapter, Request, Served
from meshmark.inference.judge import Judge, Noise, cache_bytes, peak_blocks
from meshmark.inference.model import Shape, prompts
from meshmark.inference.process import EngineError
from meshmark.records.judged_case import CaseVerdict

LENGTHS = (1, 2, 5, 31, 32, 33, 63, 64, 65, 100, 150, 200)
"""Tokens of the prompts: around the ends of blocks, and longer than one step of "chunked"."""
NEW_TOKENS = 16
DRAWS = 256
"""Requests that draw after one prompt, to hold frequencies against float64."""
COPIES = 12
"""Parallel samples of a prompt: so many that not all of them can part by rounding, even in bf16."""
TEMPERATURES = (0.5, 2.0)
"""Temperatures of the draws: one favours the most probable tokens, the other makes all about as likely."""
MIXED = 96
"""Requests of unlike temperatures that are served together."""
BAD = {
    "a prompt that is too long": (
        Request(name="too long", prompt=prompts([400])[0], max_new_tokens=4),
        Request(name="no room", prompt=prompts([EngineOptions().context_limit])[0], max_new_tokens=4),
    ),
    "a token that is unknown": (
        Request(name="unknown token", prompt=(5, 1_000_000), max_new_tokens=4),
        Request(name="negative token", prompt=(5, -3), max_new_tokens=4),
    ),
}
"""Requests that engines must refuse, by the clause. The last ones to come end an engine that checks nothing."""
_SAMPLED = {"temperature": 1.0, "wants_prompt": False}


class Serves(Protocol):
    """An engine that serves, in a process of its own or not."""

    def serve(self, requests: Sequence[Request]) -> Served:
        """Serve requests to their ends. Raises `EngineError` if the engine fails."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Options that a judged engine was built with."""

    adapter: type[InferenceAdapter]
    options: EngineOptions
    variant: str
    shape: Shape
    num_leak: int = 1000
    """Requests that one clause serves."""


def requests_of(lengths: Sequence[int] = LENGTHS) -> list[Request]:
    """Return the requests that every engine serves."""
    return [
        Request(name=f"prompt-{len(prompt)}", prompt=prompt, max_new_tokens=NEW_TOKENS) for prompt in prompts(lengths)
    ]


def judge_engine(engine: Serves, judge: Judge, setting: Setting) -> Iterator[CaseVerdict]:
    """Judge an engine: what holds of every variant, and the clauses that its variant is for."""
    adapter, options, requests = setting.adapter, setting.options, requests_of()
    engine = _Watched(engine)
    served = engine.serve(requests)
    if refused := [c for c in served.completions if c.error or not c.tokens]:
        yield CaseVerdict(name="serves", passed=False, text=f"{refused[0].request}: {refused[0].error or 'no tokens'}")
        return
    noise = judge.noise(requests, served.completions)
    yield (told := judge.logprobs(requests, served.completions, noise))
    yield judge.greedy(requests, served.completions, noise)
    if judge.truth.rounds_cache:
        yield judge.cache_rounding(requests, served.completions, told)
    yield _lengths(requests, served)
    blocks = options.num_blocks
    if not adapter.pages:  # one batch, padded to its longest prompt
        blocks = len(requests) * (max(LENGTHS) + NEW_TOKENS - 1)
    if adapter.pages or (served.cache and served.cache.num_blocks):
        yield cache_bytes(served, setting.shape, options.precision, options.tp, blocks)
    if adapter.pages and options.max_step_tokens < EngineOptions().max_step_tokens:
        yield _step_tokens(requests, served, options.max_step_tokens)
    if setting.variant == "plain" and adapter.pages:
        yield peak_blocks(served, requests, options.block_size)
    for clause in _CLAUSES.get(setting.variant, ()):
        if clause in (_beams, _eviction_of_beams) and "beams" not in adapter.promises:
            continue
        yield clause(ClauseContext(engine=engine, judge=judge, setting=setting, served=served, noise=noise))
    if adapter.pages:
        text = f"{engine.left} blocks in use after all requests of a load have ended"
        yield CaseVerdict(name="blocks left over", passed=engine.left == 0, text=text)
    if setting.variant == "plain":
        for name, bads in BAD.items():
            yield _bad_requests(name, bads, judge, (engine, served), noise)


class _Watched:
    """Serves with an engine, and keeps the most blocks that were in use after a load."""

    def __init__(self, engine: Serves) -> None:
        self._engine, self.left = engine, 0

    def serve(self, requests: Sequence[Request]) -> Served:
        served = self._engine.serve(requests)
        self.left = max(self.left, served.blocks_after)
        return served


@dataclass(frozen=True, kw_only=True)
class ClauseContext:
    """Everything that a clause is judged with."""

    engine: Serves
    judge: Judge
    setting: Setting
    served: Served
    """Answers to `requests_of()`."""
    noise: Noise


def _lengths(requests: Sequence[Request], served: Served) -> CaseVerdict:
    """Judge that every completion has the tokens that were asked for."""
    asked = {request.name: request.max_new_tokens for request in requests}
    wrong = [c for c in served.completions if (len(c.tokens), c.finish) != (asked[c.request], "length")]
    text = f"{len(served.completions) - len(wrong)} of {len(served.completions)} have all tokens"
    if wrong:
        text += f"; {wrong[0].request} has {len(wrong[0].tokens)} of {asked[wrong[0].request]} ({wrong[0].finish!r})"
    return CaseVerdict(name="numbers of tokens", passed=not wrong, text=text)


def _step_tokens(requests: Sequence[Request], served: Served, most: int) -> CaseVerdict:
    """Judge that steps are as many as the tokens that are computed need, at most `most` in each."""
    tokens = sum(len(request.prompt) + request.max_new_tokens - 1 for request in requests)
    needed = -(-tokens // most)
    text = f"{served.steps} steps for {tokens} tokens, at least {needed} of at most {most} tokens"
    return CaseVerdict(name="tokens of a step", passed=served.steps >= needed, text=text)


def _alone(context: ClauseContext) -> CaseVerdict:
    requests = requests_of()
    alone = [dataclasses.replace(request, arrives=40 * index) for index, request in enumerate(requests)]
    return context.judge.same("alone", requests, (context.served, context.engine.serve(alone)), context.noise)


def _arrival(context: ClauseContext) -> CaseVerdict:
    requests = requests_of()
    backwards = [dataclasses.replace(request, arrives=2 * index) for index, request in enumerate(requests[::-1])]
    served = context.engine.serve(backwards)
    return context.judge.same("order and arrival", requests, (context.served, served), context.noise)


def _stops(context: ClauseContext) -> CaseVerdict:
    """Serve again with stop tokens that are known to come, and expect completions to end with the first of them.

    Each completion is held against its own tokens: near ties may give others than the run without stop tokens.
    """
    request, tokens = requests_of()[5], context.served.completions[5].tokens
    later = tokens[min(6, len(tokens) - 1)]
    stops = {"one": (later,), "several": (later, *tokens[2:4]), "first": (tokens[0],), "in prompt": (later,)}
    requests = [
        dataclasses.replace(request, name=name, stop=stop, prompt=(later, *request.prompt))
        if name == "in prompt"
        else dataclasses.replace(request, name=name, stop=stop)
        for name, stop in stops.items()
    ]
    served = context.engine.serve(requests)
    texts, stopped = _ends(requests, served)
    alike = [one for one in requests if one.name != "in prompt"]
    bases = [dataclasses.replace(context.served.completions[5], request=one.name) for one in alike]
    base = dataclasses.replace(context.served, completions=bases)
    again = dataclasses.replace(served, completions=[c for c in served.completions if c.request != "in prompt"])
    same = context.judge.same("stop tokens", alike, (base, again), context.noise)
    text = "; ".join([*texts, f"{stopped} of {len(requests)} ended with a stop token", same.text])
    return dataclasses.replace(same, passed=same.passed and not texts and stopped > 0, text=text)


def _ends(requests: Sequence[Request], served: Served) -> tuple[list[str], int]:
    """Return what is wrong with the ends of completions by their own tokens, and how many a stop token ends."""
    stops, texts, stopped = {request.name: request.stop for request in requests}, list[str](), 0
    for completion in served.completions:
        ends = [index for index, token in enumerate(completion.tokens) if token in stops[completion.request]]
        expected = (ends[0] + 1, "stop") if ends else (NEW_TOKENS, "length")
        stopped += bool(ends)
        if (found := (len(completion.tokens), completion.finish)) != expected:
            text = f"{completion.request}: ended with {found[1]!r} after {found[0]} tokens"
            texts.append(f"{text}, expected {expected[1]!r} after {expected[0]}")
    return texts, stopped


def _stops_of_draws(context: ClauseContext) -> CaseVerdict:
    """Draw again with stop tokens that are known to come, one by one and as parallel samples.

    A stop token is one that was drawn in the middle of a completion; of parallel samples, one from each.
    """
    requests = [*_drawn([8, 40, 3, 31], seed=1), _copies(4)]
    free = context.engine.serve(requests)
    middle = {
        r.name: tuple(c.tokens[len(c.tokens) // 2] for c in free.completions if c.request == r.name and c.tokens)
        for r in requests
    }
    stopping = [dataclasses.replace(request, stop=middle[request.name]) for request in requests]
    served = context.engine.serve(stopping)
    texts, stopped = _ends(stopping, served)
    same = context.judge.same("stop tokens of draws", stopping, (free, served), context.noise)
    text = "; ".join([*texts, f"{stopped} of {len(served.completions)} ended with a stop token", same.text])
    return dataclasses.replace(same, passed=same.passed and not texts and stopped > 0, text=text)


def _context_limit(context: ClauseContext) -> CaseVerdict:
    """Expect completions to end at the context limit, also where it leaves room for one token alone."""
    limit, texts = EngineOptions().context_limit, list[str]()
    requests = [
        Request(name=f"long-{length}", prompt=prompts([length])[0], max_new_tokens=40) for length in (250, limit - 1)
    ]
    done = context.engine.serve(requests).completions
    for request, found in zip(requests, done, strict=True):
        text = f"{len(request.prompt)} + {len(found.tokens)} tokens of {limit}"
        texts.append(f"{text}, ended with {found.finish or found.error!r}")
    full = all(
        (len(r.prompt) + len(c.tokens), c.finish) == (limit, "length") for r, c in zip(requests, done, strict=True)
    )
    if full:
        told = context.judge.logprobs(requests, done, context.judge.noise(requests, done))
        return dataclasses.replace(told, name="context limit", text="; ".join([*texts, told.text]))
    return CaseVerdict(name="context limit", passed=False, text="; ".join(texts))


def seeds(context: ClauseContext) -> CaseVerdict:
    """Draw by seeds, and once more beside other requests and in another order."""
    sampled = _drawn([8, 40, 3, 17, 31, 5, 64, 12, 1, 2, 7, 16, 33, 9, 4, 20], seed=1)
    drawn = context.engine.serve(sampled)
    again = context.engine.serve([*requests_of()[:3], *sampled[::-1]])
    found = context.judge.logprobs(sampled, drawn.completions, context.noise)
    if not found.passed:  # two runs that serve nothing agree as well
        return dataclasses.replace(found, name="seeds", text=f"log probabilities: {found.text}")
    later = context.judge.later_draws(sampled, drawn.completions)
    same = context.judge.same("seeds", sampled, (drawn, again), context.noise)
    return dataclasses.replace(same, passed=same.passed and later.passed, text=f"{same.text}; {later.text}")


def _drawn(lengths: Sequence[int], seed: int) -> list[Request]:
    return [
        Request(name=f"drawn-{index}", prompt=prompt, max_new_tokens=NEW_TOKENS, seed=index, **_SAMPLED)  # type: ignore[arg-type]
        for index, prompt in enumerate(prompts(lengths, seed=seed))
    ]


def _copies(copies: int) -> Request:
    (prompt,) = prompts([77], seed=3)
    return Request(name="copies", prompt=prompt, max_new_tokens=NEW_TOKENS, seed=11, copies=copies, **_SAMPLED)  # type: ignore[arg-type]


def _temperature(context: ClauseContext) -> CaseVerdict:
    """Draw two tokens often, and hold frequencies and log probabilities against float64."""
    (prompt,) = prompts([20], seed=6)
    texts = list[str]()
    for temperature in TEMPERATURES:
        base = Request(name="", prompt=prompt, max_new_tokens=2, temperature=temperature, wants_prompt=False)
        requests = [dataclasses.replace(base, name=f"draw-{index}", seed=100 + index) for index in range(DRAWS)]
        done = context.engine.serve(requests).completions
        told = context.judge.logprobs(requests, done, context.noise)
        if not told.passed:
            return dataclasses.replace(told, name="temperature", text=f"log probabilities: {told.text}")
        found = context.judge.draws(requests, done)
        texts.append(f"at {temperature:g}: {found.text}")
        if not found.passed:
            break
    return dataclasses.replace(found, text="; ".join(texts))


def _mixed_temperatures(context: ClauseContext) -> CaseVerdict:
    """Serve requests of unlike temperatures in one batch, a third of them greedy, and judge each by its own.

    An engine samples for all requests of a step at once, and may take one's temperature for another's.
    """
    name, kinds = "temperatures in one batch", (0.0, *TEMPERATURES)
    (prompt,) = prompts([20], seed=12)
    requests = [
        Request(
            name=f"mixed-{index}",
            prompt=(*prompt, index),
            max_new_tokens=NEW_TOKENS,
            temperature=kinds[index % len(kinds)],
            seed=500 + index,
            wants_prompt=False,
        )
        for index in range(MIXED)
    ]
    done = context.engine.serve(requests).completions
    noise = context.judge.noise(requests, done)
    told = context.judge.logprobs(requests, done, noise)
    if not told.passed:
        return dataclasses.replace(told, name=name, text=f"log probabilities: {told.text}")
    texts, passed = list[str](), True
    for temperature in kinds:  # each alone: of two that are exchanged, the sum may look right
        own = [request for request in requests if request.temperature == temperature]
        names = {request.name for request in own}
        completions = [completion for completion in done if completion.request in names]
        judge = context.judge
        found = judge.later_draws(own, completions) if temperature else judge.greedy(own, completions, noise)
        texts.append(f"at {temperature:g}: {found.text}")
        passed = passed and found.passed
    return CaseVerdict(name=name, passed=passed, text="; ".join(texts), numbers=told.numbers)


def parallel_samples(context: ClauseContext) -> CaseVerdict:
    """Serve parallel samples, and hold them against requests of their own with `seed + index` where that is promised.

    Where the engine shares blocks, the peak must be what the samples need together.
    """
    copies = COPIES
    base = _copies(1)
    together = context.engine.serve([_copies(copies)])
    found = context.judge.logprobs([base], together.completions, context.noise)
    if found.passed and context.setting.adapter.promises.get("copies") == "seed + index":
        apart = context.engine.serve([dataclasses.replace(base, name=f"copy-{i}", seed=11 + i) for i in range(copies)])
        for index, completion in enumerate(apart.completions):
            completion.request, completion.copy = "copies", index
        found = context.judge.same("parallel samples", [base], (together, apart), context.noise)
    distinct = len({tuple(c.tokens) for c in together.completions})
    passed, text, numbers = found.passed and distinct == copies, f"{found.text}; {distinct} distinct", found.numbers
    if context.setting.adapter.pages:
        size = context.setting.options.block_size
        each, shared = -(-(len(base.prompt) + NEW_TOKENS - 1) // size), len(base.prompt) // size
        needed, used = shared + copies * (each - shared), max(together.used_blocks, default=0)
        text += f"; {used} blocks at the peak, {needed} with shared blocks, {copies * each} without"
        if "sharing" in context.setting.adapter.promises:
            passed = passed and used == needed
        numbers = {**numbers, "blocks": used, "with_sharing": needed, "without_sharing": copies * each}
    return dataclasses.replace(found, name="parallel samples", passed=passed, text=text, numbers=numbers)


def _beams(context: ClauseContext) -> CaseVerdict:
    """Search with beams beside other requests, and hold beams and log probabilities against float64.

    Where the engine pages, the blocks of the prompt must be there once.
    """
    request = Request(name="beams", prompt=prompts([77], seed=9)[0], max_new_tokens=8, beams=4, wants_prompt=False)
    alone = context.engine.serve([request])
    beside = context.engine.serve([*requests_of()[:3], request, *requests_of()[3:6]])
    found = context.judge.beams(request, alone.completions, context.noise)
    told = context.judge.logprobs([request], [*alone.completions, *beside.completions], context.noise)
    again = [c.tokens for c in beside.completions if c.request == request.name]
    same = again == [c.tokens for c in alone.completions] or not found.numbers["decided"]
    passed, text = found.passed and told.passed and same, found.text
    if not same:
        text += "; others beside other requests"
    if not told.passed:
        text += f"; log probabilities: {told.text}"
    if context.setting.adapter.pages:
        size = context.setting.options.block_size
        each, shared = -(-(len(request.prompt) + request.max_new_tokens - 1) // size), len(request.prompt) // size
        most, used = shared + request.beams * (each - shared), max(alone.used_blocks, default=0)
        text += f"; {used} blocks at the peak, at most {most} if the prompt's are shared"
        passed = passed and used <= most and alone.blocks_after == alone.blocks_before
    return dataclasses.replace(found, passed=passed, text=text)


def _leaks(context: ClauseContext) -> CaseVerdict:
    number = context.setting.num_leak
    many = [
        Request(name=f"many-{index}", prompt=prompt, max_new_tokens=2, wants_prompt=False)
        for index, prompt in enumerate(prompts([3 + index % 40 for index in range(number)], seed=2))
    ]
    after = context.engine.serve(many)
    complete = sum(len(c.tokens) == 2 for c in after.completions)
    right = context.judge.logprobs(many, after.completions[::19], context.noise)
    text = f"{complete} of {number} requests complete; blocks in use {after.blocks_before}, then {after.blocks_after}"
    if not right.passed:
        text += f"; log probabilities: {right.text}"
    passed = complete == number and after.blocks_after == after.blocks_before == 0 and right.passed
    if context.setting.adapter.pages:
        most = context.setting.options.max_batch
        needed = -(-2 * number // most)  # a step computes a token of each of `most` requests
        text += f"; {after.steps} steps, at least {needed} with {most} requests at once"
        passed = passed and after.steps >= needed
    return CaseVerdict(name="nothing leaks", passed=passed, text=text)


def _prefix_caching(context: ClauseContext) -> CaseVerdict:
    bare = [dataclasses.replace(request, wants_prompt=False) for request in requests_of()]
    first, second = context.engine.serve(bare), context.engine.serve(bare)
    same = context.judge.same("prefix caching", bare, (first, second), context.noise)
    text = f"{same.text}; {second.cached_tokens} tokens of prompts came from the cache"
    return dataclasses.replace(same, passed=same.passed and second.cached_tokens > 0, text=text)


def _cache_under_eviction(context: ClauseContext) -> CaseVerdict:
    """Serve the prompts twice from a prefix cache that cannot hold them, and hold both runs against float64.

    The second run is backwards: of a cache that forgets what was used longest ago, only the last blocks are left.
    """
    requests = [dataclasses.replace(request, wants_prompt=False) for request in requests_of()]
    runs = [context.engine.serve(requests), context.engine.serve(requests[::-1])]
    done = [completion for run in runs for completion in run.completions]
    right, greedy = (
        context.judge.logprobs(requests, done, context.noise),
        context.judge.greedy(requests, done, context.noise),
    )
    evicted, cached = sum(run.preemptions for run in runs), sum(run.cached_tokens for run in runs)
    text = f"{_evicted(evicted)}, {cached} tokens came from the cache; {right.text}"
    if not greedy.passed:
        text += f"; {greedy.text}"
    passed = right.passed and greedy.passed and cached > 0
    numbers = {**right.numbers, "evicted": evicted}
    return dataclasses.replace(right, name="prefix cache under eviction", passed=passed, text=text, numbers=numbers)


def _ended(name: str, error: EngineError, what: str = "") -> CaseVerdict:
    return CaseVerdict(name=name, passed=False, text=f"{what}it ends the engine, and every request with it: {error}")


def _evicted(number: int) -> str:
    """Say how many requests were evicted. Engines may do without: they keep a request waiting until it fits."""
    return f"{number} requests were evicted" if number else "no request was evicted, so eviction is not judged"


def _look_alike(context: ClauseContext) -> CaseVerdict:
    """Serve prompts that a careless key takes for one another, one after the other, and a conversation that goes on."""
    base, other = prompts([100, 100], seed=5)
    kinds = [
        base,
        (other[0], *base[1:]),
        (*base[:3], base[4], base[3], *base[5:]),
        (*base[32:64], *base[:32], *base[64:]),
        (*base[:-1], other[-1]),
        (*base[:48], *other[48:]),
        (*other[:32], *base[32:]),
        (*base[:31], other[31], *base[32:]),  # the last token of a block, whatever its size
        other,
        (*other[:64], *base[64:]),  # a block after others that are known, and that is known after others itself
        base[:64],
        base[:96],
        *prompts([200, 200, 200], seed=8),  # take the blocks of a small cache
        base,
    ]
    requests = [
        Request(name=f"alike-{i}", prompt=p, max_new_tokens=NEW_TOKENS, wants_prompt=False, arrives=40 * i)
        for i, p in enumerate(kinds)
    ]
    done = context.engine.serve(requests).completions
    begun = Request(name="begun", prompt=other[:64], max_new_tokens=32, wants_prompt=False)
    (start,) = context.engine.serve([begun]).completions
    goes_on = dataclasses.replace(begun, name="goes on", prompt=(*begun.prompt, *start.tokens, *base[:9]))
    done += [start, *context.engine.serve([goes_on]).completions]
    requests += [begun, goes_on]
    name, asked = "prompts that look alike", {request.name: request.max_new_tokens for request in requests}
    if short := [c for c in done if c.tokens and len(c.tokens) != asked[c.request]]:
        text = f"{short[0].request} has {len(short[0].tokens)} of {asked[short[0].request]} tokens"
        return CaseVerdict(name=name, passed=False, text=text)
    found = context.judge.logprobs(requests, done, context.judge.noise(requests, done))
    return dataclasses.replace(found, name=name)


def _eviction(context: ClauseContext) -> CaseVerdict:
    """Serve more than the cache holds. Evicted requests go on as they were, also those that draw tokens.

    Of parallel samples some are evicted and others not.
    """
    name = "eviction"
    if context.setting.options.max_step_tokens < 60:
        name = "eviction, prompts in chunks"
    draws = _drawn([60] * 6, seed=7)
    samples = [dataclasses.replace(r, name=f"copies-{i}", copies=3, seed=100 * i) for i, r in enumerate(draws[:2])]
    evicted = {"": context.served.preemptions}
    texts, verdicts = [_evicted(context.served.preemptions)], list[CaseVerdict]()
    for kind, requests in {"those that draw tokens": draws, "parallel samples": samples}.items():
        try:
            together = context.engine.serve(requests)
            alone = context.engine.serve([dataclasses.replace(r, arrives=40 * i) for i, r in enumerate(requests)])
        except EngineError as error:
            return _ended(name, error)
        same = context.judge.same(name, requests, (alone, together), context.noise)
        evicted[kind] = together.preemptions
        texts.append(f"of {kind}: {_evicted(together.preemptions)}; {same.text}")
        verdicts.append(dataclasses.replace(same, passed=same.passed and alone.preemptions == 0))
        if not verdicts[-1].passed:
            break
    numbers = {**verdicts[-1].numbers, "evicted": min(evicted.values())}
    return dataclasses.replace(verdicts[-1], text="; ".join(texts), numbers=numbers)


def _eviction_of_beams(context: ClauseContext) -> CaseVerdict:
    """Search with beams for two requests at once, more than the cache holds, and hold both against float64."""
    requests = [
        Request(name=f"beams-{i}", prompt=prompt, max_new_tokens=12, beams=4, wants_prompt=False)
        for i, prompt in enumerate(prompts([60, 60], seed=36))
    ]
    try:
        served = context.engine.serve(requests)
    except EngineError as error:
        return _ended("eviction of beams", error)
    told = context.judge.logprobs(requests, served.completions, context.noise)
    texts, passed, decided = [_evicted(served.preemptions)], told.passed, True
    for request in requests:
        found = context.judge.beams(
            request, [c for c in served.completions if c.request == request.name], context.noise
        )
        passed, decided = passed and found.passed, decided and bool(found.numbers["decided"])
        texts.append(f"{request.name}: {found.text}")
    if not told.passed:
        texts.append(f"log probabilities: {told.text}")
    numbers = {**told.numbers, "evicted": served.preemptions, "decided": float(decided)}
    return dataclasses.replace(told, name="eviction of beams", passed=passed, text="; ".join(texts), numbers=numbers)


def _bad_requests(
    name: str, bads: Sequence[Request], judge: Judge, before: tuple[Serves, Served], noise: Noise
) -> CaseVerdict:
    """Serve requests that no engine can, each among others: it is refused, and the others are as they were."""
    engine, served = before
    requests, texts = requests_of(), list[str]()
    for bad in bads:
        try:
            mixed = engine.serve([requests[3], bad, *requests[4:6]])
        except EngineError as error:
            return _ended(name, error, f"{bad.name}: ")
        refused = [(c.request, c.tokens) for c in mixed.completions if c.error] == [(bad.name, [])]
        same = judge.same(name, requests, (served, mixed), noise)
        text = f"{bad.name}: {'refused' if refused else 'not refused'}; of the others: {same.text}"
        left = mixed.blocks_after - mixed.blocks_before
        if left:
            text += f"; {left} blocks are left over"
        texts.append(text)
        if not (same.passed and refused and not left):
            return dataclasses.replace(same, passed=False, text=text)
    return dataclasses.replace(same, text="; ".join(texts))


_CLAUSES: dict[str, Sequence[Callable[[ClauseContext], CaseVerdict]]] = {
    "plain": (
        _alone,
        _arrival,
        _stops,
        _context_limit,
        seeds,
        _temperature,
        _mixed_temperatures,
        parallel_samples,
        _stops_of_draws,
        _beams,
        _leaks,
    ),
    "chunked": (_arrival,),
    "prefix": (_prefix_caching, _look_alike, parallel_samples),
    "small-cache": (_eviction, _eviction_of_beams),
    "large-blocks": (parallel_samples, _beams),
    "all-at-once": (_arrival, _look_alike, _cache_under_eviction, _eviction),
}
"""Clauses by the variant that they are judged in."""
