"""By which algorithm replicas train together: what one step makes of the states of all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from meshmark.errors import InputError
from meshmark.spec.compressor import CONTRACTIONS, SPARSE, Compressor, CompressorKind
from meshmark.spec.graph import Graph, GraphKind
from meshmark.spec.optimizer import OptimizerKind, OptimizerSpec
from meshmark.spec.parameter_server import SERVERS, ParameterServer


class AlgorithmKind(StrEnum):
    """Their equations stand in `meshmark.algorithms`, a file a family."""

    SYNCHRONOUS = "synchronous"
    """Every step is made of the whole global batch's gradient: replicas are the same, bit for bit."""
    LOCAL_SGD = "local-sgd"
    """Each replica steps on its own rows' gradient, and now and then parameters are averaged (arXiv:1805.09767); after
    a synchronous warm-up, post-local SGD (arXiv:1808.07217)."""
    DILOCO = "diloco"
    """Local SGD whose averages are taken for a gradient, on which Nesterov's momentum steps (arXiv:2311.08105)."""
    FED_AVG = "fed-avg"
    """Local SGD of replicas with more rows and with fewer, whose averages weigh by them (arXiv:1602.05629)."""
    DOWNPOUR = "downpour"
    """Replicas push gradients to a server, which steps by Adagrad, and fetch what it has (Dean et al., NIPS 2012)."""
    DSGD = "dsgd"
    """Each replica steps, and then mixes its neighbours' states into its own (adapt, then combine)."""
    DPSGD = "dpsgd"
    """The states before the step are mixed, while its gradient is computed (arXiv:1705.09056)."""
    DMSGD = "dmsgd"
    """Momenta are mixed as states are (arXiv:1905.03817)."""
    QUASI_GLOBAL = "quasi-global"
    """The momentum is of what a step came to after mixing (arXiv:2102.04761)."""
    GRADIENT_TRACKING = "gradient-tracking"
    """Each steps on an estimate of all replicas' mean gradient, which is mixed too (arXiv:1607.03218)."""
    EXACT_DIFFUSION = "exact-diffusion"
    """DSGD with its bias corrected (arXiv:1702.05122; D2, arXiv:1803.07068)."""
    COMPRESSED = "compressed"
    """All step on the mean of compressed gradients; what compression loses is lost."""
    ERROR_FEEDBACK = "error-feedback"
    """The same, and what is lost is added to the next step's gradient (arXiv:1809.07599, 1901.09847)."""
    EF21 = "ef21"
    """What is compressed is the change since what was last told of the gradient (arXiv:2106.05203)."""
    DOUBLE_SQUEEZE = "double-squeeze"
    """A server compresses what it makes of compressed gradients too, and both feed back what is lost
    (arXiv:1905.05957); in several rounds of compression, NEOLITHIC's (arXiv:2206.03665)."""
    ONE_BIT_ADAM = "one-bit-adam"
    """After a warm-up by Adam its variance is frozen, and momenta are squeezed twice so (arXiv:2102.02888)."""
    ONE_BIT_LAMB = "one-bit-lamb"
    """The same of LAMB, whose rates of tensors go on from the warm-up's by what compressed momenta tell of gradients
    (arXiv:2104.06069)."""
    ZERO_ONE_ADAM = "zero-one-adam"
    """Adam whose variance moves ever more seldom, and whose replicas step alone and squeeze what they have stepped by
    where they meet (arXiv:2202.06009)."""
    PIPEDREAM = "pipedream"
    """A pipeline whose micro-batches update weights one by one, each by those that it found (arXiv:1806.03377)."""
    PIPEDREAM_VERTICAL = "pipedream-vertical"
    """The same, with the version at all stages that the first stage had."""
    PIPEDREAM_2BW = "pipedream-2bw"
    """A pipeline whose every step is of the weights before the last one (arXiv:2006.09503)."""
    PIPEMARE = "pipemare"
    """A pipeline that stashes no weights: backward passes estimate those of the forward passes, and early stages start
    with smaller rates (arXiv:1910.05124)."""
    MAJORITY_VOTE = "majority-vote"
    """All step on the sign that most replicas' gradients have, element by element (arXiv:1810.05291)."""


