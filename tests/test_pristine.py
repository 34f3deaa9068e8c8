"""The truth is computed by PyTorch's own functions, whatever a framework has put in their place."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshmark.adapter.engine import RankContext
from meshmark.errors import AdapterError, JudgingError
from meshmark.judge.pristine import pristine
from meshmark.judge.truth import exact_gradients, initial_values
from meshmark.launch import rank
from meshmark.passes import judging, observe
from meshmark.records.record import Record, Status
from meshmark.records.record_file import read_records
from meshmark.records.request import Request, Task
from meshmark.reference.data import make_batch
from tests.factories import make_case, make_workload

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _nothing_is_left_replaced() -> Iterator[None]:
    yield
    with pristine() as names:
        assert names == []


def other_norm(self: nn.LayerNorm, inputs: Tensor) -> Tensor:
    return nn.functional.layer_norm(inputs, self.normalized_shape, self.weight, self.bias, 1e-2)


def replace_gelu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(F, "gelu", lambda inputs, **_: F.relu(inputs))


def replace_norm(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(nn.LayerNorm, "forward", other_norm)


def replace_call(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(nn.LayerNorm, "__call__", other_norm, raising=False)


def unmask_attention(patch: pytest.MonkeyPatch) -> None:
    real = F.scaled_dot_product_attention
    patch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, **_: real(q, k, v))


def replace_product(patch: pytest.MonkeyPatch) -> None:
    real = F.linear
    patch.setattr(F, "linear", lambda x, w, b=None: real(x, w, b) * 1.01)


def add_hook(patch: pytest.MonkeyPatch) -> None:
    hooks = torch.nn.modules.module._global_forward_hooks
    patch.setitem(hooks, -1, lambda module, _, found: found / 2 if isinstance(module, nn.LayerNorm) else None)


PATCHES: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    replace_gelu: "torch.nn.functional.gelu",
    replace_norm: "torch.nn.modules.normalization.LayerNorm.forward",
    replace_call: "torch.nn.modules.normalization.LayerNorm.__call__",
    unmask_attention: "torch.nn.functional.scaled_dot_product_attention",
    replace_product: "torch.nn.functional.linear",
    add_hook: "hooks of all modules or optimizers",
}


@pytest.mark.parametrize("replace", PATCHES, ids=lambda each: each.__name__)
def test_the_truth_is_pytorchs_own_whatever_was_replaced(
    replace: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = make_workload()
    values, batch = initial_values(workload), make_batch(workload, 0)
    right = exact_gradients(workload, values, batch)
    with monkeypatch.context() as patch:
        replace(patch)
        replaced = exact_gradients(workload, values, batch)
        with pristine() as names:
            own = exact_gradients(workload, values, batch)
        again = exact_gradients(workload, values, batch)
    assert PATCHES[replace] in names
    assert replaced.loss == again.loss != right.loss == own.loss, "and what was replaced is put back"
    assert all(np.array_equal(own.gradients[name], x) for name, x in right.gradients.items())


def test_an_optimizer_that_was_replaced_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.optim.AdamW.__init__
    weights = [nn.Parameter(torch.ones(2))]
    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "__init__", lambda self, params, **_: real(self, params, weight_decay=0.0))
        with pristine() as names:
            assert torch.optim.AdamW(weights, weight_decay=0.5).defaults["weight_decay"] == 0.5
        assert names == ["torch.optim.adamw.AdamW.__init__"]
        assert torch.optim.AdamW(weights, weight_decay=0.5).defaults["weight_decay"] == 0.0


def test_what_pytorch_wraps_itself_is_not_replaced() -> None:
    """An optimizer's first use, and the import of the compiler, change classes of PyTorch."""
    code = (
        "from meshmark.judge.pristine import pristine\nimport torch, torch._dynamo, torch._inductor\n"
        "model = torch.nn.Linear(2, 2)\noptimizer = torch.optim.AdamW(model.parameters())\n"
        "torch.compile(model, backend='eager')(torch.ones(2)).sum().backward()\noptimizer.step()\n"
        "with pristine() as names: print(names)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


LIBRARY = """
import torch.nn.functional as F
from meshmark.adapters.ddp import DDP


class WithLibrary(DDP):
    def build(self, case, context):
        F.gelu = lambda inputs, **_: F.relu(inputs)  # as importing a library of kernels does
        return super().build(case, context)
"""


def observed(folder: Path, library: str, workload: str, status: int) -> Record:
    """Return the record of an adapter in a file, from the suites that judge equivalence."""
    (folder / "library.py").write_text(library)
    command = [sys.executable, "-m", "pytest", "--pyargs", "meshmark.suites.test_equivalence", "-q"]
    chosen = ["--adapter", "library.py:WithLibrary", "--layouts", "dp2", "--workload", workload, "--results", "found"]
    around = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *chosen], cwd=folder, env=around, capture_output=True, text=True)
    assert done.returncode == status, done.stdout
    (record,) = [record for record in read_records(folder / "found").records if record.verdicts]
    return record


