"""Images of the user's: a folder with a subfolder a class, as torchvision's ImageFolder takes it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from meshmark.errors import CorpusError

_SHADES = 256.0
"""Number of values of a channel of a pixel. Each value divided by it is exact in 16 bits too."""
_GREY = ("1", "L", "LA")
"""Modes of Pillow's that have one channel, and perhaps how opaque it is."""
_WIDE = ("I", "F")
"""Beginnings of modes whose pixels have more than 8 bits: Pillow cuts them off at 255, and nearly all become white."""
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Formats that Pillow decodes by itself. For others it tries every decoder, and some of those start programs."""
_EXPECTED = "expected a subfolder a class, with images in it"


@functools.lru_cache(maxsize=2)
def load_images(path: str) -> tuple[Tensor, Tensor]:
    """All images, float32 [images, 1 or 3, side, side] from 0 to 1, and their classes, int64 [images], in the order of
    names; grey where all of them are. Raises `CorpusError` when they cannot be trained on together."""
    classes = _class_folders(path)
    files = [(label, file) for label, folder in enumerate(classes) for file in _visible(folder)]
    for label, folder in enumerate(classes):
        if not any(label == of for of, _ in files):
            raise CorpusError(f"corpus {path!r}: class folder {folder.name!r} is empty; {_EXPECTED}")
    pixels = _pixels(path, [file for _, file in files])
    labels = torch.tensor([label for label, _ in files])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous().float() / _SHADES, labels


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
    """uint8 [images, side, side, 1 or 3]."""
    try:
        from PIL import Image
    except ImportError as error:
        raise CorpusError(f"corpus {path!r} is a folder of images, which take Pillow: pip install pillow") from error
    images = []
    for file in files:
        if not file.is_file():  # to open a pipe waits for whoever writes to it
            raise CorpusError(f"corpus {path!r}: {file} is no file; {_EXPECTED}")
        try:
            with Image.open(file, formats=_FORMATS) as image:
                if image.mode.startswith(_WIDE):
                    raise ValueError(f"its pixels have Pillow's mode {image.mode!r}; expected 8 bits a channel")
                images.append(image.convert("L" if image.mode in _GREY else "RGB"))
        except (OSError, SyntaxError, ValueError, RuntimeError, Image.DecompressionBombError) as error:
            known = f"{', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}"
            raise CorpusError(f"corpus {path!r}: {file} cannot be read as an image ({known}): {error}") from error
        width, height = images[-1].size
        if width != height:
            raise CorpusError(f"corpus {path!r}: {file} has {width} x {height} pixels; expected square images")
        if images[-1].size != images[0].size:
            raise CorpusError(
                f"corpus {path!r}: images are of unequal size: {files[0]} has {images[0].width} pixels a side, {file} "
                f"{width}; bring them to one size"
            )
    grey = all(image.mode == "L" for image in images)
    side = images[0].width
    stacked = np.stack([np.asarray(image if grey else image.convert("RGB"), dtype=np.uint8) for image in images])
    return stacked.reshape(len(images), side, side, 1 if grey else 3)
