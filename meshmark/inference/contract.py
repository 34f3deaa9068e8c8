"""The interface that inference engines are put behind: options, requests, completions, engine and adapter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from meshmark.adapter.contract import Requirement
from meshmark.environment import interpreter_of
from meshmark.spec.known_gap import KnownGap


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How an engine is built."""

    precision: str = "fp32"
    """A name of `model.PRECISIONS`: formats of computation, weights and KV cache."""
    block_size: int = 32
    """Tokens of one block of the KV cache."""
    num_blocks: int = 64
    """Blocks of the KV cache."""
    tp: int = 1
    """Tensor-parallel ranks."""
    prefix_caching: bool = False
    max_batch: int = 16
    """Requests that run at once, at most."""
    max_step_tokens: int = 1024
    """Tokens of one step, at most. Longer prompts are prefilled in chunks."""
    context_limit: int = 256
    """Tokens of a prompt and its completion together, at most."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and how to continue it."""

    name: str
    prompt: tuple[int, ...]
    """Token ids."""
    max_new_tokens: int
    temperature: float = 0.0
    """0 takes the most probable token."""
    seed: int | None = None
    """Seed of the request's own draws. Needed if `temperature` is not 0."""
    stop: tuple[int, ...] = ()
    """Token ids that end the completion, and are its last token."""
    copies: int = 1
    """Parallel samples of one prompt."""
    beams: int = 1
    """Beams of a beam search that returns them all, the most probable first. It draws nothing and stops at no token."""
    wants_prompt: bool = True
    """True if the log probabilities of the prompt are asked for. Engines with a prefix cache do not use it then."""
    arrives: int = 0
    """Step of the engine before which the request is submitted."""

    @property
    def num_sequences(self) -> int:
        """Completions that the request has: parallel samples or beams."""
        return max(self.copies, self.beams)


@dataclass(frozen=True, kw_only=True)
class Emitted:
    """One generated token, or the end of a sequence."""

    request: str
    copy: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    """Log probability of each of `tokens`, before temperature."""
    prompt_logprobs: tuple[float, ...] | None = None
    """Log probabilities of all prompt tokens but the first; given once."""
    finish: str = ""
    """"stop", "length" or "error" if the sequence has ended."""


@dataclass(kw_only=True)
class Completion:
    """The answer for one sequence."""

    request: str
    copy: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    finish: str = ""
    error: str = ""
    """Message, if the engine refused the request, by a `ValueError` or by the finish "error"."""
    arrived: float = 0.0
    """Seconds since serving began; so are the next two."""
    first_token: float = 0.0
    last_token: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CacheUse:
    """The KV cache as it lies in memory."""

    block_size: int
    num_blocks: int
    bytes_by_rank: tuple[int, ...]
    """Bytes of the tensors of each rank, by what they hold, not by what was planned."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """The result of serving some requests."""

    completions: list[Completion]
    seconds: float
    steps: int
    used_blocks: tuple[int, ...]
    """Blocks in use after each step."""
    live_tokens: tuple[tuple[int, ...], ...]
    """After each step, the tokens of each unfinished sequence whose keys and values are needed: all but the last one
    generated. Of sequences without a generated token nothing is known, and they are left out."""
    blocks_before: int
    blocks_after: int
    preemptions: int = 0
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    cache: CacheUse | None = None


@dataclass(frozen=True, kw_only=True)
class Failed:
    """What an engine's process sends if it cannot serve."""

    text: str
    no_space: bool
    """True if a full disk is the cause."""


class Engine(ABC):
    """An engine that serves requests step by step. It neither times nor judges itself."""

    @abstractmethod
    def submit(self, request: Request) -> None:
        """Take a request. Raises `ValueError` for one that the engine refuses."""

    @abstractmethod
    def step(self, emit: Callable[[Emitted], None]) -> None:
        """Compute a step, and emit each token as soon as it is known."""

    @abstractmethod
    def is_busy(self) -> bool:
        """Return whether a request is not finished."""

    @abstractmethod
    def used_blocks(self) -> int:
        """Return how many blocks of the cache belong to requests that are not finished."""

    @abstractmethod
    def cache(self) -> CacheUse:
        """Return the KV cache as it lies in memory."""

    def preemptions(self) -> int:
        """Return how often a request was evicted so far."""
        return 0

    def cached_tokens(self) -> int:
        """Return how many prompt tokens came from the prefix cache so far."""
        return 0

    def close(self) -> None:  # noqa: B027
        """End the engine's own processes."""


class InferenceAdapter(ABC):
    """An adapter for one engine. Its module must be importable without the engine, which `build` imports."""

    virtual_environment: ClassVar[str] = ""
    """Name of the virtual environment that the engine runs in; empty for Meshmark's own. `make env` makes it."""
    requires: ClassVar[tuple[Requirement, ...]] = ()
    tp: ClassVar[int] = 1
    """Tensor-parallel ranks that this adapter stands for."""
    block_sizes: ClassVar[tuple[int, ...]] = (32,)
    """Block sizes that it is judged at. 1 for a cache without blocks."""
    precisions: ClassVar[tuple[str, ...]] = ("fp32", "bf16")
    """Names of `model.PRECISIONS` that the engine computes in."""
    pages: ClassVar[bool] = True
    """True if the cache has blocks that are given out one by one. Without, it is judged as one batch, padded to its
    longest sequence, with `num_blocks` tokens; or not at all, if `num_blocks` is 0, for an engine that keeps none."""
    promises: ClassVar[Mapping[str, str]] = {}
    """Behaviour that the engine declares: "copies" names the seeds of parallel samples ("seed + index" is judged),
    "sharing" the blocks that they share, "beams" how it searches."""
    cache_rounding: ClassVar[str] = "nearest"
    """How keys and values become those of a narrower cache: "nearest", or "towards zero"."""
    spare_blocks: ClassVar[int] = 0
    """Blocks of `num_blocks` that the engine keeps for itself."""
    known_gaps: ClassVar[tuple[KnownGap, ...]] = ()
    """Verdicts that the engine is known to fail, by name."""

    @abstractmethod
    def build(self, model: Path, options: EngineOptions) -> Engine:
        """Return an engine for the model in a folder that Transformers' `from_pretrained` reads."""

    @classmethod
    def environment(cls) -> dict[str, str]:
        """Return variables that the engine reads when it is imported."""
        return {}

    @classmethod
    def refusal(cls) -> str | None:
        """Return why the engine cannot run here, or None."""
        if name := cls.virtual_environment:
            there = interpreter_of(name).exists()
            return None if there else f"the environment {name} is not there: make env NAME={name}"
        return next((reason for requirement in cls.requires if (reason := requirement.missing)), None)