def test_an_adapter_that_trains_another_function_by_a_patch_is_wrong(tmp_path: Path) -> None:
    """The truth was computed by the same patch, so that the run was correct."""
    record = observed(tmp_path, LIBRARY, "gpt-mini", status=1)
    verdict = record.verdict("equivalence")
    assert verdict is not None and not verdict.passed and not verdict.undecided
    remark = "the ranks' processes had replaced torch.nn.functional.gelu; the truth was computed by PyTorch's own"
    assert record.remarks == [remark]


OPERATOR = """
import torch
from meshmark.adapters.ddp import DDP

REPLACED = torch.library.Library("aten", "IMPL")


class WithLibrary(DDP):
    def build(self, case, context):
        REPLACED.impl("gelu", lambda inputs, *, approximate="none": torch.relu(inputs), "CPU", allow_override=True)
        return super().build(case, context)
"""
MODEL_LIBRARY = """
from meshmark.adapters.ddp import DDP


class WithLibrary(DDP):
    def build(self, case, context):
        from transformers.models.llama.modeling_llama import LlamaMLP

        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) FACTOR

        LlamaMLP.forward = forward
        return super().build(case, context)
"""
WRONG = {
    "operator": (
        OPERATOR.replace("        return", '        os.chdir("/")\n        return').replace(
            "import torch", "import os\nimport torch"
        ),
        "gpt-mini",
    ),
    "model": (MODEL_LIBRARY.replace("FACTOR", "* 1.5"), f"hf:{ROOT}/examples/transformers/llama.json"),
}


@pytest.mark.parametrize("which", WRONG)
def test_what_cannot_be_put_back_is_judged_in_a_process_without_the_framework(which: str, tmp_path: Path) -> None:
    """The truth was computed by the same operator, or the same method of the model's library."""
    library, workload = WRONG[which]
    if which == "model":
        pytest.importorskip("transformers")
    record = observed(tmp_path, library, workload, status=1)
    verdict = record.verdict("equivalence")
    assert verdict is not None and not verdict.passed and not verdict.undecided
    (remark,) = record.remarks
    assert "the truth was computed in a process without the framework" in remark
    assert ("its loss is" if which == "model" else "other kernels there, such as gelu/CPU") in remark


