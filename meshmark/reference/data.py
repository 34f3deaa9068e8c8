"""Real text and real images, and the global batches cut from them.

A batch is a function of (seed, step) alone: every rank builds the whole of it and trains on its part, so that no
layout can see other data than another. Shape suffixes: B rows, T tokens.

The digit images are read from the file that scikit-learn ships: importing `sklearn.datasets` takes seconds, which every
rank of every launch would pay. A user's images are a folder with one subfolder per class, as torchvision's ImageFolder
takes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from meshmark.errors import CorpusError, InputError
from meshmark.models.config import Dataset, ImageModelConfig
from meshmark.models.module import random_bits
from meshmark.spec.workload import Workload

if TYPE_CHECKING:
    from PIL import Image

# --- A folder of the user's images.

_SHADES = 256.0
"""Number of values of a channel of a pixel. Each value divided by it is exact in 16 bits too."""
_GREY = ("1", "L", "LA")
"""Modes of Pillow's that have one channel, and perhaps how opaque it is."""
_WIDE = ("I", "F")
"""Beginnings of modes whose pixels have more than 8 bits: Pillow cuts them off at 255, and nearly all become white."""
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Formats that Pillow decodes by itself. For others it tries every decoder, and some of those start programs."""
_LARGEST_SIDE = 1024
"""Pixels a side of the largest image. A batch of some tens of larger ones would take gigabytes as float32."""
_MOST_VALUES = 2**30
"""Values of all images together, of a byte each, which every rank keeps in memory: 7,000 colour images of 224 x 224."""
_EXPECTED = "expected a subfolder a class, with images in it"


@functools.lru_cache(maxsize=2)
def load_images(path: str) -> tuple[Tensor, Tensor]:
    """All images, uint8 [images, 1 or 3, side, side], and their classes, int64 [images], in the order of names; grey
    where all of them are. Raises `CorpusError` when they cannot be trained on together."""
    classes = _class_folders(path)
    files = [(label, file) for label, folder in enumerate(classes) for file in _visible(folder)]
    for label, folder in enumerate(classes):
        if not any(label == of for of, _ in files):
            raise CorpusError(f"corpus {path!r}: class folder {folder.name!r} is empty; {_EXPECTED}")
    pixels = _pixels(path, [file for _, file in files])
    labels = torch.tensor([label for label, _ in files])
    return torch.from_numpy(pixels), labels


def shown(images: Tensor) -> Tensor:
    """Images as a model takes them: float32 from 0 to 1. Those in a cache are bytes, a quarter of that."""
    return images.float() / _SHADES if images.dtype is torch.uint8 else images


def _visible(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))


def _class_folders(path: str) -> list[Path]:
    try:
        entries = _visible(Path(path))
    except OSError as error:
        raise CorpusError(
            f"corpus {path!r} cannot be read: {error.strerror}; images are a folder: {_EXPECTED}"
        ) from error
    if not entries:
        raise CorpusError(f"corpus {path!r} is empty; {_EXPECTED}")
    classes = [entry for entry in entries if entry.is_dir()]
    if len(classes) < 2:
        found = f"one class folder, {classes[0].name!r}" if classes else "no class folders"
        raise CorpusError(f"corpus {path!r} has {found}; {_EXPECTED}, of at least two classes")
    return classes


def _pixels(path: str, files: Sequence[Path]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """uint8 [images, 1 or 3, side, side]. All sizes are looked at before the first image is decoded: a small file may
    hold any number of pixels of one colour."""
    sides, greys = [], []
    for file in files:
        with _opened(path, file) as image:
            width, height = image.size
            greys.append(image.mode in _GREY)
        if width != height:
            raise CorpusError(f"corpus {path!r}: {file} has {width} x {height} pixels; expected square images")
        if width > _LARGEST_SIDE:
            raise CorpusError(
                f"corpus {path!r}: {file} has {width} x {height} pixels; expected at most {_LARGEST_SIDE} x "
                f"{_LARGEST_SIDE}: scale the images down"
            )
        sides.append(width)
        if width != sides[0]:
            raise CorpusError(
                f"corpus {path!r}: images are of unequal size: {files[0]} has {sides[0]} pixels a side, {file} "
                f"{width}; bring them to one size"
            )
    grey = all(greys)
    shape = (len(files), 1 if grey else 3, sides[0], sides[0])
    if math.prod(shape) > _MOST_VALUES:
        raise CorpusError(
            f"corpus {path!r}: {len(files)} images of {sides[0]} x {sides[0]} pixels have {math.prod(shape):,} values; "
            f"expected at most {_MOST_VALUES:,}: scale the images down, or leave some out"
        )
    pixels = np.empty(shape, dtype=np.uint8)
    for into, file in zip(pixels, files, strict=True):  # one by one: Pillow's copy of an image is freed before the next
        with _opened(path, file) as image:
            plain = image.convert("L" if image.mode in _GREY else "RGB")
            values = np.asarray(plain if grey else plain.convert("RGB"), dtype=np.uint8)
            into[:] = values.reshape(*values.shape[:2], -1).transpose(2, 0, 1)
    return pixels


@contextlib.contextmanager
def _opened(path: str, file: Path) -> Iterator[Image.Image]:
    """An image of which only the size and the mode have been read. Raises `CorpusError` for what is no image, also
    where it is decoded."""
    try:
        from PIL import Image
    except ImportError as error:
        raise CorpusError(f"corpus {path!r} is a folder of images, which take Pillow: pip install pillow") from error
    if not file.is_file():  # to open a pipe waits for whoever writes to it
        raise CorpusError(f"corpus {path!r}: {file} is no file; {_EXPECTED}")
    try:
        with Image.open(file, formats=_FORMATS) as image:
            if image.mode.startswith(_WIDE):
                raise ValueError(f"its pixels have Pillow's mode {image.mode!r}; expected 8 bits a channel")
            yield image
    except (OSError, SyntaxError, ValueError, RuntimeError, Image.DecompressionBombError) as error:
        known = f"{', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}"
        raise CorpusError(f"corpus {path!r}: {file} cannot be read as an image ({known}): {error}") from error


# --- The digit images that scikit-learn ships.

_FILE = Path("datasets", "data", "digits.csv.gz")
_SIDE, _BRIGHTEST = 8, 16.0


@functools.cache
def load_digits() -> tuple[Tensor, Tensor]:
    """All images, float32 [images, 1, 8, 8] from 0 to 1, and their labels, int64 [images]: what
    `sklearn.datasets.load_digits` returns. Raises `InputError` when scikit-learn is not installed."""
    spec = importlib.util.find_spec("sklearn")
    folders = list(spec.submodule_search_locations or []) if spec else []
    if not folders:
        raise InputError(
            "the data set digits is part of scikit-learn, which is not installed: pip install scikit-learn"
        )
    path = Path(folders[0]) / _FILE
    if not path.is_file():
        raise InputError(f"this scikit-learn has no {_FILE}, where the digits were up to 1.9: pip install scikit-learn")
    table = torch.from_numpy(np.loadtxt(path, delimiter=",", dtype=np.float32))
    return (table[:, :-1] / _BRIGHTEST).view(-1, 1, _SIDE, _SIDE), table[:, -1].long()


# --- Real text and real images, and the global batches cut from them.

IGNORED = -100
"""Target of a masked position; `torch.nn.functional.cross_entropy` leaves it out by default."""
HIDDEN = 0
"""The byte that stands for one to be found again: text has none of it."""
FOUND_PERCENT = 15
"""Percentage of the bytes of masked text that are to be predicted."""
_LARGEST_TEXT = 2**30
"""Bytes of the longest text, which every rank holds whole. The usual large one, enwik9, has a billion."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Some rows of one global batch: sequences, or images."""

    inputs: Any
    """Inputs of the model, rows first: a tensor or, for a user's own workload, any tree of tensors."""
    targets: Tensor
    """int64 classes, rows first; `IGNORED` where masked."""
    weights: Tensor
    """float32, one a target: how much it counts in the loss; zero where masked."""
    total_weight: float
    """Weight of the *global* batch, whichever part of it this is. The loss is divided by it."""
    skipped_block: int | None = None
    """A block of the model that this step leaves out."""
    frozen: tuple[str, ...] = ()
    """Prefixes of the parameters that this step does not train."""

    def __len__(self) -> int:
        return len(self.targets)

    def trains(self, name: str) -> bool:
        """Whether this step trains the parameter with this canonical name."""
        return not name.startswith(self.frozen)

    def each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The same rows, with `change` made to every tensor."""
        inputs = pytree.tree_map(change, self.inputs)
        return dataclasses.replace(self, inputs=inputs, targets=change(self.targets), weights=change(self.weights))

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors of these rows."""
        return (*pytree.tree_leaves(self.inputs), self.targets, self.weights)

    def take(self, index: Tensor) -> Batch:
        """The rows at these positions, in this order."""
        return self.each(lambda tensor: tensor[index])

    def rows(self, start: int, stop: int) -> Batch:
        return self.each(lambda tensor: tensor[start:stop])

    def shard(self, rank: int, num_ranks: int) -> Batch:
        """The rows of data-parallel `rank`: a contiguous 1/num_ranks of them."""
        size = len(self) // num_ranks
        return self.rows(rank * size, (rank + 1) * size)

    def micro_batches(self, count: int) -> Iterator[Batch]:
        for i in range(count):
            yield self.shard(i, count)

    def to(self, device: torch.device) -> Batch:
        """Where this is pinned, without waiting for the copy."""
        return self.each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> Batch:
        """In host memory that a GPU copies from by itself: copies of any other hold its stream up."""
        return self.each(Tensor.pin_memory)


