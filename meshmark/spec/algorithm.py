"""How data-parallel replicas train together: the contract of an algorithm, and synchronous training."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from meshmark.errors import AlgorithmError
from meshmark.import_target import import_packages
from meshmark.spec.optimizer import OptimizerSpec

if TYPE_CHECKING:  # names for annotations: the folders below import this module
    from meshmark.algorithms.contract import (
        FaultHypothesis,
        GradientHypothesis,
        GradientRule,
        ObservedRun,
        Tensors,
        Transition,
        UpdateRule,
    )
    from meshmark.spec.case import Case
    from meshmark.spec.layout import Layout
    from meshmark.spec.workload import Workload
    from meshmark.theory.traffic import Flow

GROUP = "meshmark.algorithms"
"""Entry point group for distributions that provide algorithms: `name = "package.module:Class"`."""


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """How replicas train together. This class itself is synchronous training.

    An algorithm is a frozen dataclass of its options. Its methods define everything that Meshmark needs: the exact
    transition, the traffic and memory, the optimizers that it supports, and its common faults. The rest of Meshmark
    calls these methods and never checks which algorithm it has. To add one, subclass this class, give it a `kind`, and
    override what differs; `docs/algorithms.md` has an example.

    Raises `InputError` for options that are out of range or contradict each other.
    """

    TAG: ClassVar = "kind"
    """Field written with the others, so that a reader can restore the class; see `meshmark.serial.Tagged`."""
    kind: ClassVar[str] = "synchronous"
    """Name of the algorithm, the same for all values of its options."""
    replicas_differ: ClassVar[bool] = False
    """True if data-parallel replicas may hold different gradients or parameters by design."""
    stale_weights: ClassVar[bool] = False
    """True if gradients are computed at older weights than those they update; `gradient_rule` then returns a rule."""
    updates_by_micro_batch: ClassVar[bool] = False
    """True if every micro-batch makes its own update."""
    steps_on_local_gradients: ClassVar[bool] = True
    """True if each replica's optimizer steps on the gradients that the replica reports, and clips by their norm."""
    warms_up: ClassVar[bool] = False
    """True if the first steps may be synchronous training."""

    @classmethod
    def class_of(cls, tag: str) -> type[Algorithm]:
        """Return the class whose `kind` is `tag`. Raises `ValueError` where none is installed."""
        if tag not in algorithm_classes():
            raise ValueError(
                f"algorithm kind {tag!r} is not known here, expected one of {', '.join(algorithm_classes())}; install "
                f"the distribution that brings it (entry points of {GROUP})"
            )
        return algorithm_classes()[tag]

    @classmethod
    def presets(cls) -> Iterator[Self]:
        """Yield the instances that have a name: `gpt-mini-ID` is the workload `gpt-mini` trained by one of them."""
        yield from ()

    @property
    def id(self) -> str:
        """Short name that tells instances apart, such as `local-sgd2`. Empty for synchronous training."""
        return "" if self.kind == Algorithm.kind else self.kind

    @property
    def compressor_kind(self) -> str | None:
        """The kind of compressor that shrinks gradients before they are sent, or None."""
        return None

    @property
    def replicas_agree(self) -> bool:
        """True if all replicas hold the same parameters after every step, bit for bit."""
        return not self.replicas_differ

    @property
    def steps_until_chance(self) -> int | None:
        """Steps after which two correct runs may differ by chance, such as by message order. None means never."""
        return None

    @property
    def steps_per_meeting(self) -> int:
        """Steps from one exchange among replicas to the next; 1 where every step has one."""
        return 1

    def refusal(self, optimizer: OptimizerSpec) -> str | None:
        """Return why the algorithm is not defined with `optimizer`, or None where it is."""
        return None

    def local_optimizer(self, optimizer: OptimizerSpec) -> OptimizerSpec:
        """Return what each replica steps with by itself: `optimizer` without the moments that the algorithm keeps."""
        return optimizer

    def reduces_gradients(self, step: int) -> bool:
        """Return whether `step`, counted from 0, uses the gradient of the whole global batch."""
        return not self.replicas_differ

    def averages_after(self, step: int) -> bool:
        """Return whether the parameters of all replicas are averaged after the update of `step`."""
        return False

    def steps_alone(self, step: int) -> bool:
        """Return whether each replica updates in `step` with its local optimizer alone, as a single process would."""
        return False

    def transition(
        self, workload: Workload, rules: Sequence[UpdateRule], *, exact: bool = True, num_stages: int = 1
    ) -> Transition:
        """Return the exact transition of all replicas, before its first step.

        `rules` are the replicas' own optimizers, one each. With `exact`, sums over replicas are taken in float64,
        whatever is summed. `num_stages` is the number of pipeline stages.
        """
        # Resolved at run time: the folder of transitions imports this one.
        synchronous: Transition = importlib.import_module("meshmark.algorithms.contract").Synchronous(rules[0])
        return synchronous

    def gradient_rule(self, workload: Workload, layout: Layout) -> GradientRule | None:
        """Return the rule for which weights a step's gradients are taken at, before the first step.

        None means the current weights of the run.
        """
        return None

    def traffic(self, case: Case, rank: int) -> list[Flow] | None:
        """Return what `rank` sends to other replicas in the metered step, or None for the traffic of synchronous
        ZeRO.
        """
        return None

    def traffic_repeats(self, case: Case, rank: int, step: int) -> bool:
        """Return whether `rank` sends other replicas the same in `step` as in the metered step.

        If it does not, or if that is unknown, the traffic of `step` is not judged.
        """
        return not self.replicas_differ

    def vectors_kept(self, case: Case, rank: int) -> int:
        """Return how many parameter-sized vectors `rank` keeps besides its optimizer states.

        `Adapter.extra_memory` plans them, in the precision of the master weights.
        """
        return 0

    def update_memory_is_planned(self, num_replicas: int) -> bool:
        """Return whether the peak memory of the update can be predicted."""
        return True

    def fault_hypotheses(self, workload: Workload, run: ObservedRun) -> Iterator[FaultHypothesis]:
        """Yield hypotheses of how the transition is wrong. The one that explains the most steps is reported."""
        yield from ()

    def gradient_hypotheses(self, workload: Workload, layout: Layout) -> Iterator[GradientHypothesis]:
        """Yield hypotheses of how `gradient_rule` is wrong. The first one that fits is reported."""
        yield from ()

    def estimate_fault(
        self,
        workload: Workload,
        transition: Transition,
        run: ObservedRun,
        wrong: Mapping[int, Sequence[str]],
        exact: Sequence[list[Tensors]],
    ) -> tuple[int, str] | None:
        """Fit a wrong transition to the run.

        `transition` is the correct one, before its first step. `wrong` maps a replica to the names of its wrong
        parameters, worst first. `exact` holds the correct parameters by step and replica. Returns the number of steps
        that the fit explains and a sentence about it, or None if nothing can be fitted.
        """
        return None

    def contradiction(self, run: ObservedRun, step: int) -> str | None:
        """Return why the values reported for `step` are impossible, or None if they are possible."""
        return None


