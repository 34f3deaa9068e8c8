"""Import classes named as "package.module:Class" or "path/to/file.py:Class"."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def import_module_of(where: str) -> ModuleType:
    """Return the module named by the part of a target before its colon. Raises any error of importing it."""
    return import_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)


def class_at(target: str) -> Any:  # noqa: ANN401
    """Return the class, or function, that a target names. Raises any error of importing it."""
    where, _, name = target.rpartition(":")
    return getattr(import_module_of(where), name)


def import_packages(folder: str) -> list[ModuleType]:
    """Return the packages directly in the package called `folder`, imported, in the order of their names."""
    paths = importlib.import_module(folder).__path__
    names = [module.name for module in pkgutil.iter_modules(paths) if module.ispkg]
    return [importlib.import_module(f"{folder}.{name}") for name in names]


def import_file(path: Path) -> ModuleType:
    """Return the module in the file at `path`, imported once per process under a unique name."""
    path = path.resolve()
    name = f"meshmark_outside_{path.stem}_{abs(hash(str(path))):x}"
    if name in sys.modules:
        return sys.modules[name]
    return _run(path, name)


def import_file_again(path: Path) -> ModuleType:
    """Run the file at `path` again and return the new module, even if it was imported before."""
    path = path.resolve()
    name = f"meshmark_again_{path.stem}"
    try:
        return _run(path, name)
    finally:
        sys.modules.pop(name, None)


def _run(path: Path, name: str) -> ModuleType:
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
