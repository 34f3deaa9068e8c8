"""Names of inference engines among the adapters of the command line."""

from __future__ import annotations

import pytest

from meshmark.adapter.registry import ENGINE_PRECISIONS, inference_adapters, outside_name
from meshmark.errors import AdapterError, UnknownNameError
from meshmark.inference.process import is_engine, load_engine
from meshmark.spec.precision import Precision

_CHOSEN = pytest.StashKey[dict[str, str]]()
_PRECISIONS = pytest.StashKey[list[str]]()


def take_engines(config: pytest.Config) -> None:
    """Take engines out of `--adapters` and `--adapter`, and their own precisions out of `--precision`.

    So the other suites see what is for training alone. Where the inference suite is not asked for, all stay: to the
    other suites they are unknown names. Raises `pytest.UsageError` for an adapter that cannot be imported.
    """
    if _CHOSEN in config.stash:
        return
    asked = any("test_inference" in argument for argument in config.args)
    known, named, outside = inference_adapters() if asked else {}, config.getoption("--adapters"), list[str]()
    if asked:
        try:
            outside = [target for target in config.getoption("--adapter") if ":" in target and is_engine(target)]
        except AdapterError as error:
            raise pytest.UsageError(str(error)) from error
    given = _parts(named) if named else [] if outside else list(known)
    if config.args and all("test_inference" in argument for argument in config.args):
        _refuse_what_is_for_training(config, given, known, outside)
    own = {outside_name(target): target for target in outside}
    if clash := sorted(own.keys() & known.keys()) or ([] if len(own) == len(outside) else sorted(own)):
        raise pytest.UsageError(f"--adapter: {', '.join(clash)} would stand for two engines; rename the class")
    config.stash[_CHOSEN] = {name: known[name] for name in given if name in known} | own
    if config.stash[_CHOSEN]:
        config.option.adapters = ",".join(name for name in given if name not in known) or None
        config.option.adapter = [target for target in config.getoption("--adapter") if target not in outside]
    config.stash[_PRECISIONS] = _parts(config.getoption("--precision"))
    if asked and any(name in ENGINE_PRECISIONS for name in config.stash[_PRECISIONS]):
        left = [name for name in config.stash[_PRECISIONS] if name not in ENGINE_PRECISIONS]
        config.option.precision = ",".join(left) or "fp32"


def _refuse_what_is_for_training(
    config: pytest.Config, given: list[str], known: dict[str, str], outside: list[str]
) -> None:
    """Raise `pytest.UsageError` for options that the inference suite alone cannot heed."""
    try:
        for name in given:
            if name not in known:
                raise UnknownNameError("engine", name, known)
        precisions = (*Precision.PRESETS, *ENGINE_PRECISIONS)
        for name in _parts(config.getoption("--precision")):
            if name not in precisions:
                raise UnknownNameError("precision", name, precisions)
        for target in config.getoption("--adapter"):
            if target not in outside:
                load_engine(target)  # says what is expected of an engine
    except (AdapterError, UnknownNameError) as error:
        raise pytest.UsageError(str(error)) from error
    if worlds := config.getoption("--world"):
        raise pytest.UsageError(f"--world {worlds}: an engine has the ranks of its name, such as paged-tp2")


def _parts(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def chosen_engines(config: pytest.Config) -> dict[str, str]:
    """Return the engines that `--adapters` and `--adapter` name, or all: name to target."""
    take_engines(config)
    return config.stash[_CHOSEN]


def chosen_precisions(config: pytest.Config) -> list[str]:
    """Return the precisions that `--precision` names, engines' own included."""
    take_engines(config)
    return config.stash[_PRECISIONS]
