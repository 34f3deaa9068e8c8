"""Global random generators besides PyTorch's, from which a module may draw as well."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def host_random() -> dict[str, Any]:
    """Return the states of Python's generator and, if NumPy is imported, of NumPy's, in numbers and tensors."""
    version, words, gauss = random.getstate()
    found: dict[str, Any] = {"python": [version, torch.tensor(words), gauss]}
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *rest = numpy.random.get_state()
        found["numpy"] = [name, torch.from_numpy(keys.astype("int64")), *rest]
    return found


def set_host_random(states: dict[str, Any]) -> None:
    """Set both generators to recorded states."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    if "numpy" in states:
        import numpy as np

        name, keys, *rest = states["numpy"]
        np.random.set_state((name, keys.numpy().astype("uint32"), *rest))