DECENTRALISED = frozenset(
    {
        AlgorithmKind.DSGD,
        AlgorithmKind.DPSGD,
        AlgorithmKind.DMSGD,
        AlgorithmKind.QUASI_GLOBAL,
        AlgorithmKind.GRADIENT_TRACKING,
        AlgorithmKind.EXACT_DIFFUSION,
    }
)
"""Those that mix along a graph."""
PERIODIC = frozenset(
    {AlgorithmKind.LOCAL_SGD, AlgorithmKind.DILOCO, AlgorithmKind.FED_AVG, AlgorithmKind.ZERO_ONE_ADAM}
)
"""Those whose replicas step alone, and meet now and then."""
OWN_MOMENTUM = frozenset({AlgorithmKind.DMSGD, AlgorithmKind.QUASI_GLOBAL})
"""Those that keep the momentum themselves, in the place of the local optimizer."""
BY_MICRO_BATCH = frozenset({AlgorithmKind.PIPEDREAM, AlgorithmKind.PIPEDREAM_VERTICAL, AlgorithmKind.PIPEMARE})
"""Those that make an update a micro-batch."""
STALE = BY_MICRO_BATCH | {AlgorithmKind.PIPEDREAM_2BW}
"""Those of pipelines whose gradients are of older weights."""
OF_PLAIN_SGD = BY_MICRO_BATCH | {AlgorithmKind.GRADIENT_TRACKING, AlgorithmKind.EXACT_DIFFUSION}
"""Those that are defined on a gradient step alone."""


FROZEN = frozenset({AlgorithmKind.ONE_BIT_ADAM, AlgorithmKind.ONE_BIT_LAMB})
"""Those whose variance stays as a synchronous warm-up left it."""
SERVED = FROZEN | {AlgorithmKind.DOUBLE_SQUEEZE, AlgorithmKind.ZERO_ONE_ADAM}
"""Those that compress both ways, to a server and back."""
COMPRESSING = SERVED | {
    AlgorithmKind.COMPRESSED,
    AlgorithmKind.ERROR_FEEDBACK,
    AlgorithmKind.EF21,
    AlgorithmKind.MAJORITY_VOTE,
}
"""Those that send less than gradients, and whose replicas are yet to stand together."""
_FOR = {
    AlgorithmKind.COMPRESSED: frozenset(CompressorKind) - {CompressorKind.POWER_SGD, CompressorKind.RANDOM_K},
    AlgorithmKind.ERROR_FEEDBACK: SPARSE | {CompressorKind.SIGN, CompressorKind.POWER_SGD},
    AlgorithmKind.EF21: CONTRACTIONS,
    AlgorithmKind.DOUBLE_SQUEEZE: CONTRACTIONS,
    **dict.fromkeys(FROZEN | {AlgorithmKind.ZERO_ONE_ADAM}, frozenset({CompressorKind.SIGN})),
}
"""Compressors by algorithm. Random-k and PowerSGD without feedback never send some of the gradient; what a format
rounds off, and what is right in the mean, needs none; EF21 is for contractions that know nothing of the step."""
POWER_SGD_WARMUP = 2
"""PyTorch's hook remembers by bucket, and buckets are built anew after the first step."""

