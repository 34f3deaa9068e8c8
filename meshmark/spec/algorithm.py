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
    from meshmark.theory.flow import Flow

GROUP = "meshmark.algorithms"
"""Entry points of a distribution that brings algorithms: `name = "package.module:Class"`."""


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """How replicas train together. This class itself is synchronous training.

    An algorithm is a frozen dataclass of its options, and its methods answer everything that Meshmark asks of it: its
    exact transition, what it sends and keeps, with which optimizers it is defined, and how it is got wrong. The rest of
    Meshmark calls these methods and never asks which algorithm it has. To add one, subclass this class, give it a
    `kind`, and override what differs; `docs/algorithms.md` has an example.

    Raises `InputError` for options that are out of range or contradict each other.
    """

    TAG: ClassVar = "kind"
    """Written with the fields, so that a reader knows the class again; see `meshmark.serial.Tagged`."""
    kind: ClassVar[str] = "synchronous"
    """Name of the algorithm, the same for all values of its options."""
    replicas_differ: ClassVar[bool] = False
    """Whether data-parallel replicas may hold different gradients or parameters, by design."""
    stale_weights: ClassVar[bool] = False
    """Whether gradients are of older weights than those that they change; then `gradient_rule` returns one."""
    updates_by_micro_batch: ClassVar[bool] = False
    """Whether every micro-batch makes an update of its own."""
    steps_on_own_gradients: ClassVar[bool] = True
    """Whether each replica's optimizer steps on the gradients that the replica reports, and so clips by their norm."""
    warms_up: ClassVar[bool] = False
    """Whether its first steps may be synchronous training."""

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
        """Which kind of compressor makes gradients smaller before they are sent; None where none does."""
        return None

    @property
    def replicas_agree(self) -> bool:
        """Whether all replicas hold the same parameters after every step, bit for bit."""
        return not self.replicas_differ

    @property
    def steps_until_chance(self) -> int | None:
        """Steps after which two right runs may differ by chance, such as in the order of messages; None: never."""
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
        """Whether `step`, counted from 0, is made of the gradient of the whole global batch."""
        return not self.replicas_differ

    def averages_after(self, step: int) -> bool:
        """Whether all replicas' parameters are averaged after the update of `step`."""
        return False

    def steps_alone(self, step: int) -> bool:
        """Whether each replica's update of `step` is made by its own optimizer alone, as that of one process."""
        return False

    def transition(
        self, workload: Workload, rules: Sequence[UpdateRule], *, exact: bool = True, num_stages: int = 1
    ) -> Transition:
        """Return the exact transition of all replicas, before its first step.

        `rules` are the replicas' own optimizers, one each. With `exact`, sums over replicas are taken in float64,
        whatever is summed. `num_stages` is the number of pipeline stages.
        """
        # Resolved at run time: the folder of transitions imports this one.
        synchronous: Transition = importlib.import_module("meshmark.algorithms.replicas").Synchronous(rules[0])
        return synchronous

    def gradient_rule(self, workload: Workload, layout: Layout) -> GradientRule | None:
        """Return which weights a step's gradients are of, before the first step; None: of those where the run is."""
        return None

    def traffic(self, case: Case, rank: int) -> list[Flow] | None:
        """Return what `rank` sends its replicas in the metered step; None: as synchronous training under ZeRO does."""
        return None

    def traffic_repeats(self, case: Case, rank: int, step: int) -> bool:
        """Return whether `rank` sends its replicas in `step` what it sends in the metered step.

        Where it does not, or nobody can know, what it sends in `step` is not judged.
        """
        return not self.replicas_differ

    def vectors_kept(self, case: Case, rank: int) -> int:
        """Return how many vectors as long as the parameters `rank` keeps besides its optimizer's states."""
        return 0

    def update_memory_is_planned(self, num_replicas: int) -> bool:
        """Whether the peak of memory in the update is known."""
        return True

    def fault_hypotheses(self, workload: Workload, run: ObservedRun) -> Iterator[FaultHypothesis]:
        """Yield the ways in which the transition is got wrong; the first that explains the most steps is reported."""
        yield from ()

    def gradient_hypotheses(self, workload: Workload, layout: Layout) -> Iterator[GradientHypothesis]:
        """Yield the ways in which `gradient_rule` is got wrong; the first that fits is reported."""
        yield from ()

    def estimate_fault(
        self,
        workload: Workload,
        transition: Transition,
        run: ObservedRun,
        wrong: Mapping[int, Sequence[str]],
        exact: Sequence[list[Tensors]],
    ) -> tuple[int, str] | None:
        """Return a wrong transition that is fitted to the run, as the number of steps that it explains and a sentence.

        `transition` is the right one, before its first step. `wrong` has the names of wrong parameters by replica, the
        worst first; `exact` has the right parameters by step and replica. None where nothing can be fitted.
        """
        return None

    def contradiction(self, run: ObservedRun, step: int) -> str | None:
        """Return why what the run reports of `step` cannot be; None where it can."""
        return None


SYNCHRONOUS = Algorithm()
"""Every step is made of the gradient of the whole global batch; replicas are the same, bit for bit."""


@functools.cache
def algorithm_classes() -> Mapping[str, type[Algorithm]]:
    """Return all algorithm classes by kind: Meshmark's own, and those of installed distributions.

    Raises `AlgorithmError` for an entry point that cannot be imported, is no `Algorithm`, or has a kind that is taken.
    """
    found: dict[str, type[Algorithm]] = {Algorithm.kind: Algorithm}
    owners = {Algorithm.kind: "Meshmark"}
    for own in importlib.import_module("meshmark.algorithms").builtin_algorithms():
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
    """Return what may follow the name of a workload, after a hyphen: presets of all algorithms by id."""
    return MappingProxyType({preset.id: preset for cls in algorithm_classes().values() for preset in cls.presets()})


def algorithm_named(name: str) -> Algorithm:
    """Return the preset with this id, such as `dsgd-ring`. Raises `KeyError` where there is none."""
    return algorithm_presets()[name]


def without_foreign_options(value: dict[str, Any]) -> dict[str, Any]:
    """Return an algorithm's JSON value of record schema 2, where every algorithm had the options of all, without those
    that its class does not have."""
    names = {field.name for field in fields(Algorithm.class_of(value[Algorithm.TAG]))}
    return {name: each for name, each in value.items() if name in names or name == Algorithm.TAG}
