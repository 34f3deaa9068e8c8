"""The `pytest11` entry point, which only loads Meshmark's plugin for runs that ask for the suites.

It is active in every pytest run of an environment with Meshmark, so it imports nothing. Options and fixtures come with
the plugin.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest

PLUGIN = "meshmark.pytest_plugin.plugin"
_FOLDER = (Path(__file__).parent.parent / "suites").resolve()
_OPTIONS = Path(__file__).resolve().with_name("selection.py")
"""File that names the options that the plugin adds."""


def asks_for_suites(arguments: Sequence[str], pyargs: bool, folder: Path) -> bool:
    """Return whether pytest's positional `arguments`, relative to `folder`, name the suites or a part of them."""
    for argument in arguments or ["."]:
        name = argument.partition("::")[0]
        if pyargs and (name == "meshmark" or f"{name}.".startswith("meshmark.suites.")):
            return True
        path = (folder / name).resolve()
        if path == _FOLDER or _FOLDER in path.parents:
            return True
    return False


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(early_config: pytest.Config, parser: pytest.Parser) -> Generator[None]:
    """Register the plugin after the user's conftests, if the run asks for it.

    pytest still calls the plugin's `pytest_addoption`, and parses the command line afterwards.
    """
    manager, known = early_config.pluginmanager, early_config.known_args_namespace
    try:
        yield
        if asks_for_suites(known.file_or_dir, known.pyargs, early_config.invocation_params.dir):
            manager.import_plugin(PLUGIN)  # does nothing where `-p` or a conftest has done it
            for option, ours in (("python_files", "test_*.py"), ("python_functions", "test_")):
                early_config.addinivalue_line(option, ours)  # the user's configuration may say otherwise of their own
    except (ValueError, argparse.ArgumentError) as error:
        clash = re.search(r"--[\w-]+", str(error))
        files = _files_that_name(clash.group(), manager) if clash else []
        own = str(_OPTIONS)
        if clash is None or own not in files:
            raise
        others = ", ".join(file for file in files if file != own) or "another plugin"
        raise pytest.UsageError(
            f"{clash.group()} is an option of Meshmark's and of {others}: run Meshmark's suites from another folder ("
            "`pytest --pyargs meshmark.suites --adapter PATH/TO/FILE.py:CLASS`), or without that plugin (`-p no:NAME`)"
        ) from error


def _files_that_name(option: str, manager: pytest.PytestPluginManager) -> list[str]:
    """Return source files of registered plugins and conftests that add options and contain this one's name."""
    adding = [plugin for plugin in manager.get_plugins() if hasattr(plugin, "pytest_addoption")]
    found = {Path(file).resolve() for plugin in adding if (file := getattr(plugin, "__file__", None))}
    files = {_OPTIONS if file == _OPTIONS.with_name("plugin.py") else file for file in found}
    return sorted(str(f) for f in files if re.search(f"[\"']{option}[\"']", f.read_text(errors="replace")))
