"""What is wrong with parameters that compressed gradients were stepped on: how they were compressed, or the rule."""

from __future__ import annotations

from collections.abc import Iterator

from meshmark.algorithms.table import compressing_class
from meshmark.judge.compression_rivals import rival_compressions
from meshmark.judge.failed_replicas import FailedReplicas
from meshmark.judge.faults import Fault
from meshmark.judge.gradient_faults import Explanation
from meshmark.judge.replays import Account, Replays


def explain_compression(failed: FailedReplicas, wrong: dict[int, list[str]]) -> Explanation:
    """`wrong`: parameters by replica, the worst first."""
    workload = failed.case.workload
    replays = Replays(failed, wrong, compressing_class(workload))

    def accounts() -> Iterator[Account]:
        for how, rival in rival_compressions(workload):
            yield replays.explained(rival), (Fault.ALGORITHM, how)
        yield from replays.of_rules()

    unknown = "the gradients are right, and no known compression of them under no known update rule is this"
    return replays.longest(accounts()) or (Fault.UNEXPLAINED, unknown)