WARMED = FROZEN | {AlgorithmKind.LOCAL_SGD}
"""Those whose warm-up is synchronous training."""
MIXES_TWO = frozenset({AlgorithmKind.DMSGD, AlgorithmKind.GRADIENT_TRACKING})
"""Those that mix another vector as they mix parameters."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmSpec:
    """The algorithm, and how often its replicas meet, and which. Raises `InputError` for what means nothing."""

    kind: AlgorithmKind = AlgorithmKind.SYNCHRONOUS
    period: int = 1
    """Local SGD, DiLoCo, FedAvg and 0/1 Adam: steps from one meeting to the next. The first step after the warm-up
    meets, as PyTorch's `PeriodicModelAverager` does."""
    warmup_steps: int = 0
    """Local SGD, PowerSGD, 1-bit Adam and 1-bit LAMB: steps that are synchronous, before the first other one. 0/1
    Adam: steps after each of which replicas meet, and in some of which the variance moves."""
    graph: Graph | None = None
    """Of decentralised algorithms: who mixes whom in."""
    compressor: Compressor | None = None
    """Of compressing ones."""
    server: ParameterServer | None = None
    """Downpour's."""
    outer_rate: float = 0.7
    """DiLoCo's learning rate on averages; the default is the paper's."""
    outer_momentum: float = 0.9
    """The same of its momentum."""
    annealing_steps: int = 4
    """PipeMare's K: steps until all stages have one learning rate."""
    discrepancy_decay: float = 0.135
    """PipeMare's D: what is left of a velocity after as many updates as a stage is late; the paper's."""

    def __post_init__(self) -> None:
        if self.period < 1:
            raise InputError(f"algorithm: period is {self.period}, expected at least 1")
        if self.warmup_steps < 0:
            raise InputError(f"algorithm: warmup_steps is {self.warmup_steps}, expected 0 or more")
        may_warm = self.kind in WARMED or self.is_power_sgd or self.kind is AlgorithmKind.ZERO_ONE_ADAM
        if (self.period > 1 and self.kind not in PERIODIC) or (self.warmup_steps and not may_warm):
            raise InputError(
                f"algorithm: period {self.period} and warmup_steps {self.warmup_steps} mean nothing in {self.kind} "
                "training; leave them out, or use local_sgd"
            )
        if (self.kind in DECENTRALISED) != (self.graph is not None):
            graph = self.graph.id if self.graph else "none"
            raise InputError(f"algorithm: graph {graph} for {self.kind}; {', '.join(sorted(DECENTRALISED))} take one")
        if (self.kind is AlgorithmKind.DOWNPOUR) != (self.server is not None):
            server = self.server.id if self.server else "none"
            raise InputError(f"algorithm: parameter server {server} for {self.kind}; downpour takes one, others none")
        if self.kind is AlgorithmKind.EXACT_DIFFUSION and self.graph and not self.graph.is_static:
            raise InputError(
                f"algorithm: {self.kind} corrects the bias of one fixed matrix, and graph {self.graph.id} changes from "
                "step to step; take ring, grid or exponential"
            )
        if self.outer_rate <= 0 or not 0 <= self.outer_momentum < 1:
            raise InputError(
                f"algorithm: outer_rate {self.outer_rate} and outer_momentum {self.outer_momentum}; expected a rate "
                "above 0, and a momentum of at least 0 and less than 1"
            )
        if self.annealing_steps < 1 or not 0 < self.discrepancy_decay < 1:
            raise InputError(
                f"algorithm: annealing_steps {self.annealing_steps} and discrepancy_decay {self.discrepancy_decay}; "
                "expected at least 1, and a share between 0 and 1"
            )
        self._check_compressor()

    def _check_compressor(self) -> None:
        needed, got = _FOR.get(self.kind, frozenset()), self.compressor
        if bool(needed) != (got is not None) or got and got.kind not in needed:
            takes = f"takes one of {', '.join(sorted(needed))}" if needed else "takes none"
            raise InputError(f"algorithm: compressor {got.id if got else 'none'} for {self.kind}, which {takes}")
        if self.is_power_sgd and self.warmup_steps < POWER_SGD_WARMUP:
            raise InputError(
                f"algorithm: warmup_steps is {self.warmup_steps}, expected at least {POWER_SGD_WARMUP} with power-sgd: "
                "PyTorch's hook remembers by bucket, and buckets are built anew after the first step"
            )
        if self.kind in FROZEN | {AlgorithmKind.ZERO_ONE_ADAM} and not self.warmup_steps:
            raise InputError(
                f"algorithm: warmup_steps is 0, expected at least 1 with {self.kind}: its variance is the warm-up's"
            )

    @property
    def is_power_sgd(self) -> bool:
        return self.compressor is not None and self.compressor.kind is CompressorKind.POWER_SGD

    @property
    def id(self) -> str:
        """`local-sgd2`, with three steps of warm-up `local-sgd2w3`; `dsgd-ring`; nothing for synchronous training."""
        if self.kind is AlgorithmKind.SYNCHRONOUS:
            return ""
        if self.graph:
            return f"{self.kind}-{self.graph.id}"
        if self.server:
            return f"{self.kind}-{self.server.id}"
        warmup = f"w{self.warmup_steps}" if self.warmup_steps else ""
        if self.kind in STALE:
            return str(self.kind)
        if self.kind in COMPRESSING:
            often = self.period if self.kind in PERIODIC else ""
            return f"{self.kind}{often}-{self.compressor.id}{warmup}" if self.compressor else str(self.kind)
        return f"{self.kind}{self.period}{warmup}"

    @property
    def replicas_differ(self) -> bool:
        """Whether data-parallel replicas may hold other gradients or parameters than one another, by design."""
        return self.kind is not AlgorithmKind.SYNCHRONOUS and self.kind not in STALE

    @property
    def stands_together(self) -> bool:
        """Whether all replicas are to hold the same parameters after every step, bit for bit."""
        return not self.replicas_differ or self.kind in COMPRESSING - PERIODIC

    @property
    def vectors_mixed(self) -> int:
        """Along the graph, each as long as the parameters."""
        return 2 if self.kind in MIXES_TWO else 1

    def reduces_gradients(self, step: int) -> bool:
        """Whether `step` is made of the whole global batch's gradient; steps are counted from 0."""
        return not self.replicas_differ or self.kind in WARMED and step < self.warmup_steps

    def compresses(self, step: int) -> bool:
        """Whether less than gradients is sent in `step`."""
        if self.kind is AlgorithmKind.ZERO_ONE_ADAM:
            return step < self.warmup_steps or self.averages_after(step)
        return self.kind in COMPRESSING and step >= self.warmup_steps

    def adapts(self, step: int) -> bool:
        """0/1 Adam: whether the variance moves in `step`, by whole gradients; ever more seldom, and not at all once
        replicas step alone (arXiv:2202.06009, section 5)."""
        counted = step + 1
        return self.kind is AlgorithmKind.ZERO_ONE_ADAM and step < self.warmup_steps and not counted & (counted - 1)

    def sends_gradients(self, step: int) -> bool:
        """Of those that compress: whether gradients are sent as they are in `step`."""
        return self.adapts(step) if self.kind in PERIODIC else not self.compresses(step)

    def averages_after(self, step: int) -> bool:
        """Whether all replicas' parameters are averaged after the update of `step`."""
        since = step - self.warmup_steps
        return self.kind in PERIODIC and since >= 0 and since % self.period == 0

    def refusal(self, optimizer: OptimizerSpec) -> str | None:
        """Why replicas cannot train by it with `optimizer`; None when they can."""
        plain = optimizer.kind is OptimizerKind.SGD and not optimizer.weight_decay and optimizer.clip_norm is None
        if self.kind in OF_PLAIN_SGD and not (plain and not optimizer.momentum):
            return "is defined on plain SGD; take kind sgd without momentum, weight decay and clipping"
        if self.kind in BY_MICRO_BATCH and optimizer.warmup_steps:
            return "makes several updates a step, all of one rate; take an optimizer without a schedule"
        adam = optimizer.kind is OptimizerKind.ADAMW and optimizer.clip_norm is None
        if self.kind is AlgorithmKind.ONE_BIT_ADAM and not adam:
            return "is Adam, and no gradient of all replicas is known to clip; take kind adamw without clipping"
        if self.kind is AlgorithmKind.ZERO_ONE_ADAM and not (adam and not optimizer.weight_decay):
            return "is specified for Adam alone; take kind adamw without weight decay and clipping"
        if self.kind is AlgorithmKind.ONE_BIT_LAMB:
            if optimizer.kind is not OptimizerKind.LAMB or optimizer.clip_norm is not None:
                return "is LAMB, and no gradient of all replicas is known to clip; take kind lamb without clipping"
        if self.kind in OWN_MOMENTUM:
            if not (plain and optimizer.momentum and not optimizer.nesterov and not optimizer.warmup_steps):
                return (
                    "keeps the momentum of SGD itself; take kind sgd with a momentum, and without Nesterov's, a "
                    "schedule, weight decay and clipping"
                )
        return None


