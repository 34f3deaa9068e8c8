"""Published orders and ratios, beside the same measured at our scale (`studies.convergence.published`): of accuracies,
losses and times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy import stats

from benchmarks.throttled import TABLE, WORKERS
from meshmark.plan.rows import Row, read_rows
from studies.convergence import published
from studies.convergence.claim import CONFIDENCE
from studies.convergence.published import ENCODER, PARALLEL, RESNET, SQUEEZED, Run
from studies.convergence.quadratics import Array
from studies.papers import paper

MARGIN, TIMES_MARGIN = 0.02, 0.2
"""By how much a ratio of accuracies or losses may be another than the published one, and a ratio of times."""
TOLD_APART = 2.0
"""Standard deviations of a published difference, from which on it is one."""
AGREES, DIFFERS, UNTOLD = "agrees", "**differs**", "cannot tell"

Finals = Mapping[Run, Array]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two runs beside the two published numbers that they are for."""

    what: str
    published: tuple[float, float]
    spread: float | None
    """Standard deviation of the published difference; None where it is not told."""
    here: tuple[Array, Array]
    """By seed, both on the same draws."""

    @property
    def difference(self) -> float:
        return self.published[0] - self.published[1]

    @property
    def order(self) -> str:
        """Whether what is published to be the larger is the larger here, by one-sided tests."""
        if abs(self.difference) <= TOLD_APART * (self.spread or 0):
            return f"{UNTOLD}: not told apart there"
        least, most = bounds(self.here[0] - self.here[1])
        if least <= 0 <= most:
            return UNTOLD
        return AGREES if (least > 0) == (self.difference > 0) else DIFFERS

    @property
    def ratios(self) -> tuple[float, float]:
        """Between which the ratio is here."""
        least, most = bounds(np.log(self.here[0] / self.here[1]))
        return math.exp(least), math.exp(most)

    @property
    def ratio(self) -> str:
        return within(self.ratios, self.published[0] / self.published[1], MARGIN)

    def row(self) -> str:
        (a, b), (least, most) = self.published, self.ratios
        ours = f"{self.here[0].mean():.4g}, {self.here[1].mean():.4g}"
        return (
            f"| {self.what} | {a:g}, {b:g} | {ours} | {self.order} | {a / b:.4f} | {least:.4f} to {most:.4f} "
            f"| {self.ratio} |"
        )


def bounds(samples: Array) -> tuple[float, float]:
    """Return the bounds of the mean, each by a one-sided test."""
    half = float(stats.t.ppf(CONFIDENCE, len(samples) - 1)) * float(samples.std(ddof=1)) / math.sqrt(len(samples))
    return float(samples.mean()) - half, float(samples.mean()) + half


def within(found: tuple[float, float], ratio: float, margin: float) -> str:
    """Whether a ratio that lies between two bounds is `ratio`, up to `margin` either way."""
    (least, most), lowest, highest = found, ratio / (1 + margin), ratio * (1 + margin)
    if lowest <= least and most <= highest:
        return AGREES
    return DIFFERS if most < lowest or least > highest else UNTOLD


def compressed(finals: Finals) -> list[Pair]:
    """Every two methods, under either published net."""
    rows = {(row["model"], row["method"]): row for row in paper("compressed_sgd_cifar10")}
    found = []
    for net in dict.fromkeys(net for net, _ in rows):
        for one, other in combinations(SQUEEZED, 2):
            there = [rows[net, method] for method in (one, other)]
            accuracy = [float(row["top1_acc_percent"]) for row in there]
            found.append(
                Pair(
                    what=f"{net}: {one}, {other}",
                    published=(accuracy[0], accuracy[1]),
                    spread=math.hypot(*(float(row["std"]) for row in there)),
                    here=(finals[SQUEEZED[one]], finals[SQUEEZED[other]]),
                )
            )
    return found


def parallel(finals: Finals) -> list[Pair]:
    """Parallel SGD and decentralised."""
    return [
        Pair(
            what=what,
            published=(float(there[0]), float(there[1])),
            spread=None,
            here=(finals[PARALLEL[key][0]], finals[PARALLEL[key][1]]),
        )
        for key, what, there in [
            *(
                ((RESNET, count), f"ResNet, {count} nodes", _both(rows, "top1_acc_percent"))
                for count, rows in by_nodes().items()
            ),
            ((ENCODER, published.EIGHT), "BERT-Large, loss", _both(paper("bert_large_psgd_vs_dsgd"), "final_loss")),
        ]
    ]


def by_nodes() -> dict[int, list[Row]]:
    rows = paper("resnet_psgd_vs_decentralized")
    return {int(row["nodes"]): [r for r in rows if r["nodes"] == row["nodes"]] for row in rows}


def _both(rows: Sequence[Row], column: str) -> tuple[str, str]:
    """Return a column for P-SGD and for the other method."""
    first, second = rows
    assert first["method"] == "P-SGD"
    return first[column], second[column]


def published_times() -> dict[str, float]:
    """Return published ratios of total time: parallel over decentralised training."""
    told = {f"ResNet, {count} nodes": _both(rows, "time") for count, rows in by_nodes().items()}
    told["BERT-Large"] = _both(paper("bert_large_psgd_vs_dsgd"), "wall_clock_hours")
    return {what: float(first) / float(second) for what, (first, second) in told.items()}