def standard_text() -> bytes:
    """The documentation topics inside Python's standard library: English text of some 470 kB on every machine."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics)).encode()


def read_corpus(path: str | None) -> bytes:
    """The bytes to train on. Raises `CorpusError` when the file is missing, unreadable, empty or too long."""
    if path is None:
        return standard_text()
    if Path(path).exists() and not (Path(path).is_file() or Path(path).is_dir()):  # a device may have no end
        raise CorpusError(f"corpus {path!r} is no regular file; name a file with text in it")
    try:
        if (size := Path(path).stat().st_size) > _LARGEST_TEXT:
            raise CorpusError(
                f"corpus {path!r} has {size:,} bytes; expected at most {_LARGEST_TEXT:,}, as every rank reads all of "
                "it: name a part of it"
            )
        text = Path(path).read_bytes()
    except OSError as error:
        raise CorpusError(f"corpus {path!r} cannot be read: {error.strerror}; name an existing file") from error
    if not text:
        raise CorpusError(f"corpus {path!r} is empty; name a file with text in it")
    return text


@functools.lru_cache(maxsize=2)
def load_corpus(path: str | None, at_least: int) -> Tensor:
    """The corpus as uint8 [number of bytes]. Raises `CorpusError` when it is shorter than `at_least` bytes."""
    text = read_corpus(path)
    if len(text) < at_least:
        raise CorpusError(f"corpus {path!r} has {len(text)} bytes; one sequence takes {at_least}: name a longer file")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def images_of(workload: Workload) -> tuple[Tensor, Tensor]:
    """All images that a workload is trained on, as they are kept (`shown` has what a model takes), and their classes.
    Raises `CorpusError` when they cannot be read."""
    return load_digits() if workload.corpus is None else load_images(workload.corpus)


def on_corpus(workload: Workload, path: str | None) -> Workload:
    """`workload` on the text at `path`, or on the folder of images, in whose size, channels and classes its model then
    is; named after it: its stem, in characters that need no quotes in a shell, and a digest of what it holds, for two
    may share a name. Raises `CorpusError` when it cannot be read."""
    if path is None:
        return workload
    model = workload.model
    if workload.dataset is Dataset.OWN:
        raise InputError(f"--corpus {path!r}: workload {workload.name!r} makes its own batches; leave --corpus out")
    if workload.dataset is Dataset.DIGITS:
        images, labels = load_images(path)
        _, channels, side, _ = images.shape
        model = model.on_images(num_channels=channels, image_size=side, num_classes=int(labels.max()) + 1)
        digest = _digest_of(images, labels)
    else:
        digest = hashlib.sha256(read_corpus(path)).hexdigest()
    stem = re.sub(r"[^A-Za-z0-9]+", "_", Path(path).stem).strip("_")[:20]
    name = ".".join(part for part in (workload.name, stem, digest[:8]) if part)
    return dataclasses.replace(workload, name=name, model=model, corpus=path)


def _digest_of(images: Tensor, labels: Tensor) -> str:
    """A hash of images as a model takes them, and of their classes. One by one, as all of them are four times as large
    in float32."""
    digest = hashlib.sha256()
    for image in images:
        digest.update(shown(image).numpy().data)
    digest.update(labels.numpy().data)
    return digest.hexdigest()


def _uniform(name: str, count: int, bound: int, *, seed: int) -> Tensor:
    """`count` integers in [0, bound), int64 [count], by (seed, name) alone."""
    return (random_bits(name, (count,), seed=seed) & (2**63 - 1)).remainder(bound)


def check_data(workload: Workload) -> None:
    """Raise `InputError` now rather than in every rank, when the workload's data cannot serve: a corpus that is not
    there or too short, a vocabulary too small, a package that is not installed."""
    model = workload.model
    if workload.dataset is Dataset.OWN:
        return  # looked at when the workload was described
    if isinstance(model, ImageModelConfig):
        images, labels = images_of(workload)
        source = workload.corpus or "the digits"
        fits = (model.num_channels, model.image_size, model.image_size) == images.shape[1:]
        if not fits or model.num_classes <= int(labels.max()):
            raise InputError(
                f"model {model.name!r} takes {model.num_channels} x {model.image_size} x {model.image_size} pixels of "
                f"{model.num_classes} classes; {source} have {tuple(images.shape[1:])} of {int(labels.max()) + 1}"
            )
        return
    load_corpus(workload.corpus, model.seq_len + 1)
    if workload.text_model.vocab_size < 256:
        raise CorpusError(
            f"model {model.name!r} has a vocabulary of {workload.text_model.vocab_size}; byte-level data needs 256"
        )


def data_digest(workload: Workload) -> str:
    """A hash of all that batches are cut from."""
    if workload.dataset is Dataset.DIGITS:
        return _digest_of(*images_of(workload))
    digest = hashlib.sha256()
    if workload.dataset is Dataset.OWN:
        for leaf in pytree.tree_leaves(make_batch(workload, 0).inputs):
            digest.update(leaf.contiguous().numpy().data)
    else:
        digest.update(load_corpus(workload.corpus, workload.model.seq_len + 1).numpy().data)
    return digest.hexdigest()


def make_batch(workload: Workload, step: int) -> Batch:
    """Global batch `step` of a workload, on the CPU."""
    if workload.dataset is Dataset.OWN:
        from meshmark.reference import own_model  # here, for it makes batches of this module's kind

        return own_model.make_batch(workload, step)
    makers = {Dataset.DIGITS: _digits_batch, Dataset.MASKED_TEXT: _masked_text_batch, Dataset.TEXT: _text_batch}
    return makers[workload.dataset](workload, step)


def _text_batch(workload: Workload, step: int) -> Batch:
    """Tokens and the next ones, [global_batch, seq_len]. With `masked`, each sequence keeps a random 1/4 to all of its
    targets, so that token counts differ between rows."""
    B, T = workload.global_batch, workload.model.seq_len
    corpus = load_corpus(workload.corpus, T + 1)
    start_B = _uniform(f"offsets/{step}", B, len(corpus) - T, seed=workload.seed)
    window_BT = corpus[start_B[:, None] + torch.arange(T + 1)].long()
    targets_BT = window_BT[:, 1:].clone()
    if workload.masked:
        length_B = T // 4 + _uniform(f"lengths/{step}", B, T - T // 4 + 1, seed=workload.seed)
        targets_BT[torch.arange(T) >= length_B[:, None]] = IGNORED
    return _batch(workload, step, window_BT[:, :-1].contiguous(), targets_BT)


def hidden(tokens: Tensor, found: Tensor, tenths: Tensor, others: Tensor) -> Tensor:
    """`tokens` of which those to be `found` again are hidden in 8 of 10 cases, in one another, in one as they were
    (arXiv:1810.04805, section 3.1). All of one shape; `tenths` from 0 to 9."""
    return torch.where(found & (tenths == 8), others, tokens.masked_fill(found & (tenths < 8), HIDDEN))


def _masked_text_batch(workload: Workload, step: int) -> Batch:
    """Tokens, some of them hidden, and what they were, [global_batch, seq_len]: by chance more in one row than in
    another. Without `masked` all are to be found."""
    B, T = workload.global_batch, workload.model.seq_len
    corpus = load_corpus(workload.corpus, T + 1)
    start_B = _uniform(f"offsets/{step}", B, len(corpus) - T, seed=workload.seed)
    window_BT = corpus[start_B[:, None] + torch.arange(T)].long()

    def drawn(name: str, bound: int) -> Tensor:
        return _uniform(f"{name}/{step}", B * T, bound, seed=workload.seed).view(B, T)

    found_BT = drawn("found", 100) < FOUND_PERCENT
    inputs_BT = hidden(window_BT, found_BT, drawn("tenths", 10), drawn("others", 256))
    targets_BT = window_BT.masked_fill(~found_BT, IGNORED) if workload.masked else window_BT
    return _batch(workload, step, inputs_BT, targets_BT)


def _digits_batch(workload: Workload, step: int) -> Batch:
    """Images [global_batch, channels, side, side] and their classes [global_batch]. With `masked`, a
    random third of the images does not count, so that ranks and micro-batches hold unequal numbers that do."""
    images, labels = images_of(workload)
    B = workload.global_batch
    drawn_B = _uniform(f"images/{step}", B, len(images), seed=workload.seed)
    targets_B = labels[drawn_B]
    if workload.masked:
        targets_B[_uniform(f"masks/{step}", B, 3, seed=workload.seed) == 0] = IGNORED
    return _batch(workload, step, shown(images[drawn_B]), targets_B)


def _batch(workload: Workload, step: int, inputs: Tensor, targets: Tensor) -> Batch:
    weights = (targets != IGNORED).float()
    return Batch(
        inputs=inputs,
        targets=targets,
        weights=weights,
        total_weight=float(weights.sum()),
        skipped_block=workload.skipped_at(step),
        frozen=workload.frozen_at(step),
    )
