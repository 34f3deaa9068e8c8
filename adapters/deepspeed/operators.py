"""DeepSpeed's own operators in C++: compiled once by `make install`, loaded by every rank that needs one.

DeepSpeed compiles an operator when it is first used, for minutes, under a lock that a killed run leaves behind. A case
compiles nothing: what is not there is a skip that says how to build it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType

FOLDER = Path(sys.prefix) / "share" / "meshmark" / "operators"
"""Folder of operators in the environment that DeepSpeed is installed in."""
_BUILDERS = {"cpu_adam": "CPUAdamBuilder", "async_io": "AsyncIOBuilder", "pin_memory": "PinMemoryBuilder"}
"""DeepSpeed's name of each operator, and of what compiles it."""
_SHARED = {"pin_memory"}
"""Operators whose symbols others need: `async_io`, which is loaded after it."""
_COMMAND = "python -m meshmark.adapters.deepspeed.operators"


def missing(*names: str) -> str | None:
    """Why ranks cannot load the operators called so; None when they can. Imports nothing."""
    absent = [name for name in names if not (FOLDER / f"{name}.so").is_file()]
    return f"DeepSpeed's {', '.join(absent)} is not built: {_COMMAND} {' '.join(absent)}" if absent else None


def load(*names: str) -> None:
    """Give DeepSpeed these operators, so that it compiles none."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    for name in names:
        OpBuilder._loaded_ops[name] = _module(name)


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.so")
    assert spec and spec.loader
    flags = sys.getdlopenflags()
    sys.setdlopenflags(flags | os.RTLD_GLOBAL if name in _SHARED else flags)
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.setdlopenflags(flags)
    return module


def build(name: str) -> None:
    """Compile one operator, by DeepSpeed's own builder, in a folder of its own; put it in place when it is whole."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # ninja's
    with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
        os.environ["TORCH_EXTENSIONS_DIR"] = scratch
        from deepspeed.ops import op_builder

        getattr(op_builder, _BUILDERS[name])().load(verbose=False)
        shutil.copy(Path(scratch) / name / f"{name}.so", Path(scratch) / "whole")
        os.replace(Path(scratch) / "whole", FOLDER / f"{name}.so")


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for asked in sys.argv[1:] or ["cpu_adam"]:
        build(asked)
