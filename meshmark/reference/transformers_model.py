"""Models of Hugging Face Transformers, by their own modelling code, from a config.json: `--workload hf:FILE.json`.

Weights are random and nothing is downloaded. Batches are made from the config's sizes, and the loss is computed here
from the logits, as a sum and its weight: the mean losses of Transformers' own heads are means of means as soon as
rows are dealt to ranks.

Shape suffixes: B rows, T positions, V vocabulary.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as modules

from meshmark.environment import memory_bytes
from meshmark.errors import InputError
from meshmark.models.hub_config import LARGEST, read_object
from meshmark.reference.data import IGNORED
from meshmark.spec.own_model import HUGGING_FACE

DEFAULT_HEAD = "AutoModelForCausalLM"
_CONTRASTIVE = "AutoModelForZeroShotImageClassification"
_SHORTEST_PART = 4
"""At least one in this many of a row's targets counts, so that rows have unequal weights."""
_FOUND = 0.3
"""Part of the tokens of a row that a masked language model is to find again."""
_LARGEST_FILE = 2**22
"""Bytes of the largest config. Those of image classifiers list up to 21,841 classes twice, in about 2 MB."""
_DEEPEST = 50
"""Objects and lists within one another. Published configs have at most 6."""
_MOST_LAYERS, _MOST_CLASSES, _MOST_POSITIONS, _MOST_MODULES = 2000, 100_000, 10**9, 50_000
_LIMITS: tuple[tuple[tuple[str, ...], float], ...] = (
    (("theta", "base", "token_id", "seed"), math.inf),
    (("position", "length", "seq", "window"), _MOST_POSITIONS),
)
"""Largest whole numbers of keys that have one of some words in them: they are no sizes, or may exceed `LARGEST`."""
_LIMITS_BY_END: tuple[tuple[tuple[str, ...], int], ...] = (
    (("layer", "layers", "depth", "depths"), _MOST_LAYERS),
    (("labels", "classes"), _MOST_CLASSES),
)
"""Largest whole numbers of keys that end so: Transformers makes lists of them as soon as it reads the config."""
_LONGEST_ERROR = 500
_IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")
_LOCAL = ("eager", "sdpa")
"""Implementations that are part of Transformers and PyTorch. Others are, or stand for, kernels from the hub."""


