"""Adapters by name: Meshmark's own, those that installed distributions bring, and from outside by file or module."""

from __future__ import annotations

import contextlib
import fnmatch
import importlib
import importlib.metadata
import inspect
import os
from collections.abc import Collection, Iterator

from meshmark.adapter.contract import Adapter, Capabilities, Requirement
from meshmark.errors import AdapterError, InputError, UnknownNameError
from meshmark.import_target import import_module_of

GROUP = "meshmark.adapters"
"""Entry points of a distribution that brings adapters: `name = "package.module:Class"`."""

ENGINE_PRECISIONS = ("fp8-cache", "int8-weights", "int4-weights", "bf16-int4-weights")
"""Names of `meshmark.inference.model.PRECISIONS` that no training has, to be told apart without importing torch."""

INFERENCE_SUITE = "meshmark.suites.test_inference"


def load_adapter(target: str) -> type[Adapter]:
    """Return the class that "package.module:Class" or "path/to/file.py:Class" names.

    Raises `AdapterError` when it cannot be imported, is no `Adapter`, or lacks part of the contract.
    """
    where, _, name = target.rpartition(":")
    if not where or not name.isidentifier():
        raise AdapterError(
            f"adapter {target!r}: expected path/to/file.py:Class or package.module:Class (--adapters takes names)"
        )
    try:
        with working_directory_kept():
            module = import_module_of(where)
            found = getattr(module, name, None)
    except (Exception, SystemExit) as error:
        reason = f"cannot be imported: {type(error).__name__}: {error}"
        raise AdapterError(f"adapter {target!r}{_origin(target)} {reason}") from error
    if found is None:
        classes = (
            n for n, v in vars(module).items() if inspect.isclass(v) and issubclass(v, Adapter) and v is not Adapter
        )
        there = ", ".join(sorted(classes)) or "none"
        raise AdapterError(f"adapter {target!r}{_origin(target)}: {where} has no {name}; its adapters are: {there}")
    if not (inspect.isclass(found) and issubclass(found, Adapter)):
        wanted = "a subclass of meshmark.adapter.contract.Adapter"
        if inspect.isclass(found) and any(base.__name__ == "InferenceAdapter" for base in found.__mro__):
            wanted += f"; an engine that generates text is judged by pytest --pyargs {INFERENCE_SUITE}"
        raise AdapterError(f"adapter {target!r}{_origin(target)}: {name} is not {wanted}")
    has_capabilities = isinstance(getattr(found, "capabilities", None), Capabilities)
    lacking = sorted(found.__abstractmethods__) + ([] if has_capabilities else ["capabilities"])
    if lacking:
        what = f"lacks {', '.join(lacking)}; see meshmark.adapter.contract.Adapter"
        raise AdapterError(f"adapter {target!r}{_origin(target)} {what}")
    if not all(isinstance(each, Requirement) for each in found.requires):
        what = f"requires {found.requires!r:.80}; expected meshmark.adapter.contract.Requirement of each package"
        raise AdapterError(f"adapter {target!r}{_origin(target)} {what}")
    return found


@contextlib.contextmanager
def working_directory_kept() -> Iterator[None]:
    """Return to the working directory at the end, whatever a module does when it is imported.

    Paths that the user gave are relative to it.
    """
    here = os.open(".", os.O_PATH)  # unlike a path, it stays valid if the folder is moved or removed
    try:
        yield
    finally:
        os.fchdir(here)
        os.close(here)


def builtin_adapters() -> dict[str, str]:
    """Meshmark's own adapters, core and roster: name to target."""
    registry = importlib.import_module("meshmark.adapters")
    core: dict[str, str] = registry.ADAPTERS
    roster: dict[str, str] = registry.ROSTER
    return core | roster


def inference_adapters() -> dict[str, str]:
    """Return the engines that generate text: name to target."""
    found: dict[str, str] = importlib.import_module("meshmark.adapters").INFERENCE
    return found


def compression_methods() -> dict[str, str]:
    """Return the methods that make models smaller: name to target."""
    found: dict[str, str] = importlib.import_module("meshmark.adapters").COMPRESSION
    return found


def core_adapters() -> dict[str, str]:
    """Return the adapters that run if none is named: Meshmark's core, and those of installed distributions."""
    roster: dict[str, str] = importlib.import_module("meshmark.adapters").ROSTER
    return {name: target for name, target in known_adapters().items() if name not in roster}


def known_adapters() -> dict[str, str]:
    """Meshmark's own adapters and those of installed distributions: name to target. Imports none of them.

    Raises `AdapterError` when a name would stand for two.
    """
    known = builtin_adapters()
    owners = dict.fromkeys(known, "Meshmark")
    for point in importlib.metadata.entry_points(group=GROUP):
        owner = _distribution(point)
        if point.name in known:
            raise AdapterError(
                f"adapter {point.name!r} of the distribution {owner} (entry point of {GROUP}) has the name of one "
                f"of {owners[point.name]}: rename it in its pyproject.toml, or `pip uninstall {owner}`"
            )
        known[point.name], owners[point.name] = point.value, owner
    return known


def _distribution(point: importlib.metadata.EntryPoint) -> str:
    return point.dist.name if point.dist else "unknown"


def _origin(target: str) -> str:
    """Which installed distribution brings `target`, for a message; empty where none does."""
    owners = [_distribution(p) for p in importlib.metadata.entry_points(group=GROUP) if p.value == target]
    return f" of the distribution {owners[0]} (entry point of {GROUP})" if owners else ""


def outside_name(target: str) -> str:
    """Name of an adapter from outside: its class's, in lower case."""
    return target.rpartition(":")[2].lower()


def select(patterns: list[str], known: dict[str, str], core: Collection[str]) -> dict[str, str]:
    """Return the part of the registry whose names match any of the shell-style patterns.

    A pattern also selects the names in `core` that begin with it and a hyphen: `fairscale` selects fairscale-oss and
    fairscale-fsdp. `fsdp2` does not select fsdp2-noreshard, which is not in `core`. A pattern after `!` excludes what
    it matches, in any position. If all patterns exclude, the rest of the whole registry is selected.

    Raises:
        UnknownNameError: A pattern matches no adapter.
        InputError: Nothing is left.
    """
    taken, left_out = dict[str, str](), set[str]()
    for pattern in patterns:
        wanted = pattern.removeprefix("!")
        family = [name for name in core if name.startswith(f"{wanted}-")]
        matching = [name for name in known if fnmatch.fnmatch(name, wanted) or name in family]
        if not matching:
            raise UnknownNameError("adapter", wanted, known)
        if wanted == pattern:
            taken |= {name: known[name] for name in matching}
        else:
            left_out.update(matching)
    chosen = {name: path for name, path in (taken or known).items() if name not in left_out}
    if not chosen:
        raise InputError(f"--adapters {','.join(patterns)}: every adapter is left out; take one in, or leave out fewer")
    return chosen
