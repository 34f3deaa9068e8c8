"""Arguments that the planner's commands share: a machine, its rates, and the training recipe."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path

from meshmark.errors import InputError
from meshmark.models.transformer import Family
from meshmark.plan.calibration_file import calibrated_at
from meshmark.plan.frameworks import FRAMEWORKS, Framework, default_framework, framework, narrowed_on
from meshmark.plan.gpu_file import named_gpu, read_gpu
from meshmark.plan.layout_columns import OTHER_NAMES
from meshmark.plan.overlap import Overlap, overlap_of
from meshmark.plan.rates import Rates, rates, read_rates
from meshmark.plan.stacks import rates_for, stack_of
from meshmark.spec.hardware import GIGA, Gpu
from meshmark.theory.recipe import NARROW, RECIPES, TrainingRecipe, recipe

DEFAULT_GPU = "h100"
GPU_HELP = (
    "kind of GPU, a TOML file such as --gpu-template prints, or the JSON file of a machine that `meshmark calibrate` "
    "measured, with its rates"
)
_RATES_HELP = (
    "name or JSON file of rates (default: those of the framework on the GPU); for nanotron on h100 `plan` takes "
    "h100-nanotron and `predict` takes h100-sweep, a build whose pipelines poll for messages on many nodes"
)


def add_setting(parser: argparse.ArgumentParser) -> None:
    by = parser.add_mutually_exclusive_group()
    by.add_argument("--framework", help=f"framework whose recipe and layouts are planned: {', '.join(FRAMEWORKS)}")
    by.add_argument("--recipe", help=f"bytes per parameter, instead of --framework: {', '.join(RECIPES)}")
    parser.add_argument(
        "--precision",
        choices=("bf16", *NARROW),
        help="precision of matrix products in the blocks' linear layers; bf16 keeps that of the recipe",
    )
    parser.add_argument(
        "--overlap",
        metavar="tp=S,dp=S,pp=0|1",
        help="shares of communication that computation hides, if not those of the stack's runs",
    )
    parser.add_argument("--rates", help=_RATES_HELP)
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="GPUs per node (default: the usual number)")
    parser.add_argument("--link-bandwidth", type=float, metavar="GB/S", help="one direction, inside the node")
    parser.add_argument(
        "--network-bandwidth", type=float, metavar="GB/S", help="one direction, per GPU: 50 for 400 Gb/s"
    )


class _OtherName(argparse.Action):
    """Note that an option was given by the name that a framework has for it."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: object, option: str | None = None
    ) -> None:
        namespace.other_name = option


_UNSEARCHED = {
    "grad_accum": "the micro-batches of a step follow from --global-batch, --dp and --micro-batch",
    "sequence_parallel": "plans have sequence parallelism wherever tp is above one",
}
"""Columns of layouts that no option of `plan` narrows, and why."""


def add_other_names(parser: argparse.ArgumentParser) -> None:
    """Add hidden options with the names that frameworks use, such as `--mbs`, which `refuse_other_name` rejects.

    Names that begin like an option of the parser are left out: its abbreviations would be ambiguous.
    """
    parser.set_defaults(other_name=None)
    begun = {option[:5] for action in parser._actions for option in action.option_strings}
    for name in OTHER_NAMES:
        option = f"--{name.replace('_', '-')}"
        if option[:5] not in begun:
            parser.add_argument(option, action=_OtherName, nargs="?", dest=argparse.SUPPRESS, help=argparse.SUPPRESS)


def refuse_other_name(arguments: argparse.Namespace) -> None:
    """Raise `InputError` with this command's name of an option that was given by a framework's name."""
    if (given := arguments.other_name) is not None:
        column = OTHER_NAMES[given.removeprefix("--").replace("-", "_")]
        told = _UNSEARCHED.get(column) or f"the option is called {_option_of(column)} here"
        raise InputError(f"{given}: {told}")


def _option_of(column: str) -> str:
    return "--lora" if column == "lora_rank" else f"--{column.replace('_', '-')}"


@dataclass(frozen=True, kw_only=True)
class Given:
    """Settings from the command line."""

    machine: Gpu
    recipe: TrainingRecipe | None
    """The recipe, or None if the command line does not name one."""
    given_rates: Rates | None
    """Rates from --rates or of a calibrated machine. None uses those of the recipe's stack on the machine."""
    nearest: str | None
    """The GPU whose rates the machine uses, if its file names one."""
    precision: str | None = None
    """Precision of the blocks' linear layers. None or bf16 leave what the recipe says."""
    overlap: Overlap = Overlap()

    @property
    def using(self) -> TrainingRecipe:
        using = self.overlap.recipe(self.recipe or default_framework(self.machine).recipe_on(self.machine, Family.GPT))
        if self.precision not in NARROW:
            return using
        return narrowed_on(self.machine, using, self.precision)

    @property
    def rates(self) -> Rates:
        found = self.given_rates or rates_for(self.machine, stack_of(self.using.name), nearest=self.nearest)
        return self.overlap.rates(found)


def given_by(arguments: argparse.Namespace, family: Family = Family.LLAMA) -> Given:
    """Return the GPU, the recipe (for models of `family`) and the rates that the command line asks for.

    The file of a calibrated machine gives both machine and rates, because its rates are shares of that machine.

    Raises `InputError` for such rates with another GPU, or for rates together with bandwidths.
    """
    own = calibrated_at(arguments.rates)
    if own and arguments.gpu not in (None, arguments.rates):
        raise InputError(f"the rates in {arguments.rates} are shares of {own.gpu.name}, which is there too: omit --gpu")
    own = own or calibrated_at(arguments.gpu)
    if arguments.link_bandwidth or arguments.network_bandwidth:
        if own or arguments.rates:
            raise InputError("--link-bandwidth and --network-bandwidth scale a GPU's own rates: leave out --rates")
    there, nearest = (own.gpu, None) if own else _gpu_given(arguments.gpu)
    there = _changed(there, arguments)
    name = None if own and calibrated_at(arguments.rates) else arguments.rates
    taken = own.rates if own else None
    if name is not None:
        taken = read_rates(Path(name)) if name.endswith(".json") else rates(name)
    using = _recipe_given(arguments, there, family)
    return Given(
        machine=there,
        recipe=using,
        given_rates=taken,
        nearest=nearest,
        precision=arguments.precision,
        overlap=overlap_of(arguments.overlap),
    )


def _gpu_given(name: str | None) -> tuple[Gpu, str | None]:
    """Return a GPU, by name or from a file, and the GPU whose rates it uses if the file names one."""
    if name is not None and name.endswith(".toml"):
        written = read_gpu(Path(name))
        return written.gpu, written.rates
    return named_gpu(name or DEFAULT_GPU), None


def _changed(there: Gpu, arguments: argparse.Namespace) -> Gpu:
    if arguments.gpus_per_node is not None:
        there = dataclasses.replace(there, gpus_per_node=arguments.gpus_per_node)
    if arguments.link_bandwidth is not None:
        there = dataclasses.replace(there, link_bandwidth=GIGA * arguments.link_bandwidth)
    if arguments.network_bandwidth is not None:
        there = dataclasses.replace(there, network_bandwidth=GIGA * arguments.network_bandwidth)
    return there


def framework_given(arguments: argparse.Namespace) -> Framework | None:
    return framework(arguments.framework) if arguments.framework is not None else None


def _recipe_given(arguments: argparse.Namespace, there: Gpu, family: Family) -> TrainingRecipe | None:
    """Return the recipe that the command line names, or None."""
    if named := framework_given(arguments):
        return named.recipe_on(there, family)
    return recipe(arguments.recipe) if arguments.recipe is not None else None