class TransformersWorkload:
    """A model of Transformers with random weights, on synthetic data of the shapes that its config asks for.

    A subclass in a file of your own takes other sizes: give `config`, and any of `head`, `rows` and `length`.
    """

    config: ClassVar[str]
    """Path of a config.json, relative to the working directory."""
    head: ClassVar[str] = DEFAULT_HEAD
    """Name of an auto class in Transformers, such as `AutoModelForSequenceClassification`."""
    rows: ClassVar[int] = 8
    """Rows of the global batch."""
    length: ClassVar[int] = 32
    """Tokens of a row; fewer where the model has fewer positions."""

    def __init__(self) -> None:
        if self.head not in HEADS:
            raise InputError(f"Meshmark has no data for the head {self.head!r}; expected one of {', '.join(HEADS)}")
        self._config = _read_config(Path(self.config))
        self._expect_room()

    def _expect_room(self) -> None:
        """Raise `InputError` if the model has no room in this machine's memory, before any of it is allocated."""
        held = dict[int, Tensor]()  # holds what it counts, so that no two have one id
        num_values = num_modules = 0

        def add_tensor(_module: nn.Module, _name: str, tensor: Tensor | None) -> None:
            nonlocal num_values
            if tensor is None or id(tensor) in held:
                return
            held[id(tensor)] = tensor
            num_values += tensor.numel()
            if told := _beyond_memory(num_values):
                raise InputError(f"{HUGGING_FACE}{self.config}: the model {told}; take smaller sizes in the file")

        def add_module(_module: nn.Module, _name: str, _part: nn.Module | None) -> None:
            nonlocal num_modules
            num_modules += 1
            if num_modules > _MOST_MODULES:
                raise InputError(f"{HUGGING_FACE}{self.config}: over {_MOST_MODULES:,} modules; take fewer layers")

        hooks = [
            modules.register_module_parameter_registration_hook(add_tensor),
            modules.register_module_buffer_registration_hook(add_tensor),
            modules.register_module_module_registration_hook(add_module),
        ]
        try:
            with torch.random.fork_rng(devices=[]), torch.device("meta"):
                self.model()
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def couples_rows(self) -> bool:
        """True if the loss compares rows with one another."""
        return self.head == _CONTRASTIVE

    @property
    def digest(self) -> str:
        """Digest of the config and the head, which distinguishes models."""
        values = {key: value for key, value in self._config.to_dict().items() if key != "transformers_version"}
        text = json.dumps([values, self.head], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def model(self) -> nn.Module:
        """Return the model with random weights, in float32 and with the plain loop over experts."""
        import transformers

        config = copy.deepcopy(self._config)
        auto = getattr(transformers, self.head)
        # Grouped products over experts sort tokens, and have no float64.
        arguments = {"experts_implementation": "eager"} if _has_experts(config) else {}
        try:
            for part in (config, config.get_text_config()):
                if getattr(part, "use_cache", False):
                    # Keys and values for generation, which a block that is run again would add twice.
                    part.use_cache = False
            # If a file names code of its own, Transformers would ask whether to download and run it.
            made = auto.from_config(config, dtype=torch.float32, trust_remote_code=False, **arguments)
        except InputError:
            raise
        except Exception as error:
            if isinstance(error, ValueError) and type(config) not in auto._model_mapping:
                raise InputError(
                    f"{self.config}: Transformers has no {self.head} of model_type {config.model_type!r}; name another "
                    f"head, one of {', '.join(HEADS)}, as {HUGGING_FACE}FILE.json:HEAD"
                ) from error
            raise InputError(
                f"{HUGGING_FACE}{self.config}: Transformers makes no model of this config: {type(error).__name__}: "
                f"{str(error)[:_LONGEST_ERROR]}"
            ) from error
        return cast(nn.Module, made)

    def batch(self, step: int) -> dict[str, Tensor]:
        """Return the global batch of `step`: what the model takes, and `labels`."""
        drawn = torch.Generator().manual_seed(step)
        try:
            return _BATCHES[self.head](self._config, self.rows, self.length, drawn)
        except Exception as error:
            raise InputError(
                f"{HUGGING_FACE}{self.config}: no batch fits this config: {type(error).__name__}: "
                f"{str(error)[:_LONGEST_ERROR]}"
            ) from error

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the cross-entropy of all labels that count, summed, and their number."""
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        if self.couples_rows:
            return self._contrastive(model(**inputs).logits_per_image), self.weight(batch)
        logits = model(**inputs).logits
        wide = logits if logits.dtype is torch.float64 else logits.float()
        labels = batch["labels"]
        total = F.cross_entropy(wide.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return total, self.weight(batch)

    def _contrastive(self, logits_BB: Tensor) -> Tensor:
        """Return CLIP's loss of the rows that are here together, summed (arXiv:2103.00020, figure 3)."""
        wide = logits_BB if logits_BB.dtype is torch.float64 else logits_BB.float()
        own = torch.arange(len(wide), device=wide.device)
        return (F.cross_entropy(wide, own, reduction="sum") + F.cross_entropy(wide.T, own, reduction="sum")) / 2

    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the number of labels that count."""
        return (batch["labels"] != IGNORED).sum()


def from_target(target: str) -> TransformersWorkload:
    """Return the workload of "hf:FILE.json" or "hf:FILE.json:HEAD"."""
    path, head = parts_of(target)
    made: TransformersWorkload = type(Path(path).stem, (TransformersWorkload,), {"config": path, "head": head})()
    return made


def parts_of(target: str) -> tuple[str, str]:
    """Return the file and the head of "hf:FILE.json:HEAD"; the head is by default that of causal language models."""
    path, _, head = target.removeprefix(HUGGING_FACE).partition(".json")
    if not path or not (head == "" or head.startswith(":")):
        raise InputError(f"workload {target!r}: expected {HUGGING_FACE}FILE.json or {HUGGING_FACE}FILE.json:HEAD")
    return f"{path}.json", head.removeprefix(":") or DEFAULT_HEAD


def _read_config(path: Path) -> Any:  # noqa: ANN401
    """Return the config in the file. Raises `InputError` for one that cannot be read, or has randomness in it."""
    try:
        import transformers
    except ImportError as error:
        raise InputError(
            f"{HUGGING_FACE}{path}: Transformers is not installed: pip install 'meshmark[transformers]'"
        ) from error
    named = f"{HUGGING_FACE}{path}"
    values = read_object(path, named, largest=_LARGEST_FILE)
    if "model_type" not in values:
        raise InputError(f"{named}: no model_type; expected a JSON file with one, as Hugging Face's config.json")
    for keys, value in _leaves(named, (), values):
        _expect_size(named, keys, value)
        _expect_no_download(named, keys, value)
    kind = values.pop("model_type")
    try:
        config = transformers.AutoConfig.for_model(kind, **values)
        found = list(_entries("", config.to_dict()))
    except Exception as error:
        raise InputError(f"{named}: Transformers takes no such config: {str(error)[:_LONGEST_ERROR]}") from error
    if dropped := [f"{key}={value}" for key, value in found if _draws(key) and _is_positive(value)]:
        raise InputError(
            f"{HUGGING_FACE}{path}: {', '.join(dropped)}: random numbers differ between layouts, so set these to 0 in "
            "the file (what a file leaves out has Transformers' default)"
        )
    if auxiliary := [key for key, value in found if key.endswith("output_router_logits") and value]:
        raise InputError(
            f"{HUGGING_FACE}{path}: {', '.join(auxiliary)} is true: the auxiliary loss of all tokens of a micro-batch "
            "depends on which rows share it, and is not judged; set it to false"
        )
    return config


def _leaves(named: str, keys: tuple[str, ...], value: object) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yield what is no object and no list, with the keys under which it stands."""
    if len(keys) > _DEEPEST:
        raise InputError(f"{named}: over {_DEEPEST} objects and lists within one another, which no config.json has")
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _leaves(named, (*keys, key), part)
    elif isinstance(value, list):
        for part in value:
            yield from _leaves(named, (*keys, ""), part)
    else:
        yield keys, value


def _expect_size(named: str, keys: Sequence[str], value: object) -> None:
    """Raise `InputError` for a number that no published config has.

    Transformers makes lists of layers and of classes when it reads the config, so this comes before.
    """
    if not isinstance(value, int) or value <= _MOST_LAYERS:
        return
    key = next((key for key in reversed(keys) if key), "")
    by_end = [limit for ends, limit in _LIMITS_BY_END if key.endswith(ends)]
    by_word = [limit for words, limit in _LIMITS if any(word in key for word in words)]
    limit = (by_end or by_word or [LARGEST])[0]
    if value > limit:
        raise InputError(f"{named}: {key} is {str(value)[:40]}, expected at most {limit:,}")


def _expect_no_download(named: str, keys: Sequence[str], value: object) -> None:
    """Raise `InputError` for a setting with which Transformers fetches something from the hub, or runs it from there.

    An `auto_map` needs no such check: its code is not trusted, so Transformers' own is taken.
    """
    if not isinstance(value, str):
        return
    told = f"{named}: {'.'.join(filter(None, keys))} is {value[:40]!r}"
    ends = tuple(key.removesuffix("_internal") for key in keys)
    if any(key.endswith(_IMPLEMENTATIONS) for key in ends) and value not in _LOCAL:
        raise InputError(
            f"{told}, expected 'eager', 'sdpa' or null: others are kernels of the hub, and nothing is downloaded here"
        )
    if keys[-1] == "backbone" or (keys[-1] == "architecture" and ":" in value):
        raise InputError(f"{told}, which Transformers would look up on the hub, and nothing is downloaded here")


def _beyond_memory(num_values: int) -> str:
    """Return how much memory so many values take in float32, if this machine has less; otherwise an empty string."""
    needed, memory = 4 * num_values, memory_bytes()
    if needed <= memory:
        return ""
    return f"takes at least {needed / 1e9:,.1f} GB in float32, and this machine has {memory / 1e9:,.1f} GB"


def _entries(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _entries(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", value


def _draws(key: str) -> bool:
    """Return whether a key of a config turns random numbers on."""
    return any(word in key.rpartition(".")[2] for word in ("drop", "jitter"))


def _is_positive(value: object) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool) and value > 0


def _has_experts(config: Any) -> bool:  # noqa: ANN401
    return any("experts" in key for key, _ in _entries("", config.to_dict()))


def _tokens(config: Any, shape: tuple[int, int], drawn: torch.Generator) -> Tensor:  # noqa: ANN401
    """Tokens of which small numbers are the more frequent, as in text. The lowest four are left out: they are often
    padding, or mark a start or an end, which some models look for."""
    uniform = torch.rand(shape, generator=drawn, dtype=torch.float64)
    vocabulary: int = config.vocab_size
    return (4 + (vocabulary - 4) * uniform.square()).long().clamp(max=vocabulary - 1)


def _normal(drawn: torch.Generator, *shape: int) -> Tensor:
    """Normally distributed numbers, as long as they fit in this machine's memory."""
    if told := _beyond_memory(math.prod(shape)):
        raise ValueError(f"it {told}")
    return torch.randn(shape, generator=drawn)


def _length(config: Any, length: int) -> int:  # noqa: ANN401
    """As many tokens as the model has positions for, at most."""
    positions = [
        getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "max_target_positions")
    ]
    return min([length, *(p for p in positions if isinstance(p, int))])


def _scored_labels(labels_BT: Tensor, drawn: torch.Generator) -> Tensor:
    """Labels of which a tail of every row does not count, in each another."""
    B, T = labels_BT.shape
    length_B = torch.randint(max(T // _SHORTEST_PART, 1), T + 1, (B, 1), generator=drawn)
    return labels_BT.masked_fill(torch.arange(T) >= length_B, IGNORED)


def _causal(config: Any, rows: int, length: int, drawn: torch.Generator) -> dict[str, Tensor]:  # noqa: ANN401
    text = config.get_text_config()
    window_BT = _tokens(text, (rows, _length(text, length) + 1), drawn)
    return {"input_ids": window_BT[:, :-1].contiguous(), "labels": _scored_labels(window_BT[:, 1:], drawn)}


def _masked(config: Any, rows: int, length: int, drawn: torch.Generator) -> dict[str, Tensor]:  # noqa: ANN401
    tokens_BT = _tokens(config, (rows, _length(config, length)), drawn)
    found_BT = torch.rand(tokens_BT.shape, generator=drawn) < _FOUND
    found_BT[0, 0] = True
    return {"input_ids": tokens_BT.masked_fill(found_BT, 3), "labels": tokens_BT.masked_fill(~found_BT, IGNORED)}


def _seq2seq(config: Any, rows: int, length: int, drawn: torch.Generator) -> dict[str, Tensor]:  # noqa: ANN401
    made = _causal(config, rows, length, drawn)
    tokens_BT = _tokens(config, (rows, _length(config, length)), drawn)
    return {"input_ids": tokens_BT, "decoder_input_ids": made["input_ids"], "labels": made["labels"]}


def _classes(config: Any, rows: int, drawn: torch.Generator) -> Tensor:  # noqa: ANN401
    """A class a row; a quarter of the rows does not count."""
    labels_B = torch.randint(config.num_labels, (rows,), generator=drawn)
    return labels_B.masked_fill(torch.arange(rows) % 4 == 1, IGNORED)


def _sequences(config: Any, rows: int, length: int, drawn: torch.Generator) -> dict[str, Tensor]:  # noqa: ANN401
    text = config.get_text_config()
    tokens_BT = _tokens(text, (rows, _length(text, length)), drawn)
    return {"input_ids": tokens_BT, "labels": _classes(config, rows, drawn)}


def _token_classes(config: Any, rows: int, length: int, drawn: torch.Generator) -> dict[str, Tensor]:  # noqa: ANN401
    tokens_BT = _tokens(config, (rows, _length(config, length)), drawn)
    labels_BT = torch.randint(config.num_labels, tokens_BT.shape, generator=drawn)
    return {"input_ids": tokens_BT, "labels": _scored_labels(labels_BT, drawn)}


def _images(config: Any, rows: int, length: int, drawn: torch.Generator) -> dict[str, Tensor]:  # noqa: ANN401
    side = getattr(config, "image_size", length)
    height, width = side if isinstance(side, list | tuple) else (side, side)
    pixels = _normal(drawn, rows, config.num_channels, height, width)
    return {"pixel_values": pixels, "labels": _classes(config, rows, drawn)}


def _speech(config: Any, rows: int, length: int, drawn: torch.Generator) -> dict[str, Tensor]:  # noqa: ANN401
    made = _causal(config, rows, length, drawn)
    features = _normal(drawn, rows, config.num_mel_bins, 2 * config.max_source_positions)
    return {"input_features": features, "decoder_input_ids": made["input_ids"], "labels": made["labels"]}


def _pairs(config: Any, rows: int, length: int, drawn: torch.Generator) -> dict[str, Tensor]:  # noqa: ANN401
    """Images and texts; row by row they belong together."""
    text, vision = config.text_config, config.vision_config
    tokens_BT = _tokens(text, (rows, _length(text, length)), drawn)
    tokens_BT[:, -1] = text.eos_token_id  # where the text tower reads its feature
    labels_B = torch.zeros(rows, dtype=torch.int64)
    return {
        "input_ids": tokens_BT,
        "pixel_values": _images(vision, rows, length, drawn)["pixel_values"],
        "labels": labels_B,
    }


_BATCHES: dict[str, Callable[[Any, int, int, torch.Generator], dict[str, Tensor]]] = {
    "AutoModelForCausalLM": _causal,
    "AutoModelForMaskedLM": _masked,
    "AutoModelForSeq2SeqLM": _seq2seq,
    "AutoModelForSequenceClassification": _sequences,
    "AutoModelForTokenClassification": _token_classes,
    "AutoModelForImageClassification": _images,
    "AutoModelForSpeechSeq2Seq": _speech,
    _CONTRASTIVE: _pairs,
}
HEADS = tuple(_BATCHES)
