"""`generate` of Hugging Face Transformers: one static batch at a time, padded on the left, with a dynamic cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from meshmark.adapter.contract import Requirement
from meshmark.inference.contract import CacheUse, Emitted, Engine, EngineOptions, InferenceAdapter, Request
from meshmark.inference.model import PRECISIONS, left_padded, load_model


class TransformersGenerate(InferenceAdapter):
    """`model.generate`, by the batch."""

    requires = (Requirement(module="transformers", distribution="transformers"),)
    block_sizes = (1,)
    pages = False
    promises: ClassVar[dict[str, str]] = {
        "copies": "seed + index",  # of the adapter: it draws each copy under its own seed
        "beams": "the most probable, of one length",
    }

    def build(self, model: Path, options: EngineOptions) -> Engine:
        return GenerateEngine(load_model(model, PRECISIONS[options.precision].dtype), options)


class GenerateEngine(Engine):
    """Serves what is waiting as one batch.

    Requests that draw random numbers or search with beams run alone: `generate` has one seed and one number of beams.
    """

    def __init__(self, model: Any, options: EngineOptions) -> None:  # noqa: ANN401
        self._model, self._options = model, options
        self._waiting: list[Request] = []
        self._cache = CacheUse(block_size=1, num_blocks=0, bytes_by_rank=(0,))

    def submit(self, request: Request) -> None:
        if not request.prompt or len(request.prompt) >= self._options.context_limit:
            raise ValueError(
                f"a prompt of {len(request.prompt)} tokens; expected 1 to {self._options.context_limit - 1}"
            )
        vocabulary = self._model.config.vocab_size
        if wrong := [token for token in request.prompt if not 0 <= token < vocabulary]:
            raise ValueError(f"token {wrong[0]} is not in the vocabulary of {vocabulary}")
        self._waiting.append(request)

    def step(self, emit: Callable[[Emitted], None]) -> None:
        if searching := next((request for request in self._waiting if request.beams > 1), None):
            self._waiting.remove(searching)
            self._search(searching, emit)
            return
        drawn = [request for request in self._waiting if request.temperature]
        if drawn:
            batch = [drawn[0]]
        else:
            batch = self._waiting[: self._options.max_batch]
        self._waiting = [request for request in self._waiting if request not in batch]
        for copy in range(batch[0].copies if drawn else 1):
            self._generate(batch, copy, emit)
        if not drawn:
            for request in batch:
                for copy in range(1, request.copies):
                    self._generate([request], copy, emit)

    @torch.no_grad()
    def _generate(self, batch: Sequence[Request], copy: int, emit: Callable[[Emitted], None]) -> None:
        import transformers

        longest = max(len(request.prompt) for request in batch)
        ids, mask = left_padded([request.prompt for request in batch], longest)
        limits = [min(r.max_new_tokens, self._options.context_limit - len(r.prompt)) for r in batch]
        held: dict[str, torch.Tensor] = {}
        done = [False] * len(batch)

        class Watch(transformers.LogitsProcessor):  # type: ignore[misc]
            def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
                held["logprobs"] = scores.float().log_softmax(-1)
                return scores

        class Ends(transformers.StoppingCriteria):  # type: ignore[misc]
            def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
                count = input_ids.shape[1] - longest
                for row, request in enumerate(batch):
                    if done[row]:
                        continue
                    token = int(input_ids[row, -1])
                    stops = token in request.stop
                    done[row] = stops or count >= limits[row]
                    emit(
                        Emitted(
                            request=request.name,
                            copy=copy,
                            tokens=(token,),
                            logprobs=(float(held["logprobs"][row, token]),),
                            finish="stop" if stops else "length" if done[row] else "",
                        )
                    )
                return torch.tensor(done)

        temperature = batch[0].temperature
        if temperature:
            torch.manual_seed((batch[0].seed or 0) + copy)
        out = self._model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max(limits),
            do_sample=bool(temperature),
            **({"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}),
            logits_processor=transformers.LogitsProcessorList([Watch()]),
            stopping_criteria=transformers.StoppingCriteriaList([Ends()]),
            return_dict_in_generate=True,
            pad_token_id=0,
        )
        self._note_cache(out.past_key_values)
        if any(request.wants_prompt for request in batch):
            self._report_prompts(batch, copy, (ids, mask), emit)

    def _note_cache(self, cache: Any) -> None:  # noqa: ANN401
        layers = [(layer.keys, layer.values) for layer in cache.layers]
        keys = layers[0][0]
        self._cache = CacheUse(
            block_size=1,
            num_blocks=keys.shape[0] * keys.shape[2],
            bytes_by_rank=(sum(t.untyped_storage().nbytes() for pair in layers for t in pair),),
        )

    @torch.no_grad()
    def _search(self, request: Request, emit: Callable[[Emitted], None]) -> None:
        """Generate by a beam search, and emit its beams in its order."""
        out = self._model.generate(
            input_ids=torch.tensor([request.prompt]),
            max_new_tokens=min(request.max_new_tokens, self._options.context_limit - len(request.prompt)),
            num_beams=request.beams,
            num_return_sequences=request.beams,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            pad_token_id=0,
        )
        logprobs = self._model.compute_transition_scores(out.sequences, out.scores, out.beam_indices)
        for copy, (tokens, told) in enumerate(zip(out.sequences[:, len(request.prompt) :], logprobs, strict=True)):
            beam = Emitted(
                request=request.name,
                copy=copy,
                tokens=tuple(tokens.tolist()),
                logprobs=tuple(told.tolist()),
                finish="length",
            )
            emit(beam)
        self._note_cache(out.past_key_values)

    def _report_prompts(
        self,
        batch: Sequence[Request],
        copy: int,
        padded: tuple[torch.Tensor, torch.Tensor],
        emit: Callable[[Emitted], None],
    ) -> None:
        """Emit log probabilities of prompts, which `generate` has no option for, by one more pass."""
        ids, mask = padded
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        out = self._model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
        logprobs = out.logits.float().log_softmax(-1)
        for row, request in enumerate(batch):
            start = ids.shape[1] - len(request.prompt)
            told = [float(logprobs[row, start + i, t]) for i, t in enumerate(request.prompt[1:])]
            emit(Emitted(request=request.name, copy=copy, prompt_logprobs=tuple(told)))

    def is_busy(self) -> bool:
        return bool(self._waiting)

    def used_blocks(self) -> int:
        return 0  # between batches there is no cache

    def cache(self) -> CacheUse:
        return self._cache
