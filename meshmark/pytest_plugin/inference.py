"""Names of inference engines among the adapters of the command line."""

from __future__ import annotations

import pytest

from meshmark.adapter.registry import ENGINE_PRECISIONS, inference_adapters

_CHOSEN = pytest.StashKey[list[str]]()
_PRECISIONS = pytest.StashKey[list[str]]()


def take_engines(config: pytest.Config) -> None:
    """Take engines out of `--adapters` and their own precisions out of `--precision`.

    So the other suites see what is for training alone. Where the inference suite is not asked for, both stay: to the
    other suites they are unknown names.
    """
    if _CHOSEN in config.stash:
        return
    asked = any("test_inference" in argument for argument in config.args)
    known, named = inference_adapters() if asked else {}, config.getoption("--adapters")
    given = _parts(named) if named else list(known)
    config.stash[_CHOSEN] = [name for name in given if name in known]
    if config.stash[_CHOSEN]:
        config.option.adapters = ",".join(name for name in given if name not in known) or None
    config.stash[_PRECISIONS] = _parts(config.getoption("--precision"))
    if asked and any(name in ENGINE_PRECISIONS for name in config.stash[_PRECISIONS]):
        left = [name for name in config.stash[_PRECISIONS] if name not in ENGINE_PRECISIONS]
        config.option.precision = ",".join(left) or "fp32"


def _parts(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def chosen_engines(config: pytest.Config) -> list[str]:
    """Return the engines that `--adapters` names, or all."""
    take_engines(config)
    return config.stash[_CHOSEN]


def chosen_precisions(config: pytest.Config) -> list[str]:
    """Return the precisions that `--precision` names, engines' own included."""
    take_engines(config)
    return config.stash[_PRECISIONS]
