"""Find records in a results folder that already answer a request: for the same case, code and machine."""

from __future__ import annotations

import json
from collections.abc import Iterable

from meshmark.environment import Environment
from meshmark.launch.cluster import Cluster, from_node_0
from meshmark.records.record import Record, Status, sources_of
from meshmark.records.request import Request, Task
from meshmark.serial import decode, encode

KEPT = "kept: the results folder holds this pass, of the same code and machine"
_AGAIN = (Status.SKIPPED, Status.SLOW, Status.KILLED, Status.HUNG, Status.OOM)
"""Statuses of records that are made again. Skips cost nothing, and slow passes may end under a higher limit. What was
killed, hung or ran out of memory may have had a fault of the machine.
"""


class KeptRecords:
    """Records that stand for a pass."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self._records = {(r.task, r.case, r.conformance.scenario): r for r in records}
        """The last record of each pass."""

    def on_all_nodes(self, cluster: Cluster, request: Request, here: Environment) -> Record | None:
        """Return the same as `of`, on all nodes. Only node 0 has records. All nodes must call this."""
        if cluster.spec.nnodes == 1:
            return self.of(request, here)
        told = from_node_0(cluster, "held", lambda: json.dumps(encode(self.of(request, here))), seconds=0)
        found: Record | None = decode(Record | None, json.loads(told))
        return found

    def of(self, request: Request, here: Environment) -> Record | None:
        """Return the record that answers `request` in the environment `here`, or None if it must be run.

        Scenarios that leave or take a checkpoint are always run, because the checkpoints of an earlier run are gone.
        """
        record = self._records.get((request.task, request.case, request.scenario))
        if record is None or request.checkpoint or record.outcome.status in _AGAIN or record.outcome.status.outside:
            return None
        asked = (request.adapter, request.base, request.sample, _lengths(request))
        made = (record.adapter, record.conformance.base, record.equivalence.sample, _lengths(record))
        same = asked == made and _about(here) == _about(record.environment) and not _lacks_judgement(record, request)
        sources = sources_of(request.adapter, request.case.workload)
        known = sources == record.sources and all(source.is_known for source in sources)
        return record if same and known and is_committed(here) else None


def _lengths(of: Request | Record) -> tuple[float, ...]:
    """Return the numbers of steps and the timing budget (in seconds) of a pass."""
    return of.steps, of.warmup, of.timing_budget_seconds


def is_committed(here: Environment) -> bool:
    """Return whether a checkout has no uncommitted changes."""
    return not here.commit.endswith("-dirty")


def _lacks_judgement(record: Record, request: Request) -> bool:
    """Return whether the record was made under `--assess off`, and a judged one is asked for now."""
    suite = {Task.OBSERVE: "equivalence", Task.TIME: "throughput"}.get(request.task)
    ended = record.outcome.status is Status.OK
    return request.assess and ended and suite is not None and not request.scenario and record.verdict(suite) is None


def _about(environment: Environment) -> tuple[object, ...]:
    """Return the facts about an environment that a record's numbers depend on."""
    e = environment
    where = (e.machine, e.num_cpus, e.memory_bytes, e.device, e.backend, e.nnodes, e.omp_num_threads)
    return (*where, e.commit, e.versions, e.packages_digest)
