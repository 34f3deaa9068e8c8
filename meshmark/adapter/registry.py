"""Adapters by name, and from outside the repo."""

from __future__ import annotations

import fnmatch
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

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


class _Checkout(MetaPathFinder):
    """Finds a few packages in the checkout, before any installed ones of their names, and nothing else there."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names, self.root = names, str(Path(__file__).parent.parent)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return PathFinder.find_spec(fullname, [self.root]) if fullname in self.names else None


def find_in_checkout(*names: str) -> None:
    """Have `import` take the packages of these names from beside `meshmark`, where it is a checkout: without a folder
    on the path, from which other names could be taken (the working directory may be a stranger's)."""
    sys.meta_path.insert(0, _Checkout(names))


def builtin_adapters() -> dict[str, str]:
    """The registry of the checkout: name to target.

    Raises `AdapterError` when there is none, or when `adapters` is somebody else's package (one exists on PyPI).
    """
    try:
        module = importlib.import_module("adapters")
    except ImportError as error:
        raise AdapterError(
            "no adapters: the wheel ships the core alone; run inside a checkout of Meshmark, or name --adapter"
        ) from error
    registry = getattr(module, "ADAPTERS", None)
    if not isinstance(registry, dict):
        raise AdapterError(
            f"the package `adapters` at {module.__file__} is not Meshmark's; run from the checkout, or uninstall it"
        )
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
