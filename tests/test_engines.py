"""The configurations for Kubernetes and Ray, as far as no cluster is needed; `make cluster-test` runs Ray's."""

from __future__ import annotations

import copy
import importlib.util
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from meshmark.launch.cluster import ClusterSpec, cluster_of
from tests.test_readme import run

ROOT = Path(__file__).parent.parent
MANIFEST = list(yaml.safe_load_all((ROOT / "examples" / "kubernetes" / "meshmark.yaml").read_text()))


def checked(resource: dict[str, Any]) -> None:
    """By Kubernetes' own schema; fields that it does not know are errors."""
    kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)


def test_the_manifest_is_kubernetes_own_and_its_parts_fit(tmp_path: Path) -> None:
    """Nodes find node 0 by the name that the Service gives the Job's first pod, at a port that it opens; there are as
    many as the command says, and its options are pytest's."""
    service, job = MANIFEST
    for resource in MANIFEST:
        checked(resource)
        wrong = copy.deepcopy(resource)
        wrong["spec"]["completionMod"] = "Indexed"
        with pytest.raises(kubernetes_validate.ValidationError, match="completionMod"):
            checked(wrong)
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    told = dict(re.fullmatch(r"--([\w-]+)=(.*)", word).groups() for word in container["args"] if "=" in word)  # type: ignore[union-attr]
    assert told["rdzv"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}:29500"
    assert container["ports"] == [{"containerPort": 29500}] and pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert spec["completions"] == spec["parallelism"] == int(told["nnodes"]) and spec["completionMode"] == "Indexed"
    assert told["node-rank"] == "$(JOB_COMPLETION_INDEX)"
    words = [word.replace("$(JOB_COMPLETION_INDEX)", "0") for word in container["args"]]
    collect = [*container["command"], "--collect-only", "-q", "-p", "no:cacheprovider", *words[:-1]]
    ((code, said),) = run([[*collect, f"--results={tmp_path}"]], tmp_path)
    assert code == 0 and "ddp-dp4" in said, said


@pytest.fixture
def driver() -> Any:  # noqa: ANN401
    """The example; what is tested of it here asks nothing of Ray."""
    spec = importlib.util.spec_from_file_location("meshmark_ray", ROOT / "examples" / "ray" / "meshmark_ray.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_actor_s_environment_is_understood(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ANN401
    """Two nodes of two ranks, the GPUs of each seen by both of its ranks, in one order; and what the user has set."""
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    places = [("10.0.0.1", 4000, [3]), ("10.0.0.1", 4001, [2]), ("10.0.0.2", 4002, [0]), ("10.0.0.2", 4003, [1])]
    given = driver.environments(places, 2)
    specs = [cluster_of(environment) for environment in given]
    assert specs == [
        ClusterSpec(
            nnodes=4,
            node_rank=2 * host + task,
            rdzv="10.0.0.1:4001",
            tasks_per_node=2,
            local_task=task,
            host_number=host,
        )
        for host in range(2)
        for task in range(2)
    ]
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in given] == ["2,3", "2,3", "0,1", "0,1"]
    assert {environment["NCCL_DEBUG"] for environment in given} == {"WARN"}
    assert len({environment["MESHMARK_RDZV_SECRET"] for environment in given}) == 1
