"""What the planner's verbs are told alike: a machine, its rates, and what is trained by."""

from __future__ import annotations

import argparse
from pathlib import Path

from meshmark.errors import InputError
from meshmark.plan.calibration_file import calibrated_at
from meshmark.plan.frameworks import FRAMEWORKS, recipe_of
from meshmark.plan.predict_file import rates_for
from meshmark.plan.rates import Rates, rates, read_rates
from meshmark.spec.hardware import Gpu, gpu
from meshmark.theory.recipe import RECIPES, TrainingRecipe, recipe

DEFAULT_GPU = "h100"
GPU_HELP = "kind of GPU, or the JSON file of a machine that `meshmark calibrate` measured, with its rates"
_RATES_HELP = (
    "name or JSON file of rates, if not the GPU's own; on h100 `predict` takes h100-sweep, the sweep's build, whose "
    "pipelines poll for messages on many nodes, and `plan` takes h100, without the polling"
)


def add_setting(parser: argparse.ArgumentParser) -> None:
    by = parser.add_mutually_exclusive_group()
    by.add_argument("--framework", help=f"whose recipe and layouts: {', '.join(FRAMEWORKS)}")
    by.add_argument("--recipe", help=f"bytes a parameter, in place of a framework: {', '.join(RECIPES)}")
    parser.add_argument("--rates", help=_RATES_HELP)


def machine_given(arguments: argparse.Namespace) -> tuple[Gpu, Rates]:
    """The GPU and the rates asked for; of a calibrated machine's file both, for its rates are shares of that machine.

    Raises `InputError` when such rates are asked for on another GPU.
    """
    own = calibrated_at(arguments.rates)
    if own and arguments.gpu not in (None, arguments.rates):
        raise InputError(f"the rates in {arguments.rates} are shares of {own.gpu.name}, which is there too: omit --gpu")
    own = own or calibrated_at(arguments.gpu)
    there = own.gpu if own else gpu(arguments.gpu or DEFAULT_GPU)
    name = None if own and calibrated_at(arguments.rates) else arguments.rates
    if name is not None:
        return there, read_rates(Path(name)) if name.endswith(".json") else rates(name)
    return there, own.rates if own else rates_for(there.name)


def recipe_given(arguments: argparse.Namespace) -> TrainingRecipe | None:
    """What the command line says to train by; None where it does not."""
    if arguments.framework is not None:
        return recipe_of(arguments.framework)
    return recipe(arguments.recipe) if arguments.recipe is not None else None
