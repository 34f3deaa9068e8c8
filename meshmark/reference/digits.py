"""The digit images that scikit-learn ships, read from its own file: importing `sklearn.datasets` takes seconds, and
every rank of every launch would pay them."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from meshmark.errors import InputError

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