SYNCHRONOUS = Algorithm()
"""Synchronous training: every step uses the gradient of the whole global batch, and replicas are bitwise equal."""


@functools.cache
def algorithm_classes() -> Mapping[str, type[Algorithm]]:
    """Return all algorithm classes by kind: Meshmark's own, and those of installed distributions.

    Raises `AlgorithmError` for an entry point that cannot be imported, is no `Algorithm`, or has a kind that is taken.
    """
    found: dict[str, type[Algorithm]] = {Algorithm.kind: Algorithm}
    owners = {Algorithm.kind: "Meshmark"}
    for family in import_packages("meshmark.algorithms"):
        for own in family.ALGORITHMS:
            found[own.kind], owners[own.kind] = own, "Meshmark"
    for point in importlib.metadata.entry_points(group=GROUP):
        owner = point.dist.name if point.dist else "unknown"
        where = f"algorithm {point.name!r} of the distribution {owner} (entry point of {GROUP})"
        try:
            cls = point.load()
        except (Exception, SystemExit) as error:
            raise AlgorithmError(f"{where} cannot be imported: {type(error).__name__}: {error}") from error
        if not (isinstance(cls, type) and issubclass(cls, Algorithm)):
            raise AlgorithmError(f"{where} is {cls!r}; expected a subclass of meshmark.spec.algorithm.Algorithm")
        if cls.kind in found:
            raise AlgorithmError(
                f"{where} has kind {cls.kind!r}, which is {owners[cls.kind]}'s; give the class a kind of its own"
            )
        found[cls.kind], owners[cls.kind] = cls, owner
    return MappingProxyType(found)


@functools.cache
def algorithm_presets() -> Mapping[str, Algorithm]:
    """Return the presets of all algorithms by id. A preset's id may follow the name of a workload, after a hyphen."""
    return MappingProxyType({preset.id: preset for cls in algorithm_classes().values() for preset in cls.presets()})


def algorithm_named(name: str) -> Algorithm:
    """Return the preset with this id, such as `dsgd-ring`. Raises `KeyError` where there is none."""
    return algorithm_presets()[name]


def without_foreign_options(value: dict[str, Any]) -> dict[str, Any]:
    """Return an algorithm's JSON value of record schema 2 without the options that its class does not have.

    In schema 2 every algorithm had the options of all algorithms.
    """
    names = {field.name for field in fields(Algorithm.class_of(value[Algorithm.TAG]))}
    return {name: each for name, each in value.items() if name in names or name == Algorithm.TAG}
