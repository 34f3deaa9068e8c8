"""A user's own model: what is refused before any framework is judged, and what is trained and judged for real."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from meshmark.adapter.engine import PYTORCHS_CHECKPOINT
from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.cli.options import chosen_workloads
from meshmark.conformance.scenario import SCENARIOS, plain_cells
from meshmark.errors import InputError
from meshmark.judge.truth import ExactOptimizer, assess_replicas, initial_values
from meshmark.models.module import block_of, build_model, parameter_shapes, sizes_by_block, skeleton
from meshmark.records.record_file import read_records
from meshmark.reference.data import make_batch, on_corpus
from meshmark.reference.dry_run import activation_bytes
from meshmark.reference.objective import parameter_groups
from meshmark.reference.own_model import OwnModel, describe, load_workload, reference_values
from meshmark.serial import decode, encode
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.own_model import OwnModelConfig
from meshmark.spec.precision import Precision
from meshmark.spec.workload import Workload
from meshmark.theory.model_theory import local_parameters
from meshmark.theory.traffic import Purpose, step_traffic
from tests.trained import Trial, furthest, train_all

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples" / "workloads"
TARGETS = {
    "two_towers": f"{EXAMPLES}/two_towers.py:TwoTowers",
    "gated_convolution": f"{EXAMPLES}/gated_convolution.py:GatedConvolution",
    "message_passing": f"{EXAMPLES}/message_passing.py:Molecules",
}
HEAD = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        {built}
    def forward(self, x):
        for layer in self.layers:
            x = layer(x){forward}
        return x
class W:
    def model(self): return Net()
    def batch(self, step): {batch}
    def loss(self, model, x): {loss}
"""
PARTS = {
    "built": "pass",
    "forward": "",
    "batch": "return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))",
    "loss": "return model(x).square().sum(), torch.tensor(float(len(x)))",
}


def written(folder: Path, **parts: str) -> str:
    file = folder / "mine.py"
    file.write_text(HEAD.format(**PARTS | parts))
    return f"{file}:W"


