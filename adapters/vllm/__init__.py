"""vLLM, by its own LLMEngine, in the environment `vllm` (environments/vllm.txt).

The scheduler runs in the engine's process, so that blocks are read from its own pool. Workers of tensor parallelism are
vLLM's own processes. Model and compilation caches lie in a folder that `MESHMARK_VLLM_CACHE` names.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from meshmark.inference.contract import CacheUse, Emitted, Engine, EngineOptions, InferenceAdapter, Request
from meshmark.spec.known_gap import KnownGap


class VLLM(InferenceAdapter):
    """vLLM on one rank."""

    virtual_environment = "vllm"
    block_sizes = (32,)
    precisions: ClassVar[tuple[str, ...]] = ("fp32", "bf16", "fp8-cache", "bf16-int4-weights")
    cache_rounding = "towards zero"  # of its CPU kernels; see the known gap
    spare_blocks = 1  # the null block of its pool
    promises = {"copies": "seed + index"}
    known_gaps: ClassVar[tuple[KnownGap, ...]] = (
        KnownGap(
            clause="a token that is unknown",
            symptom="out of",
            reason="without a tokenizer, token ids of prompts are not checked",
            reproducer="vllm_unknown_token",
        ),
        KnownGap(
            clause="eviction, prompts in chunks",
            symptom="CPU Generator does not use offset",
            reason="the generator of a seeded request is rewound after a chunk, which generators of a CPU cannot be",
            reproducer="vllm_seed_chunked_prefill",
        ),
        KnownGap(
            clause="rounding of the KV cache",
            symptom="keys and values are rounded towards zero",
            reason="the kernel that writes an fp8 cache on a CPU drops the lower bits of each number",
            reproducer="vllm_cpu_fp8_cache_truncates",
        ),
    )

    @classmethod
    def environment(cls) -> dict[str, str]:
        """Return what keeps vLLM small, offline and in one process."""
        cache = os.environ.get("MESHMARK_VLLM_CACHE") or str(Path.cwd() / "results" / "inference" / "vllm-cache")
        return {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CACHE_ROOT": cache,
            "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(rank) for rank in range(cls.tp)),
            "HF_HUB_OFFLINE": "1",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # a function is sent to workers, which reads the size of a cache
        }

    def build(self, model: Path, options: EngineOptions) -> Engine:
        from vllm import EngineArgs, LLMEngine

        from meshmark.inference.model import PRECISIONS

        precision = PRECISIONS[options.precision]
        arguments = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            dtype=str(precision.dtype).removeprefix("torch."),
            kv_cache_dtype="fp8" if precision.cache_dtype else "auto",
            tensor_parallel_size=self.tp,
            block_size=options.block_size,
            num_gpu_blocks_override=options.num_blocks,
            enable_prefix_caching=options.prefix_caching,
            enable_chunked_prefill=True,
            max_num_seqs=options.max_batch,
            max_num_batched_tokens=options.max_step_tokens,
            max_model_len=options.context_limit,
            disable_log_stats=True,
            enforce_eager=True,
            seed=0,
        )
        return VLLMEngine(LLMEngine.from_engine_args(arguments), options)


class VLLMTensorParallel(VLLM):
    """vLLM on two tensor-parallel ranks."""

    tp = 2
    precisions = ("fp32", "bf16", "fp8-cache")  # the kernel of 4-bit weights takes no half of 96 inputs


class VLLMEngine(Engine):
    """vLLM's LLMEngine, step by step."""

    def __init__(self, engine: Any, options: EngineOptions) -> None:  # noqa: ANN401
        self._engine, self._options = engine, options
        self._scheduler = engine.engine_core.engine_core.scheduler
        self._pool = self._scheduler.kv_cache_manager.block_pool
        self._given = dict[tuple[str, int], int]()
        self._told = set[tuple[str, int]]()
        self._preemptions = self._cached = 0
        self._counted = dict[str, int]()
        """Preemptions counted so far, by request."""

    def submit(self, request: Request) -> None:
        from vllm import SamplingParams, TokensPrompt
        from vllm.exceptions import VLLMValidationError
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            n=request.copies,
            max_tokens=request.max_new_tokens,
            temperature=request.temperature,
            seed=request.seed,
            stop_token_ids=list(request.stop),
            logprobs=0,
            prompt_logprobs=0 if request.wants_prompt else None,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.CUMULATIVE,
        )
        try:
            self._engine.add_request(request.name, TokensPrompt(prompt_token_ids=list(request.prompt)), sampling)
        except VLLMValidationError as error:
            raise ValueError(str(error)) from error

    def step(self, emit: Callable[[Emitted], None]) -> None:
        for output in self._engine.step():
            if output.finished:
                self._cached += output.num_cached_tokens or 0
            for each in output.outputs:
                key = (output.request_id, each.index)
                old = self._given.get(key, 0)
                new = tuple(each.token_ids)[old:]
                self._given[key] = old + len(new)
                found = (each.logprobs or [])[old:]
                prompt = None
                if output.prompt_logprobs and key not in self._told:
                    self._told.add(key)
                    rows = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
                    prompt = tuple(row[token].logprob for row, token in rows)
                emit(
                    Emitted(
                        request=key[0],
                        copy=key[1],
                        tokens=new,
                        logprobs=tuple(row[token].logprob for row, token in zip(found, new, strict=True)),
                        prompt_logprobs=prompt,
                        finish=each.finish_reason or "",
                    )
                )
                if each.finish_reason:
                    self._given.pop(key)
                    self._told.discard(key)
        for request in (*self._scheduler.running, *self._scheduler.waiting):
            self._preemptions += max(request.num_preemptions - self._counted.get(request.request_id, 0), 0)
            self._counted[request.request_id] = request.num_preemptions

    def is_busy(self) -> bool:
        return bool(self._engine.has_unfinished_requests())

    def used_blocks(self) -> int:
        return int(self._pool.num_gpu_blocks - 1 - self._pool.get_num_free_blocks())

    def cache(self) -> CacheUse:
        sizes = self._engine.collective_rpc(_kv_bytes)
        return CacheUse(
            block_size=self._options.block_size, num_blocks=self._pool.num_gpu_blocks, bytes_by_rank=tuple(sizes)
        )

    def preemptions(self) -> int:
        return self._preemptions

    def cached_tokens(self) -> int:
        return self._cached

    def close(self) -> None:
        self._engine.engine_core.shutdown()


def _kv_bytes(worker: Any) -> int:  # noqa: ANN401
    """Return the bytes of a worker's KV cache."""
    storages = [tensor.untyped_storage() for tensor in worker.model_runner.kv_caches]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())  # layers may share one
