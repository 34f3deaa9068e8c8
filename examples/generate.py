"""An engine that generates text without a cache: each token is computed from the whole sequence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from meshmark.inference.contract import CacheUse, Emitted, Engine, EngineOptions, InferenceAdapter, Request
from meshmark.inference.model import PRECISIONS


class GeneratingEngine(Engine):
    def __init__(self, model: Any, context_limit: int) -> None:  # noqa: ANN401
        self._model, self._limit = model, context_limit
        self._running: list[tuple[Request, int, list[int], torch.Generator]] = []

    def submit(self, request: Request) -> None:
        vocabulary = self._model.config.vocab_size
        if not 0 < len(request.prompt) < self._limit:
            raise ValueError(f"a prompt of {len(request.prompt)} tokens; expected 1 to {self._limit - 1}")
        if any(not 0 <= token < vocabulary for token in request.prompt):
            raise ValueError(f"a token that is not in the vocabulary of {vocabulary}")
        for copy in range(request.copies):
            draws = torch.Generator().manual_seed((request.seed or 0) + copy)
            self._running.append((request, copy, list(request.prompt), draws))

    @torch.no_grad()
    def step(self, emit: Callable[[Emitted], None]) -> None:
        for one in tuple(self._running):
            request, copy, tokens, draws = one
            logprobs = self._model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
            prompt = None
            if request.wants_prompt and len(tokens) == len(request.prompt):
                prompt = tuple(float(row[token]) for row, token in zip(logprobs, tokens[1:], strict=False))
            if request.temperature:
                token = int(torch.multinomial((logprobs[-1] / request.temperature).softmax(-1), 1, generator=draws))
            else:
                token = int(logprobs[-1].argmax())
            tokens.append(token)
            limit = min(len(request.prompt) + request.max_new_tokens, self._limit)
            finish = "stop" if token in request.stop else "length" if len(tokens) >= limit else ""
            emit(
                Emitted(
                    request=request.name,
                    copy=copy,
                    tokens=(token,),
                    logprobs=(float(logprobs[-1, token]),),
                    prompt_logprobs=prompt,
                    finish=finish,
                )
            )
            if finish:
                self._running.remove(one)

    def is_busy(self) -> bool:
        return bool(self._running)

    def used_blocks(self) -> int:
        return 0

    def cache(self) -> CacheUse:
        return CacheUse(block_size=1, num_blocks=0, bytes_by_rank=(0,))


class Generate(InferenceAdapter):
    pages = False
    promises = {"copies": "seed + index"}

    def build(self, model: Path, options: EngineOptions) -> Engine:
        import transformers

        loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=PRECISIONS[options.precision].dtype)
        return GeneratingEngine(loaded, options.context_limit)
