"""Old names work for one minor version after a rename, with a warning that names the new one."""

from __future__ import annotations

import importlib
import json
import re
import sys

import pytest

from meshmark.adapter.contract import Adapter
from meshmark.adapters.ddp import DDP
from meshmark.moved import MOVED
from meshmark.records.record import SCHEMA
from meshmark.records.record_file import migrate
from meshmark.serial import decode, encode
from meshmark.spec.algorithm import algorithm_named, algorithm_presets
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.workload import WORKLOADS, Workload, workload
from meshmark.theory import memory, traffic

CASE = Case(adapter="old", workload=workload("gpt-mini"), layout=Layout(dp=2))


def test_an_adapter_that_overrides_the_old_names_alone_still_declares() -> None:
    more = memory.ExtraMemory(category="steady", num_bytes=4.0, reason="a counter")
    less = traffic.TrafficException(reason="nothing is sent")
    with (
        pytest.warns(DeprecationWarning, match="Old.remainders is now called extra_memory"),
        pytest.warns(DeprecationWarning, match="Old.departures is now called traffic_exceptions"),
    ):

        class Old(DDP):
            @classmethod
            def remainders(cls, case: Case, rank: int) -> tuple[memory.ExtraMemory, ...]:
                return (more,)

            @classmethod
            def departures(cls, case: Case, rank: int) -> tuple[traffic.TrafficException, ...]:
                return (less,)

    adapter: type[Adapter] = Old
    assert adapter.extra_memory(CASE, 0) == (more,) and adapter.traffic_exceptions(CASE, 0) == (less,)


def test_old_names_can_be_called_and_imported() -> None:
    with pytest.warns(DeprecationWarning, match="now called extra_memory"):
        assert DDP.remainders(CASE, 0) == DDP.extra_memory(CASE, 0)
    with pytest.warns(DeprecationWarning, match="now called traffic_exceptions"):
        assert DDP.departures(CASE, 0) == DDP.traffic_exceptions(CASE, 0)
    with pytest.warns(DeprecationWarning, match="Remainder is now called ExtraMemory"):
        assert memory.Remainder is memory.ExtraMemory
    with pytest.warns(DeprecationWarning, match="Departure is now called TrafficException"):
        assert traffic.Departure is traffic.TrafficException


SHOWN = {
    "meshmark.adapter.arithmetic": "Arithmetic",
    "meshmark.adapter.capabilities": "Capabilities",
    "meshmark.adapter.data_parallel": "DataParallelEngine",
    "meshmark.adapter.gathered": "Gathered",
    "meshmark.adapter.holdings": "Holdings",
    "meshmark.adapter.traffic_source": "TrafficSource",
    "meshmark.algorithms.replicas": "averaged",
    "meshmark.reference.amoebanet": "AmoebaNet",
    "meshmark.reference.build": "parameter_shapes",
    "meshmark.reference.coatnet": "CoAtNet",
    "meshmark.reference.mixture": "MixtureTransformer",
    "meshmark.reference.model": "Model",
    "meshmark.reference.optimizers": "reference_optimizer",
    "meshmark.reference.resnet": "ResNet",
    "meshmark.reference.transformer": "Transformer",
    "meshmark.reference.vision": "VisionTransformer",
    "meshmark.spec.amoebanet_spec": "AmoebaNetSpec",
    "meshmark.spec.coatnet_spec": "CoAtNetSpec",
    "meshmark.spec.convolutional": "Convolutional",
    "meshmark.spec.hub_config": "read_config",
    "meshmark.spec.mixture_spec": "MixtureSpec",
    "meshmark.spec.model_config": "ModelConfig",
    "meshmark.spec.model_spec": "ModelSpec",
    "meshmark.spec.model_text": "described_model",
    "meshmark.spec.planned_config": "planned_model",
    "meshmark.spec.planned_model": "PlannedModel",
    "meshmark.spec.resnet_spec": "ResNetSpec",
    "meshmark.spec.vision_spec": "VisionSpec",
    "meshmark.theory.flow": "TrafficException",
    "meshmark.theory.states": "ExtraMemory",
}
"""By module: a name that docs showed there in version 0.1."""


@pytest.mark.parametrize("old", MOVED)
def test_modules_can_be_imported_by_their_old_names(old: str) -> None:
    """A class must be the same by both names, or `isinstance` would tell them apart."""
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{re.escape(old)} is now part of {re.escape(MOVED[old])}"):
        module = importlib.import_module(old)
    assert getattr(module, SHOWN[old]) is getattr(importlib.import_module(MOVED[old]), SHOWN[old])
    with pytest.raises(AttributeError, match="nothing"):
        _ = module.nothing


def test_a_module_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match="meshmark.adapter.nothing"):
        importlib.import_module("meshmark.adapter.nothing")


ALL_OPTIONS = {
    "period": 1,
    "warmup_steps": 0,
    "graph": None,
    "compressor": None,
    "server": None,
    "outer_rate": 0.7,
    "outer_momentum": 0.9,
    "annealing_steps": 4,
    "discrepancy_decay": 0.135,
}
"""Options that every algorithm had in records of schema 2."""


@pytest.mark.parametrize("name", ["", *algorithm_presets()])
def test_records_of_schema_2_are_read_as_they_were_meant(name: str) -> None:
    own = WORKLOADS["gpt-mini"].algorithm if not name else algorithm_named(name)
    case = encode(CASE)
    case["workload"]["algorithm"] = {**ALL_OPTIONS, **encode(own)}
    del case["workload"]["model"]["kind"]
    old = {"schema": 2, "case": case, "memory": {"remainders": [[]]}, "conformance": {"base": case}}
    new = migrate(json.loads(json.dumps(old)))
    assert new["schema"] == SCHEMA and new["memory"] == {"extra_memory": [[]]}
    for found in (new["case"], new["conformance"]["base"]):
        read = (
            decode(Workload, found["workload"] | {"optimizer": encode(CASE.workload.optimizer)}) if not name else None
        )
        assert found["workload"]["algorithm"] == encode(own)
        assert found["workload"]["model"]["kind"] == "transformer" and (read is None or read == CASE.workload)