@pytest.mark.parametrize(
    "parts, reason",
    [
        (
            {"batch": "return torch.randn(8, 4)"},
            r"batch\(0\) differs between two calls; expected a function",
        ),
        (
            {"batch": "return {'a': torch.zeros(8, 4), 'b': torch.zeros(6)}"},
            "have 6, 8 rows; expected as many",
        ),
        (
            {"batch": "return torch.randn(8 + (step > 0), 4, generator=torch.Generator().manual_seed(step))"},
            r"batch\(1\) has 9 rows, and batch\(0\) has 8",
        ),
        (
            {"batch": "return torch.ones(8, 4) if step == 0 else torch.randn(8, 4)"},
            r"batch\(1\) differs between two calls",
        ),
        ({"batch": "return {'x': torch.ones(8, 4), 'name': 'first'}"}, "holds 'first', a str; expected tensors alone"),
        ({"built": "self.double()"}, "parameter layers.0.weight is torch.float64; expected torch.float32"),
        ({"built": "self.words = nn.Embedding(4, 4, sparse=True)"}, "words has sparse gradients, which are not judged"),
        (
            {"loss": PARTS["loss"] + "\n    def weight(self, x): return 2.0 * len(x)"},
            r"weight\(batch\) is 16, and loss\(model, batch\) returned a weight of 8",
        ),
        ({"batch": "return {}"}, r"batch\(0\) holds no tensors with rows"),
        ({"loss": "return model(x).square().mean()"}, "did not return a sum and its weight"),
        ({"loss": "return model(x).square(), torch.tensor(8.0)"}, r"a sum of shape \(8, 4\)"),
        ({"loss": "return model(x).square().sum(), torch.tensor(0.0)"}, "the weight above 0"),
        (
            {"loss": "return (model(x) @ model(x).T).logsumexp(1).sum(), torch.tensor(float(len(x)))"},
            "rows enter one",
        ),
        ({"loss": "return model(x.mul_(0.5)).square().sum(), torch.tensor(8.0)"}, "changes its batch in place"),
        ({"built": "self.drop = nn.Dropout(0.1)"}, r"drop drops out with p=0.1"),
        (
            {"built": "self.layers[0].weight.register_hook(lambda gradient: gradient / 2)"},
            "a hook changes the gradient of layers.0.weight",
        ),
        ({"forward": " + torch.randn(4)"}, "the loss of one batch differs between two calls"),
        (
            {"built": "import os; nn.init.constant_(self.layers[1].bias, float(os.environ.get('RANK', 0)))"},
            r"the initial value of layers.1.bias differs between rank 0 and rank 1 of two",
        ),
        (
            {"forward": " + (torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)"},
            r"the loss of batch\(0\) differs between rank 0 and rank 1 of two; expected the same on every rank",
        ),
        (
            {"batch": "import os; return torch.full((8, 4), float(os.environ.get('LOCAL_RANK', 0)))"},
            r"batch\(0\) differs between rank 0 and rank 1 of two",
        ),
        (
            {"built": "import random; self.scale = nn.Parameter(torch.tensor(random.random()))"},
            "the initial value of scale differs between two calls under one seed",
        ),
        ({"loss": "return model(x.absent)"}, r"raised AttributeError: .* at mine.py:16"),
        ({"built": "self.missing.weight"}, r"raised AttributeError: .* at mine.py:8"),
        ({"batch": "return torch.load('absent.pt')"}, r"raised FileNotFoundError: .*absent.pt' at mine.py:15"),
        ({"built": "self.more = nn.LazyLinear(4)"}, "more.weight has no shape yet; let model"),
        (
            {
                "loss": "x.requires_grad_(); y = model(x).sum(); "
                "return y + torch.autograd.grad(y, x)[0].sum(), torch.tensor(8.0)"
            },
            r"does not require grad .* at mine.py:16; .* does so in `with torch.enable_grad\(\):`",
        ),
        (
            {"forward": "; x = torch.utils.checkpoint.checkpoint(torch.exp, x, use_reentrant=True)"},
            "calls torch.utils.checkpoint with use_reentrant=True, .* give use_reentrant=False",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_what_cannot_be_judged_is_named_before_any_framework_is(
    parts: dict[str, str], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=reason):
        describe(written(tmp_path, **parts))


def test_what_is_no_workload_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "none.py").write_text("class Half:\n    def model(self): ...\n\ndef function(): ...\n")
    for target, reason in (
        ("mine.py", "expected path/to/file.py:Class"),
        (f"{tmp_path}/absent.py:W", "cannot be imported: FileNotFoundError"),
        (f"{tmp_path}/none.py:W", "has no class W"),
        (f"{tmp_path}/none.py:function", "has no class function"),
        (f"{tmp_path}/none.py:Half", r"lacks batch\(\), loss\(\); a workload has model\(\), batch\(step\) and loss"),
    ):
        with pytest.raises(InputError, match=reason):
            load_workload(target)


def test_options_of_presets_are_refused_for_ones_own() -> None:
    (own,) = chosen_workloads(TARGETS["two_towers"], None, None)
    assert own.id.startswith("twotowers.") and own.global_batch == 16
    with pytest.raises(InputError, match="makes batches of its own size, 16 rows; change its batch"):
        chosen_workloads(TARGETS["two_towers"], None, 32)
    with pytest.raises(InputError, match="makes its own batches; leave --corpus out"):
        on_corpus(own, __file__)


def test_two_versions_of_a_file_are_two_workloads(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, other = describe(written(tmp_path / "a")), describe(written(tmp_path / "b", forward=".tanh()"))
    assert one.id != other.id and decode(Workload, encode(one)) == one


def test_an_edit_of_what_a_workload_imports_is_another_workload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So `--resume` takes no record of the old one for the new one."""
    package = tmp_path / "edited_between_runs"
    package.mkdir()
    written(package)
    helper, beside = package / "scales.py", package / "beside.py"
    for path, text in ((package / "__init__.py", ""), (helper, "SCALE = 1\ndef scaled(x): return SCALE * x\n")):
        path.write_text(text)
    (package / "mine.py").write_text(f"from .scales import scaled\n{(package / 'mine.py').read_text()}")
    monkeypatch.syspath_prepend(str(tmp_path))
    target = "edited_between_runs.mine:W"
    before = describe(target).id
    beside.write_text("SCALE = 3\n")
    assert describe(target).id == before
    helper.write_text("SCALE = 2\ndef scaled(x): return SCALE * x\n")
    assert describe(target).id != before


@pytest.mark.parametrize("name", TARGETS)
def test_values_are_the_users_own_and_the_same_in_every_process(name: str) -> None:
    """A rank that fills shards takes the same values as one that builds the module."""
    own = describe(TARGETS[name])
    torch.manual_seed(own.seed)
    built = {f"model.{n}": p.detach().numpy() for n, p in load_workload(TARGETS[name]).model().named_parameters()}
    values = initial_values(own)
    assert built.keys() == values.keys() == parameter_shapes(own.model).keys()
    assert all(np.array_equal(values[n], x) for n, x in built.items())
    assert own.model.num_parameters == sum(x.size for x in built.values())
    assert sum(sizes_by_block(own.model)[""]) == own.model.embedding_parameters


def test_blocks_are_all_modules_of_the_longest_lists_class() -> None:
    module = load_workload(TARGETS["two_towers"]).model()
    blocks = OwnModel.around(module).blocks
    assert list(blocks) == [f"model.{tower}.layers.{i}" for tower in ("users", "items") for i in (0, 1)]
    blocks["model.users.layers.0"] = torch.nn.Identity()
    assert isinstance(module.users.layers[0], torch.nn.Identity)
    assert block_of(describe(TARGETS["two_towers"]).model, "model.items.layers.1.0.bias") == "model.items.layers.1"
    linear, relu = torch.nn.Linear(2, 2), torch.nn.ReLU()
    assert list(OwnModel.around(torch.nn.Sequential(linear, relu, linear)).blocks) == ["model.0"]
    assert list(OwnModel.around(linear).blocks) == ["model"]


@pytest.mark.parametrize(
    "parts, reason",
    [
        ({"built": "self.norm = nn.BatchNorm1d(4)", "forward": " + self.norm(x)"}, "batch norms in bf16"),
        ({"forward": " * x.topk(1).values"}, "what the model picks by topk or argmax"),
        (
            {"built": "self.register_buffer('scale', torch.ones(4))", "forward": " * self.scale"},
            "with 16-bit weights its modules raise 'mat1 and mat2 must have the same dtype",
        ),
    ],
)
def test_what_rounding_would_decide_is_not_judged_in_mixed_precision(
    parts: dict[str, str], reason: str, tmp_path: Path
) -> None:
    own = describe(written(tmp_path, **parts))
    layout = Layout(dp=2)
    assert reason in str(own.model.refusals(Case(adapter="ddp", workload=own, layout=layout, precision=Precision.BF16)))
    assert not own.model.refusals(Case(adapter="ddp", workload=own, layout=layout))


def test_initial_values_leave_no_other_copy_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module in a cycle lives until it is collected, and meters of memory would count it as the framework's."""
    alive = []

    def built(target: str, seed: int) -> nn.Module:
        module = load_workload(target).model()
        module.__dict__["itself"] = module
        alive.append(weakref.ref(module))
        return module

    monkeypatch.setattr("meshmark.reference.own_model.built", built)
    assert reference_values(TARGETS["two_towers"], 123)
    assert [module() for module in alive] == [None]


def test_a_batch_is_cut_as_rows_whatever_its_tree_holds() -> None:
    own = describe(TARGETS["two_towers"])
    whole = make_batch(own, 3)
    parts = [part for r in range(2) for part in whole.shard(r, 2).micro_batches(2)]
    assert [len(part) for part in parts] == [4] * 4
    assert torch.equal(torch.cat([part.inputs["user"] for part in parts]), whole.inputs["user"])
    model = build_model(own.model)
    model.initialize(own.seed)
    sums = [model(part.inputs).item() for part in parts]
    assert sum(sums) == pytest.approx(model(whole.inputs).item(), rel=1e-5)
    assert all(part.total_weight == whole.total_weight for part in parts)


def test_an_engine_that_changes_its_batch_does_not_change_the_workloads_data(tmp_path: Path) -> None:
    """A workload may return views of its data, and the truth was computed on what the engine had left of it."""
    own = describe(
        written(tmp_path, batch="self.data = getattr(self, 'data', torch.ones(64, 4)); return self.data[:8]")
    )
    make_batch(own, 0).inputs.zero_()
    assert make_batch(own, 0).inputs.sum() == 8 * 4


def test_what_casts_to_float32_inside_is_exact_in_float64(tmp_path: Path) -> None:
    """Most of Transformers' norms and rotary positions do: a naive `.double()` is off by 1e-8 and more.

    A new tensor is in float64 by default, for what is added in place.
    """
    forward = (
        ".float() * torch.ones(4, dtype=torch.float32).index_add_(0, torch.zeros(4, dtype=int), 0 * torch.zeros(4))"
    )
    own = describe(written(tmp_path, forward=forward))
    model = build_model(own.model).double()
    model.initialize(own.seed)
    batch = make_batch(own, 0)
    found = model(batch.inputs)
    x = batch.inputs.double()
    for layer in model.model.layers:
        x = x @ layer.weight.T + layer.bias
    assert found.dtype is torch.float64 and found.item() == pytest.approx(x.square().sum().item(), rel=1e-14)
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated")
def test_frameworks_train_it_as_float64_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    layout = Layout(dp=2, num_micro_batches=2)
    trials = [
        Trial(case=Case(adapter="ddp", workload=describe(target), layout=layout, precision=Precision.FP64), steps=3)
        for target in TARGETS.values()
    ]
    for trial, traces in zip(trials, train_all(trials, tmp_path), strict=True):
        assert furthest(assess_replicas(traces, trial.case.workload)) < 1e-13, trial.case.id


@pytest.mark.parametrize("couples", ["", "\n    couples_rows = True"])
def test_a_mean_for_a_sum_is_named_also_where_rows_are_coupled(tmp_path: Path, couples: str) -> None:
    """With a mean, `couples_rows = True` was advised, and then every framework was right."""
    target = written(tmp_path, loss="return model(x).square().mean(), torch.tensor(float(len(x)))")
    path = Path(target.removesuffix(":W"))
    path.write_text(path.read_text().replace("class W:", f"class W:{couples}"))
    with pytest.raises(InputError, match=r"is the mean of those of its two halves, .* not their sum; return the sum"):
        describe(target)


@pytest.mark.slow
def test_one_command_judges_it_under_several_frameworks(tmp_path: Path) -> None:
    """With no edit of the package: equivalence, and memory and traffic to the byte."""
    suites = [f"suites/test_{name}.py" for name in ("equivalence", "memory", "communication")]
    asked = ["--adapters", "ddp,fsdp2,deepspeed", "--workload", TARGETS["two_towers"], "--results", str(tmp_path)]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:benchmark", *suites, *asked]
    run = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
    records = read_records(tmp_path).records
    assert {record.case.adapter for record in records} == {"ddp", "fsdp2", "deepspeed"}
    assert all(verdict.passed for record in records for verdict in record.verdicts)


ODD = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 64), nn.Linear(64, 10)
    def forward(self, x): return self.b(self.hidden(x))
    def hidden(self, x): return torch.tanh(self.a(x))
class Checkpoints(Plain):
    def forward(self, x): return self.b(checkpoint(self.hidden, x, use_reentrant=False))
class Keeps(Plain):
    def hidden(self, x):
        self.last = super().hidden(x)
        return self.last
class KeepsCopies(Plain):
    def hidden(self, x):
        h = super().hidden(x)
        self._seen = [h.detach().clone(), h.detach().sum()]
        return h
class Detaches(Plain):
    def hidden(self, x): return super().hidden(x) * torch.sigmoid(self.a(-x)).mean(-1, keepdim=True).detach()
class Borrows(Plain):
    def forward(self, x): return self.b(self.hidden(x)) + self.hidden(x) @ self.a.weight @ self.a.weight.T[:, :10]
class Attends(Plain):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
    def forward(self, x):
        x = x.view(-1, 4, 4)
        return self.b(self.hidden(self.attention(x, x, x, need_weights=False)[0].flatten(1)))
class Normed(Plain):
    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.b)
class W:
    def model(self): return {cls}()
    def batch(self, step): return torch.randn(24, 16, generator=torch.Generator().manual_seed(step))
    def loss(self, model, x): return model(x).square().sum(), torch.tensor(float(len(x)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("cls", ["Checkpoints", "Keeps", "KeepsCopies", "Detaches"])
def test_no_framework_is_accused_of_what_a_model_keeps(tmp_path: Path, cls: str) -> None:
    """A model that computes parts again, that keeps hidden values as attributes, or that leaves a part of its graph."""
    (file := tmp_path / "odd.py").write_text(ODD.replace("{cls}", cls))
    asked = ["--adapters", "ddp,fsdp2", "--workload", f"{file}:W", "--results", str(tmp_path / "results")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:benchmark", "suites/test_memory.py", *asked]
    run = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
    records = read_records(tmp_path / "results").records
    assert len(records) == 2 and all(verdict.passed for record in records for verdict in record.verdicts)


@pytest.mark.slow
@pytest.mark.parametrize("cls", ["Attends", "Borrows", "Normed"])
def test_stage_3_is_not_accused_of_what_it_does_with_weights(tmp_path: Path, cls: str) -> None:
    """Weights that are computed, that another module uses, or that attention takes in parts."""
    (file := tmp_path / "odd.py").write_text(ODD.replace("{cls}", cls))
    model = describe(f"{file}:W").model
    of_model = {"Attends": model.repeats_arguments, "Borrows": model.reads_elsewhere, "Normed": model.computes_weights}
    # Attention computes with the weights of its last layer by itself.
    assert [name for name, has in of_model.items() if has] == [cls, *(["Borrows"] if cls == "Attends" else [])]
    asked = ["--adapters", "deepspeed,fsdp2", "--workload", f"{file}:W", "--results", str(tmp_path / "results")]
    suites = ["suites/test_memory.py", "suites/test_communication.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:benchmark", *suites, *asked]
    run = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
    records = read_records(tmp_path / "results").records
    assert len(records) >= 4 and all(verdict.passed for record in records for verdict in record.verdicts)


FORCES = """
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            energy = model(x).square().sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return energy + force.square().sum(), torch.tensor(float(len(x)))"""


def test_activations_of_a_loss_that_differentiates_within_itself_are_not_planned(tmp_path: Path) -> None:
    """As an interatomic potential's does. When a step's own backward pass begins, nobody can see."""
    for name, loss, is_planned in (("plain", PARTS["loss"], True), ("forces", FORCES, False)):
        (tmp_path / name).mkdir()
        case = Case(adapter="ddp", workload=describe(written(tmp_path / name, loss=loss)), layout=Layout(dp=2))
        assert (activation_bytes(case, 0, 1, casts_weights=False) is not None) == is_planned


def test_what_is_not_judged_yet_is_refused_with_its_reason() -> None:
    def reason(adapter: str, layout: Layout, precision: Precision = Precision.FP32) -> str:
        case = Case(adapter=adapter, workload=own, layout=layout, precision=precision)
        return load_adapter(builtin_adapters()[adapter]).supports(case, "cpu", "gloo") or ""

    own = describe(f"{CUT[0]}:{CUT[1]}")
    assert own.model.saves_buffers
    assert "fails for models with persistent buffers" in reason("accelerate-fsdp2-launched", Layout(dp=2, zero_stage=3))
    own = describe(TARGETS["two_towers"])
    assert not own.model.saves_buffers and not reason("accelerate-fsdp2-launched", Layout(dp=2, zero_stage=3))
    assert "casts them to fp16" in reason("fairscale-fsdp", Layout(dp=2, zero_stage=3), Precision.BF16)
    assert "model family own" in reason("megatron-gpt", Layout(dp=2))
    with pytest.raises(InputError, match=r"the workload has no layers\(model\)"):
        Case(adapter="pipeline", workload=own, layout=Layout(pp=2, num_micro_batches=2))
    assert dataclasses.replace(own, seed=1) != own


@pytest.mark.slow
def test_a_tiny_model_and_a_contrastive_loss_are_right_under_an_adapter_of_ones_own(tmp_path: Path) -> None:
    """Scalars are more than 1 % of so small a model; a contrastive loss is judged by micro-batches."""
    target = written(
        tmp_path, loss="return (model(x) @ model(x).T).logsumexp(1).sum(), torch.tensor(float(len(x)))"
    ).removesuffix(":W")
    source = Path(target).read_text().replace("class W:", "class W:\n    couples_rows = True")
    Path(target).write_text(f"{source}\nfrom meshmark.adapters.fsdp2 import FSDP2\nclass Mine(FSDP2): pass\n")
    asked = ["--adapter", f"{target}:Mine", "--adapters", "ddp", "--workload", f"{target}:W"]
    command = ["-m", "pytest", "-q", "suites", "-k", "equivalence or memory or communication", *asked]
    command = [sys.executable, *command, "--results", str(tmp_path / "results")]
    run = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
    records = [record for record in read_records(tmp_path / "results").records if record.verdicts]
    assert {record.case.adapter for record in records} == {"ddp", "mine"}
    assert {record.case.adapter: record.verdict("communication") is None for record in records} == {
        "ddp": False,
        "mine": True,  # the loss runs the model twice, and how often that is gathered is not planned
    }
    assert all(record.memory.planned[0].activations for record in records)  # type: ignore[union-attr]


def test_clauses_vary_ones_own_workload_where_any_workload_has_what_they_vary() -> None:
    """Variations that only the built-in text model has are unsupported with that reason, and never trained as another
    one."""
    own = describe(TARGETS["two_towers"])
    (base,) = plain_cells("fsdp2", load_adapter(builtin_adapters()["fsdp2"]), 2, own=own)
    assert isinstance(base, Case) and base.workload.model == own.model
    assert base.workload.optimizer == dataclasses.replace(own.optimizer, clip_norm=None)
    refused = {s.name for s in SCENARIOS.values() if "needs the built-in text model" in (s.varied(base)[1] or "")}
    assert refused == {"uneven", "frozen", "unfrozen", "tied", "unused", "dropout", "recomputed dropout"}
    assert "no_decay names another" in (SCENARIOS["groups"].varied(base)[1] or "")
    varied = {name: SCENARIOS[name].varied(base) for name in ("accumulation", "clipping", "resume", "bf16", "endure")}
    assert not any(reason for _, reason in varied.values())
    assert all(case.workload.model == own.model for case, _ in varied.values())
    assert varied["accumulation"][0].layout.num_micro_batches == 4
    assert varied["clipping"][0].workload.optimizer.clip_norm == 0.5
    assert varied["resume"][0].workload.optimizer.warmup_steps == 4


@pytest.mark.slow
def test_a_clause_is_kept_with_ones_own_workload(tmp_path: Path) -> None:
    asked = ["suites/test_conformance.py", "-k", "accumulation", "--workload", TARGETS["two_towers"]]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:benchmark", *asked, "--adapters", "fsdp2"]
    command += ["--results", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert run.returncode == 0 and "1 passed" in run.stdout, run.stdout[-3000:] + run.stderr[-1000:]
    (record,) = read_records(tmp_path).records
    assert record.conformance.scenario == "accumulation" and record.case.workload.model.name.startswith("twotowers.")


def test_what_does_not_decay_is_named_or_goes_by_shape(tmp_path: Path) -> None:
    """Norms of an own model have any name, so `decay_matrices_only` looks at shapes."""
    target = written(tmp_path, built="self.n = nn.LayerNorm(4)", forward=" + self.n(x)")
    path = Path(target.removesuffix(":W"))
    source = f"from meshmark.spec.optimizer import OptimizerSpec\n{path.read_text()}    optimizer = OptimizerSpec"

    def undecayed(options: str) -> set[str]:
        load_workload.cache_clear()
        (folder := tmp_path / str(len(list(tmp_path.iterdir())))).mkdir()
        (folder / "mine.py").write_text(f"{source}({options})\n")
        own = describe(f"{folder}/mine.py:W")
        decaying, others = parameter_groups(own.optimizer, build_model(own.model).named_parameters())
        assert "weight_decay" not in decaying and others["weight_decay"] == 0.0
        names = parameter_shapes(own.model).keys()
        assert len(decaying["params"]) + len(others["params"]) == len(names)
        return {name.removeprefix("model.") for name in names if not own.optimizer.decays(name)}

    biases = {"layers.0.bias", "layers.1.bias"}
    assert undecayed("decay_matrices_only=True") == {*biases, "n.weight", "n.bias"}
    assert undecayed("no_decay=('layers.*.bias',)") == biases
    for options, reason in (
        ("no_decay=('norm.*',)", "no_decay names 'norm.*', which fits no trained parameter; those are"),
        ("no_decay=('*',)", "no_decay fits every parameter"),
        ("no_decay=('n.*',), decay_matrices_only=True", "leave one out"),
    ):
        with pytest.raises(InputError, match=re.escape(reason)):
            undecayed(options)


def test_a_decay_group_that_is_not_followed_is_another_update() -> None:
    """By the float64 optimizer that judges: the group's parameters move otherwise, all others as before."""
    own = describe(TARGETS["two_towers"])
    values = initial_values(own)
    gradients = {name: np.ones_like(x, dtype=np.float64) for name, x in values.items()}
    spec = dataclasses.replace(own.optimizer, weight_decay=1.0)
    grouped = ExactOptimizer(dataclasses.replace(spec, no_decay=("model.users.ids.*",))).step(values, gradients)
    plain = ExactOptimizer(spec).step(values, gradients)
    moved = {name for name in values if not np.array_equal(grouped[name], plain[name])}
    assert moved == {"model.users.ids.weight"}


CUT = (EXAMPLES / "diffusion.py", "Diffusion")


def test_a_plan_and_layers_say_what_ranks_hold_and_send() -> None:
    """By hand: four products by columns and two by rows a block, of 32 x 32 and 32 x 128."""
    own = describe(f"{CUT[0]}:{CUT[1]}")
    model = own.model
    assert isinstance(model, OwnModelConfig) and model.split is not None
    assert (model.split.sizes, len(model.split.by_rows), len(model.split.by_columns)) == ((32, 128), 32, 8)
    split = 4 * (3 * (32 * 32 + 32) + 128 * 32 + 128 + 32 * 32 + 32 * 128)
    layout = Layout(tp=2, num_micro_batches=2)
    assert local_parameters(model, layout, 0) == model.num_parameters - split // 2
    flows = step_traffic(Case(adapter="tp", workload=own, layout=layout), 0)
    (activations,) = [flow for flow in flows or () if flow.purpose is Purpose.ACTIVATIONS]
    stream = 16 * 18 * 32 * 4  # rows, tokens, width, bytes
    assert (activations.num_bytes, activations.most) == (4 * 6 * stream, 4 * 6 * 2)
    assert [layer.row_shape for layer in model.layers] == [*[(18, 32)] * 5, (1, 8, 8)]
    held = [local_parameters(model, Layout(pp=3, num_micro_batches=2), rank) or 0 for rank in range(3)]
    assert sum(held) == model.num_parameters and held[1] == 2 * model.block_parameters


def test_a_layer_that_runs_twice_must_lie_in_one_stage() -> None:
    """Six layers, of which the second and the third are one block: two stages have three each, three have two."""
    model = describe(f"{EXAMPLES / 'hard.py'}:Hard").model
    assert isinstance(model, OwnModelConfig) and model.shared_layers == ((1, 2),)
    assert model.misfits(tp=1, num_stages=2, cp=1) == []
    (reason,) = model.misfits(tp=1, num_stages=3, cp=1)
    assert "share a weight" in reason
    assert sum(layer.num_parameters for layer in model.layers) == model.num_parameters


def test_parts_of_a_model_are_the_model() -> None:
    own = describe(f"{CUT[0]}:{CUT[1]}")
    whole, batch = build_model(own.model), make_batch(own, 0)
    whole.initialize(own.seed)
    parts = [build_model(own.model, own.model.stage_layers(2, stage)) for stage in range(2)]
    names = [name for part in parts for name, _ in part.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters())
    for part in parts:
        part.initialize(own.seed)
        part.hold(batch)
    outputs = parts[1](parts[0](parts[0].stage_inputs(batch)))
    assert parts[1].stage_loss(outputs, parts[1].stage_inputs(batch)).item() == pytest.approx(
        whole(batch.inputs).item()
    )
    joined = type(parts[0]).join(parts)
    assert {name for name, _ in joined.named_parameters()} == set(names)


@pytest.mark.parametrize(
    "method, reason",
    [
        ("def layers(self, m): return [m.layers[0]]", "layers.1.weight is in none of the layers"),
        ("def layers(self, m): return [m.layers[1], m.layers[0]]", "expected the parts of its forward pass in order"),
        ("def tensor_parallel_plan(self): return {'layer.*': 'colwise'}", "no module is called so"),
        ("def tensor_parallel_plan(self): return {'layers.0': 'column'}", "expected one of colwise"),
        ("def tensor_parallel_plan(self): return {'layers': 'colwise'}", "PyTorch's styles split Linear and Embedding"),
        ("units = ('Conv',)", "units names Conv, which is the class of none of the model's modules"),
        ("algorithm = 'local-sgd'", "unknown algorithm of workload"),
    ],
)
def test_what_a_workload_adds_is_checked(method: str, reason: str, tmp_path: Path) -> None:
    target = written(tmp_path)
    path = Path(target.removesuffix(":W"))
    path.write_text(f"{path.read_text()}    {method}\n")
    with pytest.raises(InputError, match=reason):
        describe(target)


def test_what_a_workload_adds_is_followed(tmp_path: Path) -> None:
    target = written(tmp_path, built="self.layers[0].bias.requires_grad_(False)")
    path = Path(target.removesuffix(":W"))
    path.write_text(f"{path.read_text()}    units = ('Net',)\n    algorithm = 'local-sgd2'\n")
    own = describe(target)
    assert own.frozen == ("model.layers.0.bias",) and own.algorithm.id == "local-sgd2"
    assert block_of(own.model, "model.layers.1.weight") == "model"
    (by_name,) = chosen_workloads(f"{TARGETS['two_towers']}-diloco2", None, None)
    assert by_name.algorithm.id == "diloco2"


def test_styles_of_pytorch_are_those_of_the_same_name(tmp_path: Path) -> None:
    found = []
    for index, (columns, rows) in enumerate(
        [("'colwise'", "'rowwise'"), ("P.ColwiseParallel()", "P.RowwiseParallel()")]
    ):
        (folder := tmp_path / str(index)).mkdir()
        target = written(folder)
        path = Path(target.removesuffix(":W"))
        plan = f"{{'layers.0': {columns}, 'layers.1': {rows}}}"
        start = "import torch.distributed.tensor.parallel as P\n"
        path.write_text(f"{start}{path.read_text()}    def tensor_parallel_plan(self): return {plan}\n")
        found.append(describe(target).model)
    assert isinstance(found[0], OwnModelConfig) and isinstance(found[1], OwnModelConfig)
    assert found[0].split == found[1].split and found[0].split is not None and found[0].split.is_planned


def test_an_lstm_on_the_meta_device_keeps_no_weights_elsewhere(tmp_path: Path) -> None:
    """It keeps a list of its weights beside them, and memory would find a second copy."""
    target = written(
        tmp_path, built="self.rnn = nn.LSTM(4, 4, batch_first=True)", forward=" + self.rnn(x[:, None])[0][:, 0]"
    )
    rnn = skeleton(describe(target).model).get_submodule("model.rnn")
    assert isinstance(rnn, torch.nn.LSTM) and {weight.device.type for weight in rnn._flat_weights} == {"meta"}


def test_blocks_that_are_run_again_have_the_same_gradients() -> None:
    own = describe(TARGETS["message_passing"])
    found = []
    for recompute in (None, PYTORCHS_CHECKPOINT):
        model = build_model(own.model)
        model.initialize(own.seed)
        model.recompute = recompute
        runs = list[object]()
        for block in model.blocks.values():
            block.message.register_forward_pre_hook(lambda part, _, runs=runs: runs.append(part))
        model(make_batch(own, 0).inputs).backward()
        found.append(([p.grad for p in model.parameters()], len(runs)))
    (plain, once), (again, twice) = found
    assert twice == 2 * once and all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.slow
def test_a_plan_and_a_pipeline_are_judged_by_one_command(tmp_path: Path) -> None:
    """To the byte, with blocks that are run again in the pipeline."""
    suites = [f"suites/test_{name}.py" for name in ("equivalence", "memory", "communication")]
    asked = ["--adapters", "tp,gpipe", "--layouts", "tp2.mb2,pp2.mb4.recompute_full"]
    asked += ["--workload", f"{CUT[0]}:{CUT[1]}", "--results", str(tmp_path)]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:benchmark", *suites, *asked]
    run = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
    records = [record for record in read_records(tmp_path).records if record.verdicts]
    assert {record.case.adapter: len(record.verdicts) for record in records} == {"tp": 3, "gpipe": 3}
    assert all(record.memory.planned[0].activations for record in records)  # type: ignore[union-attr]
