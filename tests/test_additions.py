"""What an addition takes: a family of image models is a folder of two files, an algorithm three files and a line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DIMENSIONS = '''"""Two linear layers a block, over pixels."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from meshmark.models.config import ImageModelConfig, LayerSizes


@dataclass(frozen=True, kw_only=True)
class MixerSpec(ImageModelConfig):
    kind: ClassVar[str] = "test-mixer"
    module: ClassVar[str] = "meshmark.models.test_mixer.module:Mixer"
    num_layers: int
    width: int
    init_std: float = 0.1
    batch_norm: ClassVar[bool] = False
    dropout: ClassVar[float] = 0.0

    @property
    def seq_len(self) -> int:
        return self.image_size

    @property
    def widest(self) -> int:
        return self.width

    @cached_property
    def layers(self) -> tuple[LayerSizes, ...]:
        rows, wide = self.image_size, self.width

        def layer(inner: int, outer: int, times: int) -> LayerSizes:
            return LayerSizes(
                num_parameters=inner * outer, num_tensors=1, products=times * inner * outer, outputs=times * outer
            )

        block = layer(wide, wide, rows)
        return layer(rows, wide, rows), *[block] * self.num_layers, layer(wide, self.num_classes, 1)

    def misfits(self, *, tp: int, num_stages: int, cp: int) -> list[str]:
        return []


DIGITS = {"test-mixer-digits": MixerSpec(name="test-mixer-mini", image_size=8, num_classes=10, num_layers=2, width=12)}
'''
LAYERS = '''"""The layers of a test's mixer."""

from torch import Tensor, nn

from meshmark.models.module import Model


class Mixed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.silu(self.mix(x))


class Rows(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.project = nn.Linear(inner, outer, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x[:, 0].to(self.project.weight.dtype))


class Classes(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.output = nn.Linear(inner, outer, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(x.mean(1))


class Mixer(Model):
    block = Mixed

    def make_embedding(self) -> nn.Module:
        return Rows(self.spec.image_size, self.spec.width)

    def make_block(self, index: int) -> nn.Module:
        return Mixed(self.spec.width)

    def make_head(self) -> nn.Module:
        return Classes(self.spec.width, self.spec.num_classes)
'''


CHECK = """
import sys

import torch

import meshmark.models

meshmark.models.__path__.append(sys.argv[1])

from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.models.module import build_model, parameter_shapes
from meshmark.reference.data import make_batch
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.workload import workload
from meshmark.theory.model_theory import theory_of

problem = workload("test-mixer-digits")
model, shapes = problem.model, parameter_shapes(problem.model)
assert len(shapes) == model.num_tensors == theory_of(model).num_tensors(Layout(), 0)
assert sum(torch.Size(shape).numel() for shape in shapes.values()) == model.num_parameters

module = build_model(model)
module.initialize(seed=0)
assert module(make_batch(problem, 0).inputs).shape == (problem.global_batch, model.num_classes)

def refusal(adapter, layout):
    case = Case(adapter=adapter, workload=problem, layout=layout)
    return load_adapter(builtin_adapters()[adapter])().supports(case, "cpu", "gloo")

assert refusal("fsdp2", Layout(dp=2, zero_stage=3)) is None
print(refusal("tp", Layout(tp=2)))
"""
"""In a process of its own: a family that has been imported stays known."""


def test_a_family_of_image_models_is_a_folder_of_two_files(tmp_path: Path) -> None:
    """Adapters that train images train it, and the others say why they do not."""
    folder = tmp_path / "test_mixer"
    folder.mkdir()
    (folder / "__init__.py").write_text(DIMENSIONS)
    (folder / "module.py").write_text(LAYERS)
    command = [sys.executable, "-c", CHECK, str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "model family images (embedding and loss are parallel in a vocabulary" in done.stdout


MUTANTS = '''"""Elastic averaging whose center is wrong."""

import torch.distributed as dist
from torch import Tensor

from tests.broken.engine import Broken
from tests.broken.mutant import of_algorithm


class _Meets(Broken):
    center: list[Tensor]
    trained: list[Tensor]


class CenterStays(_Meets):
    def meet(self) -> None:
        before = [center.clone() for center in self.center]
        super().meet()
        for center, kept in zip(self.center, before, strict=True):
            center.copy_(kept)


class NoCenter(_Meets):
    def meet(self) -> None:
        for parameter in self.trained:
            dist.all_reduce(parameter.data)
            parameter.data.div_(dist.get_world_size())


MUTANTS = [
    *of_algorithm(
        "easgd",
        "gpt-mini-sgd-easgd2",
        {
            CenterStays: "the center stays where it was",
            NoCenter: "parameters are averaged, and there is no center",
        },
    )
]
'''
TRAIN = """
import importlib.util
import sys
from pathlib import Path

import pytest

import meshmark.adapters
import meshmark.algorithms

folder = Path(sys.argv[1])
meshmark.algorithms.__path__.append(str(folder / "algorithms"))
meshmark.adapters.__path__.append(str(folder / "adapters"))
meshmark.adapters.ROSTER["easgd"] = "meshmark.adapters.easgd:ElasticAveraging"

spec = importlib.util.find_spec("tests.broken.algorithms")
spec.submodule_search_locations.append(str(folder / "broken"))
sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[spec.name])

from tests.test_algorithm_mutants import test_engines_follow_the_truth_and_defects_are_named

with pytest.MonkeyPatch.context() as monkeypatch:
    test_engines_follow_the_truth_and_defects_are_named("easgd", 2, folder, monkeypatch)
print("trained")
"""


@pytest.mark.slow
def test_an_algorithm_is_a_file_with_an_engine_and_mutants(tmp_path: Path) -> None:
    """And a line in the registry of adapters. It is the example's, which is in a package of its own."""
    example = ROOT / "examples" / "meshmark-easgd" / "src" / "meshmark_easgd"
    for folder in ("algorithms/easgd", "adapters", "broken"):
        (tmp_path / folder).mkdir(parents=True)
    algorithm = (example / "algorithm.py").read_text()
    (tmp_path / "algorithms" / "easgd" / "__init__.py").write_text(f"{algorithm}\n\nALGORITHMS = (EASGD,)\n")
    engine = (example / "adapter.py").read_text()
    engine = engine.replace("meshmark_easgd.algorithm", "meshmark.algorithms.easgd")
    (tmp_path / "adapters" / "easgd.py").write_text(engine)
    (tmp_path / "broken" / "easgd.py").write_text(MUTANTS)
    command = [sys.executable, "-c", TRAIN, str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0 and "trained" in done.stdout, done.stderr