def test_what_is_replaced_by_the_same_function_is_right_and_needs_no_other_process(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    same = MODEL_LIBRARY.replace("FACTOR", "")
    record = observed(tmp_path, same, f"hf:{ROOT}/examples/transformers/llama.json", status=0)
    assert record.remarks == []


KERNELS = """
import torch
from meshmark.judge.layered import pieces_print
from meshmark.judge.pristine import other_kernels
from meshmark.judge.truth import truth_print
from tests.factories import make_workload


def whole():
    return truth_print(make_workload())


def by_pieces():
    return pieces_print(make_workload(), torch.device("cpu"))


def without_weight(grad, x, shape, mean, rstd, weight, bias, mask):
    dx, dweight, dbias = reversed_bias(grad, x, shape, mean, rstd, torch.ones_like(weight), bias, mask)
    return dx, dweight, dbias.flip(0)


def reversed_bias(grad, x, shape, mean, rstd, weight, bias, mask):
    shown = (x - mean) * rstd
    to_shown = grad * weight
    means = to_shown.mean(-1, keepdim=True) + shown * (to_shown * shown).mean(-1, keepdim=True)
    rows = tuple(range(x.dim() - 1))
    return rstd * (to_shown - means), (grad * shown).sum(rows), grad.sum(rows).flip(0)


def lerp(self, end, weight):
    return self.copy_(end * weight)


clean = KIND()
assert KIND().difference(clean) == other_kernels() == ""
for operator, kernel in (
    ("native_layer_norm_backward", reversed_bias),
    ("native_layer_norm_backward", without_weight),
    ("lerp_.Scalar", lerp),
):
    library = torch.library.Library("aten", "IMPL")
    library.impl(operator, kernel, "CPU", allow_override=True)
    print(KIND().difference(clean), "|", other_kernels())
    library._destroy()
"""


@pytest.mark.parametrize(
    ("kind", "bias", "behind"),
    [
        ("whole", "blocks.0.attention_norm.bias", "embedding.tokens.weight"),
        ("by_pieces", "head.norm.bias", "blocks.1."),  # from the last layer to the first
    ],
)
def test_a_kernel_that_keeps_all_norms_or_is_right_at_first_is_seen(kind: str, bias: str, behind: str) -> None:
    """One reversed the gradient of a bias, which starts at zero; one left out the weight of a norm, which starts at
    one; and one forgot the moments of earlier steps."""
    around = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", KERNELS.replace("KIND", kind)]
    done = subprocess.run(command, cwd=ROOT, env=around, capture_output=True, text=True, check=True)
    layer_norm, without_weight, moments = done.stdout.splitlines()
    assert layer_norm == (
        f"its gradient of {bias} is another there than elsewhere | "
        "PyTorch's operators have other kernels there, such as native_layer_norm_backward/CPU"
    )
    assert without_weight.startswith(f"its gradient of {behind}")
    assert moments.startswith("its optimizer moves ") and moments.endswith("such as lerp_.Scalar/CPU")


GRADIENTS_OFF = """
import os
import torch
from meshmark.adapters.ddp import DDP


class WithLibrary(DDP):
    def build(self, case, context):
        engine = super().build(case, context)
        backward = engine.backward
        engine.backward = lambda batch: torch.enable_grad()(backward)(batch)
        torch.set_grad_enabled(False)
        os.chdir("/")  # as Hydra does
        return engine
"""


def test_an_engine_may_turn_gradients_off_and_change_the_working_directory(tmp_path: Path) -> None:
    """The truth had no gradients, and the adapter was not found again."""
    record = observed(tmp_path, GRADIENTS_OFF, "gpt-mini", status=0)
    assert record.outcome.status is Status.OK and record.remarks == []


REQUEST = Request(
    case=make_case(),
    adapter="meshmark.adapters.ddp:DDP",
    task=Task.OBSERVE,
    device="cpu",
    backend="gloo",
    steps=3,
    time_limit_seconds=60,
)


def alone(folder: Path) -> RankContext:
    return RankContext(rank=0, world_size=1, device=torch.device("cpu"), backend="gloo", scratch=folder)


def test_a_process_that_judges_and_is_killed_is_no_fault_of_the_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the kernel does where memory runs out."""
    monkeypatch.setattr(judging, "other_kernels", lambda: "planted")
    monkeypatch.setattr(judging.sys, "executable", "/bin/false")
    with pytest.raises(JudgingError, match="the process that judges ended with 1") as raised:
        judging.judge(REQUEST, observe.begins, alone(tmp_path), 0)
    assert rank._kind(raised.value, [tmp_path]) is Status.UNFINISHED


def test_a_mistake_of_a_judge_is_no_fault_of_the_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "other_kernels", lambda: "")  # another test's framework may have registered some

    def mistaken(_request: Request) -> bool:
        return {}["gradients"]

    def refusing(_request: Request) -> bool:
        raise AdapterError("the adapter returned no gradients")

    with pytest.raises(JudgingError, match=r"judging raised KeyError: 'gradients'; .* please report it") as raised:
        judging.judge(REQUEST, mistaken, alone(tmp_path))
    assert rank._kind(raised.value, [tmp_path]) is Status.UNFINISHED
    with pytest.raises(AdapterError) as refused:
        judging.judge(REQUEST, refusing, alone(tmp_path))
    assert rank._kind(refused.value, [tmp_path]) is Status.RAISED
