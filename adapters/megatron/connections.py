"""The variable by which megatron-core's layers overlap communication with computing on a GPU."""

from __future__ import annotations

import os

_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def one_connection(device: str) -> dict[str, str]:
    """Its layers start a reduction, then the product that is to hide it, and rely on one queue to keep that order
    (`tensor_parallel/layers.py`), as Megatron-LM's own scripts set it. Read when CUDA starts; a user's value stands."""
    return {_CONNECTIONS: os.environ.get(_CONNECTIONS, "1")} if device == "cuda" else {}
