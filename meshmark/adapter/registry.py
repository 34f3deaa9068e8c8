"""Adapters by name, and from outside the repo."""

from __future__ import annotations

import fnmatch
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path

from meshmark.adapter.capabilities import Capabilities
from meshmark.adapter.contract import Adapter
from meshmark.errors import AdapterError, UnknownNameError


def load_adapter(target: str) -> type[Adapter]:
    """The class behind "package.module:Class" or "path/to/file.py:Class".

    Raises `AdapterError` when it cannot be imported, is no `Adapter`, or lacks part of the contract.
    """
    where, _, name = target.rpartition(":")
    if not where or not name.isidentifier():
        raise AdapterError(f"adapter {target!r}: expected path/to/file.py:Class or package.module:Class")
    try:
        module = _import_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
        found = getattr(module, name)
    except (Exception, SystemExit) as error:
        raise AdapterError(f"adapter {target!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not (inspect.isclass(found) and issubclass(found, Adapter)):
        raise AdapterError(f"adapter {target!r}: {name} is not a subclass of meshmark.adapter.contract.Adapter")
    has_capabilities = isinstance(getattr(found, "capabilities", None), Capabilities)
    lacking = sorted(found.__abstractmethods__) + ([] if has_capabilities else ["capabilities"])
    if lacking:
        raise AdapterError(f"adapter {target!r} lacks {', '.join(lacking)}; see meshmark.adapter.contract.Adapter")
    return found


def _import_file(path: Path) -> object:
    """The module in `path`, imported once under a name of its own."""
    path = path.resolve()
    name = f"meshmark_outside_{path.stem}_{abs(hash(str(path))):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"no Python file at {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def builtin_adapters() -> dict[str, str]:
    """Meshmark's own adapters: name to target."""
    registry: dict[str, str] = importlib.import_module("meshmark.adapters").ADAPTERS
    return registry


def outside_name(target: str) -> str:
    """Name of an adapter from outside: its class's, in lower case."""
    return target.rpartition(":")[2].lower()


def select(patterns: list[str], known: dict[str, str]) -> dict[str, str]:
    """The part of the registry whose names match any of the shell-style patterns, or belong to a family so named:
    `fairscale` takes fairscale-oss and fairscale-fsdp.

    Raises `UnknownNameError` for a pattern that matches none.
    """
    chosen: dict[str, str] = {}
    for pattern in patterns:
        matching = [name for name in known if fnmatch.fnmatch(name, pattern) or name.startswith(f"{pattern}-")]
        if not matching:
            raise UnknownNameError("adapter", pattern, known)
        chosen |= {name: known[name] for name in matching}
    return chosen
