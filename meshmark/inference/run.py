"""Run a case of an engine, and judge it: one process, one model, every load and clause that the variant is for."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshmark import environment
from meshmark.inference.contract import EngineOptions, Request, Served
from meshmark.inference.judge import Judge, Noise, Verdict, cache_bytes, peak_blocks
from meshmark.inference.model import prompts, shape_of, write_model
from meshmark.inference.process import EngineError, EngineProcess, load_engine

VARIANTS: dict[str, Mapping[str, object]] = {
    "plain": {},
    "chunked": {"max_step_tokens": 48},
    "prefix": {"prefix_caching": True},
    "small-cache": {"num_blocks": 12},
}
"""Options of engines that differ from the default, by what they are for."""
LENGTHS = (1, 2, 5, 31, 32, 33, 63, 64, 65, 100, 150, 200)
"""Tokens of the prompts: around the ends of blocks, and longer than one step of "chunked"."""
NEW_TOKENS = 16
LOAD = (16, 64, 32)
"""Of the timed load: requests that arrive at once, tokens of each prompt, new tokens of each."""
BAD = {
    "a prompt that is too long": Request(name="too long", prompt=prompts([400])[0], max_new_tokens=4),
    "a token that is unknown": Request(name="unknown token", prompt=(5, 1_000_000), max_new_tokens=4),
}
"""Requests that engines must refuse, by the clause. The last one to come ends an engine that checks nothing."""
_SAMPLED = {"temperature": 1.0, "wants_prompt": False}


@dataclass(frozen=True, kw_only=True)
class InferenceCase:
    """An engine, and what it serves."""

    engine: str
    target: str
    model: str = "llama-tiny"
    precision: str = "fp32"
    variant: str = "plain"

    @property
    def id(self) -> str:
        return f"{self.engine}-{self.variant}-{self.model}-{self.precision}"

    def options(self) -> EngineOptions:
        adapter = load_engine(self.target)
        base = EngineOptions(precision=self.precision, tp=adapter.tp, block_size=adapter.block_sizes[0])
        return dataclasses.replace(base, **VARIANTS[self.variant])  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class InferenceRecord:
    """What was found of a case: one line of records.jsonl."""

    case: dict[str, str]
    verdicts: list[Verdict]
    speed: dict[str, float] = field(default_factory=dict)
    error: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    commit: str = ""
    machine: str = ""
    date: str = ""

    @property
    def passed(self) -> bool:
        return not self.error and all(verdict.passed for verdict in self.verdicts)

    def line(self) -> str:
        """Return the record as a line of JSON."""
        return json.dumps(dataclasses.asdict(self)) + "\n"


def read_inference(path: Path) -> list[InferenceRecord]:
    """Return the records of a file, of each case the last."""
    found = {}
    for line in path.read_text().splitlines():
        values = json.loads(line)
        verdicts = [Verdict(**verdict) for verdict in values.pop("verdicts")]
        record = InferenceRecord(**values, verdicts=verdicts)
        found[json.dumps(record.case)] = record
    return list(found.values())


def run_case(case: InferenceCase, results: Path, num_leak: int = 1000) -> InferenceRecord:
    """Run a case and append its record to `results`/records.jsonl. One clause serves `num_leak` requests."""
    folder = results / "models" / case.model
    if not (folder / "config.json").exists():
        write_model(case.model, folder)
    verdicts, speed, versions, error = list[Verdict](), dict[str, float](), dict[str, str](), ""
    try:
        with EngineProcess(case.target, folder, case.options(), results / "logs" / f"{case.id}.log") as engine:
            versions = dict(engine.versions)
            judge = Judge(folder, case.precision)
            if case.variant == "plain":
                speed = _speed(engine)  # first, for the last clause may end the engine
            for verdict in _judged(case, engine, judge, num_leak):
                verdicts.append(verdict)  # what was judged before an engine fails is kept
    except EngineError as failed:
        error = str(failed)
    around = environment.describe("cpu", "", 1)
    record = InferenceRecord(
        case={"engine": case.engine, "variant": case.variant, "model": case.model, "precision": case.precision},
        verdicts=verdicts,
        speed=speed,
        error=error,
        versions=versions,
        commit=around.commit,
        machine=around.machine,
        date=around.date,
    )
    results.mkdir(parents=True, exist_ok=True)
    with (results / "records.jsonl").open("a") as file:
        file.write(record.line())
    return record


def requests_of(lengths: Sequence[int] = LENGTHS) -> list[Request]:
    """Return the requests that every engine serves."""
    return [
        Request(name=f"prompt-{len(prompt)}", prompt=prompt, max_new_tokens=NEW_TOKENS) for prompt in prompts(lengths)
    ]


def _judged(case: InferenceCase, engine: EngineProcess, judge: Judge, num_leak: int) -> Iterator[Verdict]:
    adapter, options, requests = load_engine(case.target), case.options(), requests_of()
    served = engine.serve(requests)
    if refused := [c for c in served.completions if c.error]:
        yield Verdict(name="serves", passed=False, text=f"{refused[0].request}: {refused[0].error}")
        return
    noise = judge.noise(requests, served.completions)
    yield judge.logprobs(requests, served.completions, noise)
    yield judge.greedy(requests, served.completions, noise)
    blocks = options.num_blocks
    if not adapter.pages:  # one batch, padded to its longest prompt
        blocks = len(requests) * (max(LENGTHS) + NEW_TOKENS - 1)
    yield cache_bytes(served, shape_of(case.model), case.precision, options.tp, blocks)
    if case.variant == "prefix":
        bare = [dataclasses.replace(request, wants_prompt=False) for request in requests]
        first, second = engine.serve(bare), engine.serve(bare)
        same = judge.same("prefix caching", requests, (first, second), noise)
        text = f"{same.text}; {second.cached_tokens} tokens of prompts came from the cache"
        yield dataclasses.replace(same, passed=same.passed and second.cached_tokens > 0, text=text)
    if case.variant == "small-cache":
        text = f"{served.preemptions} requests were evicted, and have float64's tokens"
        yield Verdict(name="eviction", passed=served.preemptions > 0, text=text)
    if case.variant == "plain":
        if adapter.pages:
            yield peak_blocks(served, requests, options.block_size)
        yield from _clauses(engine, judge, served, noise, num_leak)


def _clauses(engine: EngineProcess, judge: Judge, served: Served, noise: Noise, num_leak: int) -> Iterator[Verdict]:
    requests = requests_of()
    alone = [dataclasses.replace(request, arrives=40 * index) for index, request in enumerate(requests)]
    yield judge.same("alone", requests, (served, engine.serve(alone)), noise)
    backwards = [dataclasses.replace(request, arrives=2 * index) for index, request in enumerate(requests[::-1])]
    yield judge.same("order and arrival", requests, (served, engine.serve(backwards)), noise)
    yield _stops(engine, requests, served)
    yield _context_limit(engine)
    sampled = [
        Request(name=f"drawn-{index}", prompt=prompt, max_new_tokens=NEW_TOKENS, seed=index, **_SAMPLED)  # type: ignore[arg-type]
        for index, prompt in enumerate(prompts([8, 40], seed=1))
    ]
    drawn = engine.serve(sampled)
    yield judge.same("seeds", sampled, (drawn, engine.serve([*requests[:3], *sampled[::-1]])), noise)
    yield _copies(engine, judge, noise)
    many = [
        Request(name=f"many-{index}", prompt=prompt, max_new_tokens=2, wants_prompt=False)
        for index, prompt in enumerate(prompts([3 + index % 40 for index in range(num_leak)], seed=2))
    ]
    after = engine.serve(many)
    complete = sum(len(c.tokens) == 2 for c in after.completions)
    text = f"{complete} of {num_leak} requests complete; blocks in use {after.blocks_before}, then {after.blocks_after}"
    passed = complete == num_leak and after.blocks_after == after.blocks_before == 0
    yield Verdict(name="nothing leaks", passed=passed, text=text)
    for name, bad in BAD.items():
        yield _bad_request(name, bad, judge, (engine, served), noise)


def _bad_request(name: str, bad: Request, judge: Judge, before: tuple[EngineProcess, Served], noise: Noise) -> Verdict:
    """Serve a request that no engine can, among others: it is refused, and the others are as they were."""
    engine, served = before
    requests = requests_of()
    try:
        mixed = engine.serve([requests[3], bad, *requests[4:6]])
    except EngineError as error:
        return Verdict(name=name, passed=False, text=f"it ends the engine, and every request with it: {error}")
    refused = [c.request for c in mixed.completions if c.error] == [bad.name]
    same = judge.same(name, requests, (served, mixed), noise)
    text = f"{'refused' if refused else 'not refused'}; of the others: {same.text}"
    return dataclasses.replace(same, passed=same.passed and refused, text=text)


def _stops(engine: EngineProcess, requests: Sequence[Request], served: Served) -> Verdict:
    """Serve again with a token as stop that is known to come, and expect the completion to end with it."""
    request, tokens = requests[5], served.completions[5].tokens
    expected = tokens[: tokens.index(tokens[6]) + 1]
    again = engine.serve([dataclasses.replace(request, stop=(tokens[6],))]).completions[0]
    passed = again.tokens == expected and again.finish == "stop"
    text = f"ended with {again.finish!r} after {len(again.tokens)} tokens, expected 'stop' after {len(expected)}"
    return Verdict(name="stop tokens", passed=passed, text=text)


def _context_limit(engine: EngineProcess) -> Verdict:
    limit, length = EngineOptions().context_limit, 250
    prompt = prompts([length])[0]
    found = engine.serve([Request(name="long", prompt=prompt, max_new_tokens=40)]).completions[0]
    passed = len(found.tokens) == limit - length and found.finish == "length"
    text = f"{length} + {len(found.tokens)} tokens of {limit}, ended with {found.finish or found.error!r}"
    return Verdict(name="context limit", passed=passed, text=text)


def _copies(engine: EngineProcess, judge: Judge, noise: Noise) -> Verdict:
    """Serve parallel samples, and each of them as a request of its own with the seed that the engine promises."""
    prompt = prompts([45], seed=3)[0]
    base = Request(name="copies", prompt=prompt, max_new_tokens=NEW_TOKENS, seed=11, **_SAMPLED)  # type: ignore[arg-type]
    together = engine.serve([dataclasses.replace(base, copies=3)])
    apart = engine.serve([dataclasses.replace(base, name=f"copy-{index}", seed=11 + index) for index in range(3)])
    for index, completion in enumerate(apart.completions):
        completion.request, completion.copy = "copies", index
    found = judge.same("parallel samples", [base], (together, apart), noise)
    distinct = len({tuple(c.tokens) for c in together.completions})
    return dataclasses.replace(found, passed=found.passed and distinct == 3, text=f"{found.text}; {distinct} distinct")


def _speed(engine: EngineProcess) -> dict[str, float]:
    """Return rates under the timed load, of the second of two runs: tokens a second, and seconds."""
    number, length, new = LOAD
    requests = [
        Request(name=f"load-{index}", prompt=prompt, max_new_tokens=new, wants_prompt=False)
        for index, prompt in enumerate(prompts([length] * number, seed=4))
    ]
    engine.serve(requests)
    done = engine.serve(requests).completions
    firsts, lasts = [c.first_token - c.arrived for c in done], [c.last_token for c in done]
    start = max(c.first_token for c in done)
    return {
        "prefill": number * length / start,
        "decode": number * (new - 1) / max(max(lasts) - start, 1e-9),
        "first_token": statistics.median(firsts),
    }
