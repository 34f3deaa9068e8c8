"""The suites' files that an option asks for, beside those that pytest is named."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

_FOLDER = (Path(__file__).parent.parent / "suites").resolve()
_PACKAGE = "meshmark.suites."
OPTIONAL = ("conformance", "profile", "scale")
"""Suites that run where `--NAME` or their file asks for them."""


def with_optional_suites(arguments: Sequence[str], asked: Iterable[str], folder: Path) -> list[str]:
    """pytest's positional `arguments`, given in `folder`; and, where they name files of the suites alone, the files of
    the optional suites `asked`. Of one case's test, the profile of that case."""
    found = list(arguments)
    for suite in asked:
        for argument in arguments:
            sibling = _sibling(argument, suite, folder)
            if sibling and sibling.partition("::")[0] not in arguments and sibling not in found:
                found.append(sibling)
    return found


def module_of(file: Path) -> str | None:
    """The name by which `--pyargs` finds a file of the suites; None of another file."""
    return f"{_PACKAGE}{file.stem}" if file.resolve().parent == _FOLDER else None


def _sibling(argument: str, suite: str, folder: Path) -> str | None:
    """The file of `suite` beside the one that `argument` names; None where it names a folder, or nothing of ours."""
    name, _, test = argument.partition("::")
    if name.startswith(f"{_PACKAGE}test_"):
        sibling = f"{_PACKAGE}test_{suite}"
    elif (folder / name).resolve().parent == _FOLDER and name.endswith(".py"):
        sibling = str(Path(name).with_name(f"test_{suite}.py"))
    else:
        return None
    case = test.partition("[")[2] if suite in ("profile", "scale") else ""
    return f"{sibling}::test_profile[{case}" if case else sibling
