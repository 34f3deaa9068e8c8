"""Add the files of optional suites to the files that pytest is given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

_FOLDER = (Path(__file__).parent.parent / "suites").resolve()
_PACKAGE = "meshmark.suites."
OPTIONAL = ("conformance", "profile", "scale")
"""Suites that run only if `--NAME` or their file is given."""


def with_optional_suites(arguments: Sequence[str], asked: Iterable[str], folder: Path) -> list[str]:
    """Return pytest's positional `arguments`, with the files of the optional suites in `asked`.

    Files are added only if `arguments`, relative to `folder`, name files of the suites. For a test of one case, only
    the profile of that case is added.
    """
    found = list(arguments)
    for suite in asked:
        for argument in arguments:
            sibling = _sibling(argument, suite, folder)
            if sibling and sibling.partition("::")[0] not in arguments and sibling not in found:
                found.append(sibling)
    return found


def module_of(file: Path) -> str | None:
    """Return the name by which `--pyargs` finds a file of the suites, or None for any other file."""
    return f"{_PACKAGE}{file.stem}" if file.resolve().parent == _FOLDER else None


def _sibling(argument: str, suite: str, folder: Path) -> str | None:
    """Return the file of `suite` next to the one in `argument`, or None for folders and other files."""
    name, _, test = argument.partition("::")
    if name.startswith(f"{_PACKAGE}test_"):
        sibling = f"{_PACKAGE}test_{suite}"
    elif (folder / name).resolve().parent == _FOLDER and name.endswith(".py"):
        sibling = str(Path(name).with_name(f"test_{suite}.py"))
    else:
        return None
    case = test.partition("[")[2] if suite in ("profile", "scale") else ""
    return f"{sibling}::test_profile[{case}" if case else sibling
