"""Where the nodes of a run meet before they act: what one of them lacks, or holds otherwise, is told on all of them,
and no rank is started for it."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import meshmark
from meshmark.adapter.registry import load_adapter
from meshmark.environment import num_gpus, versions
from meshmark.errors import MeshmarkError, NodesDisagreeError, NoSpaceError
from meshmark.launch.cluster import Cluster, ClusterSpec
from meshmark.records.request import Request, Task
from meshmark.reference.data import data_digest
from meshmark.serial import encode

READY_SECONDS = 300.0
"""How long nodes wait for one that is late, before ranks start: it may import from a slow disk."""
_OWN = ("checkpoint", "peak_flops_per_second")
"""Fields of a request that nodes need not agree on: a path, and a number that each node measures."""
_SHOWN = 40
"""Characters of a value that is told; of a longer one a digest is."""


def meet(cluster: Cluster, request: Request, trouble: Exception | None = None) -> None:
    """Until all nodes are about to do the same. `trouble`: why this one cannot; it is raised on every node.

    Raises `NodesDisagreeError` when a node has another request, code, packages, data or noise floor.
    """
    compared = not trouble and request.task is not Task.LINKS  # which is measured between unlike nodes too
    facts = {**_facts(request), **_gpus(request, cluster.spec)} if compared else {}
    mine = {"facts": facts, "trouble": _encode_error(trouble)}
    nodes = [json.loads(text) for text in cluster.exchange("launch", json.dumps(mine), seconds=READY_SECONDS)]
    if trouble:
        raise trouble
    named = dict(zip(cluster.numbers, nodes, strict=True))
    _raise_theirs(named)
    _expect_equal({number: node["facts"] for number, node in named.items()})


def from_node_0(cluster: Cluster, what: str, make: Callable[[], str], *, seconds: float) -> str:
    """Return on every node what node 0 makes, or raise the error it met there. The others wait at most `seconds`."""
    trouble, made = None, ""
    if cluster.spec.node_rank == 0:
        try:
            made = make()
        except Exception as error:
            trouble = error
    mine = json.dumps({"made": made, "trouble": _encode_error(trouble)})
    first = json.loads(cluster.exchange(what, mine, seconds=seconds + READY_SECONDS)[0])
    if trouble:
        raise trouble
    _raise_theirs({0: first})
    return str(first["made"])


def _encode_error(trouble: Exception | None) -> list[str] | None:
    if trouble is None:
        return None
    text = str(trouble) if isinstance(trouble, MeshmarkError) else f"{type(trouble).__name__}: {trouble}"
    return [NoSpaceError.__name__ if isinstance(trouble, NoSpaceError) else MeshmarkError.__name__, text]


def _raise_theirs(nodes: Mapping[int, Mapping[str, Any]]) -> None:
    for number, node in nodes.items():
        if node["trouble"]:
            kind, text = node["trouble"]
            raise (NoSpaceError if kind == NoSpaceError.__name__ else MeshmarkError)(f"node {number}: {text}")


def _expect_equal(nodes: Mapping[int, Mapping[str, str]]) -> None:
    names = dict.fromkeys(name for facts in nodes.values() for name in facts)
    told = []
    for name in names:
        values = {number: facts.get(name, "none") for number, facts in nodes.items()}
        if len(set(values.values())) > 1:
            told.append(f"{name} ({', '.join(f'{value} on node {number}' for number, value in values.items())})")
    if told:
        raise NodesDisagreeError(
            f"the nodes disagree about {'; '.join(told)}: give each the same command, code, packages, data and GPUs"
        )


def _facts(request: Request) -> dict[str, str]:
    """All that must be the same on every node, by name. Paths may differ: what is read there may not."""
    asked = encode(request)
    for case in (asked["case"], asked["base"]):
        if case:
            case["workload"]["corpus"] = None
    facts = {"case": request.case.id, "data": _digest(data_digest(request.case.workload))}
    facts |= {f"request's {name}": _shown(value) for name, value in asked.items() if name not in _OWN}
    facts |= {f"version of {name}": version for name, version in versions().items()}
    return facts | {"code of Meshmark": code_digest(), "code of the adapter": _source(request.adapter)}


def _gpus(request: Request, spec: ClusterSpec) -> dict[str, str]:
    """Return the number of GPUs that the ranks can use, for comparison between nodes.

    On a node with fewer GPUs than the others, ranks would share them. NCCL refuses that, and it would distort times.
    """
    if request.device != "cuda":
        return {}
    ranks = request.case.world_size // (spec.nnodes if spec.gpus_by_task else spec.num_hosts)
    return {f"GPUs that {ranks} ranks can use": str(min(ranks, num_gpus()))}


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text if len(text) <= _SHOWN else _digest(text)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@functools.cache
def code_digest() -> str:
    package = Path(meshmark.__file__).parent
    files = sorted(package.rglob("*.py"))
    return _digest("".join(f"{file.relative_to(package)}\n{file.read_text()}" for file in files))


@functools.cache
def _source(adapter: str) -> str:
    return _digest(Path(inspect.getfile(load_adapter(adapter))).read_text())