def times() -> list[str]:
    """The same of a step on throttled links, between the extremes of the rounds."""
    rows = {(row["algorithm"], float(row["megabits"])): row for row in read_rows(TABLE)}
    there = published_times().values()
    lines = []
    for megabits in dict.fromkeys(megabits for _, megabits in rows):
        whole, peer = (rows[name, megabits] for name in ("synchronous", "dsgd-one-peer"))
        least, median, most = (
            float(whole[a]) / float(peer[b])
            for a, b in (("fastest", "slowest"), ("median", "median"), ("slowest", "fastest"))
        )
        order = AGREES if least > 1 else DIFFERS if most < 1 else UNTOLD
        low, high = min(there) / (1 + TIMES_MARGIN), max(there) * (1 + TIMES_MARGIN)
        ratio = AGREES if low <= least and most <= high else DIFFERS if most < low or least > high else UNTOLD
        limit = f"{megabits:g} Mbit/s" if megabits else "no limit"
        lines.append(f"| {limit} | {median:.2f} | {least:.2f} to {most:.2f} | {order} | {ratio} |")
    return lines


_HEAD = """| which two | published | here | order | published ratio | here between | ratio |
|:--|:--|:--|:--|:--|:--|:--|"""


def section(finals: Finals) -> str:
    squeezed, decentralised = compressed(finals), parallel(finals)
    told = ", ".join(f"{ratio:.2f} ({what})" for what, ratio in published_times().items())
    net, text = published.residual_network(published.EIGHT), published.encoder(published.EIGHT)
    return f"""## Beside published numbers

Published numbers, and the same at our scale over {published.SEEDS} seeds. The *order* of two agrees or differs by
one-sided tests of {CONFIDENCE:.1%}. Their *ratio* agrees where all that it may be here is within {MARGIN:.0%} of the
published one, differs where nothing of it is, and cannot be told else. Where published numbers are less than
{TOLD_APART:g} of their difference's standard deviations apart there is no order to agree with. All settings were fixed
before anything was trained by them and none was changed: no other variant was tried
([published.py](../studies/convergence/published.py)).

Here the net is `{net.model.name}` ({net.model.num_parameters:,} parameters) on the digit images. One in
{published.HELD_OUT} is held out, and percent of those are told for what they are after {published.EPOCHS} epochs by
plain SGD, {published.ROWS} rows a replica; the rate is {published.RATE:g} over {published.EIGHT} replicas, and linear
in their number. Batch norms see the held-out images as one batch. The encoder is `{text.model.name}`
({text.model.num_parameters:,} parameters) on masked text over {text.count} replicas: its loss after {text.most_steps}
steps by plain SGD of rate {text.rate:g}. What is published was trained with momentum, weight decay and rates that fall,
for many times as long, on other data.

**Compressed SGD on images** (top-k of {published.PERCENT}%, {published.EIGHT} workers; CIFAR-10 there, Huang et al.,
NeurIPS 2022). {_sum(squeezed)}

{_HEAD}
{_lines(squeezed)}

{_WHY_COMPRESSED}

**Parallel SGD, decentralised SGD** (one peer at a time; ImageNet there, and BERT-Large's last loss, whose row may be
another algorithm's than its label says). {_sum(decentralised)}

{_HEAD}
{_lines(decentralised)}

{_WHY_PARALLEL}

**Times of parallel over decentralised training**, published: {told}. Here, of a step of {WORKERS} ranks on the
throttled links below, between the extremes of its rounds; a ratio agrees where it is among the published ones, or
within {TIMES_MARGIN:.0%} of them.

| links | ratio | between | order | ratio |
|:--|:--|:--|:--|:--|
{chr(10).join(times())}

Where it is another: of {WORKERS} workers a ring sends {2 * (WORKERS - 1) / WORKERS:g} times the parameters, both ways
at once, and one peer is sent them once; but by gloo the two ways of a pair go in turn
([tests/test_in_turn.py](../tests/test_in_turn.py)), which takes {WORKERS / (WORKERS - 1):.2f} times the ring's time.
"""


def _lines(pairs: Sequence[Pair]) -> str:
    return "\n".join(pair.row() for pair in pairs)


def _sum(pairs: Sequence[Pair]) -> str:
    """How many of each verdict."""
    lines = []
    for what, found in (("orders", [p.order for p in pairs]), ("ratios", [p.ratio for p in pairs])):
        agree, differ = found.count(AGREES), found.count(DIFFERS)
        rest = len(pairs) - agree - differ
        lines.append(f"Of {len(pairs)} {what} {agree} agree, {differ} differ, {rest} cannot be told.")
    return " ".join(lines)


_WHY_COMPRESSED = """Where a ratio differs it is of EF21, the worst here as there: likely (not tested) because what it
sends is the change of a gradient that is of few rows and mostly noise. By how much is no property of the algorithm: the
two published nets differ in it themselves, 1.08 and 1.39 times, and the second by 4.86 percent from run to run."""
_WHY_PARALLEL = """Where it cannot be told: published accuracies are 0.05 percent apart at most, with no spread told;
here seeds scatter by one percent and more. With more replicas an epoch has fewer steps here, and a rate that is linear
in them has no warm-up: at 32 both end lower."""
