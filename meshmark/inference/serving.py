"""Drive an engine: submit requests when they arrive, time every token, count blocks."""

from __future__ import annotations

import time
from collections.abc import Sequence

from meshmark.inference.contract import Completion, Emitted, Engine, Request, Served

MOST_STEPS = 20_000
"""An engine that is still busy after so many steps is taken to hang."""


def serve(engine: Engine, requests: Sequence[Request]) -> Served:
    """Serve requests to their ends.

    A request that the engine refuses becomes a completion with `error`. Raises `RuntimeError` for an engine that does
    not end, or names a request that nobody sent.
    """
    begun, before = time.perf_counter(), engine.used_blocks()
    preempted, cached = engine.preemptions(), engine.cached_tokens()
    completions = {
        (r.name, copy): Completion(request=r.name, copy=copy) for r in requests for copy in range(r.num_sequences)
    }
    waiting = sorted(requests, key=lambda request: request.arrives)
    prompt_of = {request.name: len(request.prompt) for request in requests}
    used, live = list[int](), list[tuple[int, ...]]()

    def emit(emitted: Emitted) -> None:
        key = (emitted.request, emitted.copy)
        if key not in completions:
            raise RuntimeError(f"the engine emitted tokens of {key}, which nobody asked for")
        completion, now = completions[key], time.perf_counter() - begun
        if emitted.tokens:
            completion.first_token = completion.first_token or now
            completion.last_token = now
        completion.tokens += emitted.tokens
        completion.logprobs += emitted.logprobs
        if emitted.prompt_logprobs is not None:
            completion.prompt_logprobs = list(emitted.prompt_logprobs)
        completion.finish = emitted.finish or completion.finish
        if emitted.finish == "error":
            completion.error = completion.error or "the engine ended it with an error"

    step = 0
    while waiting or engine.is_busy():
        while waiting and waiting[0].arrives <= step:
            request = waiting.pop(0)
            for copy in range(request.num_sequences):
                completions[request.name, copy].arrived = time.perf_counter() - begun
            try:
                engine.submit(request)
            except ValueError as error:
                for copy in range(request.num_sequences):
                    completions[request.name, copy].error = f"{type(error).__name__}: {error}"
        if engine.is_busy():
            engine.step(emit)
            used.append(engine.used_blocks())
            running = (c for c in completions.values() if c.tokens and not c.finish)
            live.append(tuple(prompt_of[c.request] + len(c.tokens) - 1 for c in running))
        step += 1
        if step > MOST_STEPS:
            raise RuntimeError(f"the engine is still busy after {MOST_STEPS} steps")
    return Served(
        completions=list(completions.values()),
        seconds=time.perf_counter() - begun,
        steps=step,
        used_blocks=tuple(used),
        live_tokens=tuple(live),
        blocks_before=before,
        blocks_after=engine.used_blocks(),
        preemptions=engine.preemptions() - preempted,
        cached_tokens=engine.cached_tokens() - cached,
        cache=engine.cache(),
    )