def local_sgd(period: int, warmup_steps: int = 0) -> AlgorithmSpec:
    """Local SGD: replicas step alone, and are averaged every `period` steps once `warmup_steps` are over."""
    return AlgorithmSpec(kind=AlgorithmKind.LOCAL_SGD, period=period, warmup_steps=warmup_steps)


def _presets() -> Iterator[AlgorithmSpec]:
    yield local_sgd(2)
    yield AlgorithmSpec(kind=AlgorithmKind.DILOCO, period=2)
    yield AlgorithmSpec(kind=AlgorithmKind.FED_AVG, period=2)
    yield from (AlgorithmSpec(kind=AlgorithmKind.DOWNPOUR, server=server) for server in SERVERS)
    for kind in sorted(DECENTRALISED):
        for graph in (Graph(kind=graph) for graph in GraphKind if graph is not GraphKind.OWN):
            if kind is not AlgorithmKind.EXACT_DIFFUSION or graph.is_static:
                yield AlgorithmSpec(kind=kind, graph=graph)
    for kind, compressors in _FOR.items():
        for of_kind in sorted(compressors):
            warms = of_kind is CompressorKind.POWER_SGD or kind in FROZEN | PERIODIC
            warmup, period = POWER_SGD_WARMUP if warms else 0, 2 if kind in PERIODIC else 1
            compressor = Compressor(kind=of_kind)
            yield AlgorithmSpec(kind=kind, compressor=compressor, warmup_steps=warmup, period=period)
    rounds = Compressor(kind=CompressorKind.SIGN, rounds=3)
    yield AlgorithmSpec(kind=AlgorithmKind.DOUBLE_SQUEEZE, compressor=rounds)
    yield AlgorithmSpec(kind=AlgorithmKind.MAJORITY_VOTE)
    yield from (AlgorithmSpec(kind=kind) for kind in sorted(STALE))


ALGORITHMS = {spec.id: spec for spec in _presets()}
"""What may follow the name of a workload, after a hyphen."""
EXAMPLES = {spec.kind: spec for spec in reversed(ALGORITHMS.values())}
"""One of each kind, the first."""
