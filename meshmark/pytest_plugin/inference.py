"""Names of inference engines among the adapters of the command line."""

from __future__ import annotations

import pytest

from meshmark.adapter.registry import inference_adapters

_CHOSEN = pytest.StashKey[list[str]]()


def take_engines(config: pytest.Config) -> None:
    """Take names of inference engines out of `--adapters`, so that the other suites see adapters for training alone."""
    if _CHOSEN in config.stash:
        return
    known, given = inference_adapters(), (config.getoption("--adapters") or "").split(",")
    config.stash[_CHOSEN] = [name for name in given if name in known]
    if config.stash[_CHOSEN]:
        config.option.adapters = ",".join(name for name in given if name not in known) or None


def chosen_engines(config: pytest.Config) -> list[str]:
    """Return the engines that `--adapters` names, or all."""
    take_engines(config)
    return config.stash[_CHOSEN] or list(inference_adapters())
