"""Decisions for GPUs that can be tested without one. Nothing here has met a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshmark import environment
from meshmark.adapter.engine import DataParallelEngine, RankContext, initial_model
from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.adapter.single import Single
from meshmark.environment import machine, visible_gpus
from meshmark.errors import MeshmarkError
from meshmark.launch.cluster import ClusterSpec
from meshmark.launch.fork_server import ForkServer
from meshmark.launch.launch import process_environment
from meshmark.launch.rank import _kind
from meshmark.measure.readings import Bytes, DeviceMemory, MemoryReading, device_memory, read_device_memory
from meshmark.passes import kernels
from meshmark.passes.kernels import pinned
from meshmark.records.rank_report import RankReport
from meshmark.records.record import Status
from meshmark.records.request import Task
from meshmark.reference.data import Batch, make_batch
from meshmark.reference.objective import build_optimizer
from meshmark.run.assemble import _disagreeing
from meshmark.run.throughput import peak_flops_per_second
from meshmark.spec.case import Matmul, Tuning
from meshmark.spec.hardware import gpu_of_device
from meshmark.spec.layout import Layout
from meshmark.spec.precision import Dtype, Precision
from meshmark.spec.workload import workload
from tests.factories import make_case, make_environment, make_timed

H100 = "NVIDIA H100 80GB HBM3"
TWO = f"GPU 0: {H100} (UUID: GPU-aaa1-b)\nGPU 1: {H100} (UUID: GPU-ccc2-d)\n"
SLICED = f"""GPU 0: {H100} (UUID: GPU-aaa1-b)
  MIG 3g.40gb     Device  0: (UUID: MIG-11-x)
  MIG 1g.10gb     Device  1: (UUID: MIG-22-y)
"""
MIXED = SLICED + f"GPU 1: {H100} (UUID: GPU-ccc2-d)\n"
"""As `nvidia-smi -L` lists them."""


@pytest.mark.parametrize(
    "listed, chosen, expected",
    [
        (TWO, None, [H100, H100]),
        (TWO, "1", [H100]),
        (TWO, "1, 0", [H100, H100]),
        (TWO, "GPU-ccc", [H100]),
        (TWO, "0,7,1", [H100]),
        (TWO, "", []),
        (TWO, "-1", []),
        (SLICED, None, [f"{H100} MIG 3g.40gb"]),
        (SLICED, "0", [f"{H100} MIG 3g.40gb"]),
        (SLICED, "MIG-22-y,MIG-11-x", [f"{H100} MIG 1g.10gb", f"{H100} MIG 3g.40gb"]),
        (MIXED, None, [H100]),
        ("", None, []),
    ],
)
def test_cuda_sees_what_its_variable_names(listed: str, chosen: str | None, expected: list[str]) -> None:
    assert visible_gpus(listed, chosen) == expected


@pytest.mark.parametrize(
    "listed, chosen, told, peak",
    [
        (TWO, None, f"2 x {H100}", 2 * 989.4e12),
        (TWO, "0", f"1 x {H100}", 989.4e12),
        (SLICED, None, f"1 x {H100} MIG 3g.40gb", 3e9),
        ("GPU 0: NVIDIA H100 PCIe (UUID: GPU-a)\n", None, "1 x NVIDIA H100 PCIe", 3e9),
        ("GPU 0: NVIDIA H200 NVL (UUID: GPU-a)\n", None, "1 x NVIDIA H200 NVL", 3e9),
        ("GPU 0: NVIDIA GH200 480GB (UUID: GPU-a)\n", None, "1 x NVIDIA GH200 480GB", 3e9),
        (TWO.replace(f"{H100} (UUID: GPU-c", "NVIDIA H200 (UUID: GPU-c"), None, f"2 x {H100} and NVIDIA H200", 3e9),
    ],
    ids=["two", "one of two", "a slice", "H100 PCIe", "H200 NVL", "GH200", "two kinds"],
)
def test_utilisation_is_of_the_gpus_that_can_be_used(
    listed: str, chosen: str | None, told: str, peak: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a stand-in for `nvidia-smi`, of two ranks. What has no datasheet here is measured (3 GFLOP/s): other forms of
    a chip have other peaks than its SXM module."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n[ \"$1\" = -L ] || exit 9\ncat <<'EOF'\n{listed}EOF\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    if chosen is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    found = machine.__wrapped__("cuda")
    assert found == told
    record = make_timed(
        case=make_case(layout=Layout(dp=2), precision=Precision.BF16),
        environment=make_environment(machine=found, device="cuda"),
    )
    assert peak_flops_per_second(record)[0] == peak


def test_forms_of_a_chip_that_are_not_its_sxm_module_are_not_taken_for_it() -> None:
    others = ("NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA GH200 480GB", f"{H100} MIG 1g.10gb")
    assert [gpu_of_device(name) for name in others] == [None] * 5
    known = gpu_of_device(H100)
    assert known and known.name == "h100"


@pytest.mark.parametrize(
    "error, status",
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), Status.OOM),
        (MemoryError(), Status.OOM),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:116] err == 0. DefaultCPUAllocator: can't allocate memory"),
            "oom",
        ),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"), Status.OOM),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), Status.OOM),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), Status.OOM),
        (
            RuntimeError(
                "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error (run with NCCL_DEBUG=INFO for details),"
                " NCCL version 2.27.5\nLast error:\nCuda failure 2 'out of memory'"
            ),
            Status.OOM,
        ),
        (RuntimeError("NCCL error: ncclSystemError\nLast error:\nFailed to CUDA calloc async 4194304 bytes"), "oom"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx`"), Status.RAISED),
        (
            RuntimeError(
                "NCCL error: unhandled system error\nLast error:\nCall to connect returned Connection refused"
            ),
            "raised",
        ),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), Status.RAISED),
    ],
    ids=lambda value: str(value)[:40],
)
def test_libraries_that_run_out_of_memory_are_believed(error: BaseException, status: str) -> None:
    assert _kind(error) == status


def test_arithmetic_is_pinned_whatever_an_import_has_set() -> None:
    torch.set_float32_matmul_precision("medium")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.enable_flash_sdp(False)
    with pinned(Tuning()):
        told = kernels.effective_settings()
    assert (
        told.items()
        >= {
            "float32 products": "highest",
            "tf32": "products False, convolutions False",
            "16-bit sums of split products": "bf16 True, fp16 True",
            "attention": "flash_attention, efficient_attention, math, cudnn_attention",
            "deterministic algorithms": "False",
        }.items()
    )
    torch.backends.cuda.enable_flash_sdp(True)


def test_what_nccl_was_told_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    assert kernels.effective_settings()["NCCL_ALGO"] == "Ring"


def test_the_allocator_s_statistics_become_bytes_that_are_of_no_use_and_bytes_outside() -> None:
    """By the names that `torch.cuda.memory_stats` documents: of 80 GB 30 are free, and PyTorch holds 40."""
    giga = 10**9
    told = {
        "allocated_bytes.all.peak": 35 * giga,
        "reserved_bytes.all.peak": 45 * giga,
        "reserved_bytes.all.current": 40 * giga,
        "inactive_split_bytes.all.current": 3 * giga,
        "num_alloc_retries": 2,
    }
    assert device_memory(told, (30 * giga, 80 * giga)) == DeviceMemory(
        allocated_peak_bytes=35 * giga,
        reserved_peak_bytes=45 * giga,
        fragmented_bytes=3 * giga,
        num_retries=2,
        outside_bytes=10 * giga,
    )
    assert read_device_memory(torch.device("cpu")) is None


def test_an_image_that_turns_tf32_on_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1")
    assert process_environment(ClusterSpec(), Task.OBSERVE)["TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"] == "0"


@pytest.mark.parametrize("counted, remarks", [(1090, 0), (1101, 0), (1112, 1), (1078, 1), (None, 0)])
def test_meters_that_disagree_with_cuda_s_allocator_are_remarked_on(counted: int | None, remarks: int) -> None:
    """By more than 1 %: 1,000 bytes of tensors and 100 that kernels worked in were metered."""
    memory = MemoryReading(
        steady=Bytes(), states=Bytes(), peak=Bytes(activations=1000), workspace_bytes=100, allocator_peak_bytes=counted
    )
    report = RankReport(rank=0, build_seconds=0.0, run_seconds=0.0, losses=[1.0], memory=memory)
    found = _disagreeing([report])
    assert len(found) == remarks
    assert not found or f"the meters saw 1,100 bytes and the allocator counted {counted:,}" in found[0]


def test_a_loaded_optimizer_s_count_of_steps_stays_with_the_host(tmp_path: Path) -> None:
    """On a GPU it would be read back for every parameter at every step. `meta` stands for a device that is not the
    host: what was loaded to it would have no values."""
    case = make_case()
    cpu = RankContext(rank=0, world_size=1, device=torch.device("cpu"), backend="gloo", scratch=tmp_path)
    model = initial_model(case, cpu.device)
    engine = DataParallelEngine(case, cpu, model, build_optimizer(case.workload.optimizer, model.named_parameters()))
    engine.backward(make_batch(case.workload, 0))
    engine.update()
    torch.save(engine.state(), tmp_path / "state.pt")
    engine.context = dataclasses.replace(cpu, device=torch.device("meta"))
    engine.load(tmp_path)
    steps = [state["step"] for state in engine.optimizer.state.values()]
    assert steps and all(step.device.type == "cpu" and step == 1 for step in steps)


def test_batches_are_pinned_and_copied_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    case, asked = make_case(), list[dict[str, object]]()
    batch = make_batch(case.workload, 0)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.clone())
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device, **how: asked.append(how) or tensor)
    batch.pinned().shard(0, 2).to(torch.device("cuda"))
    assert asked == [{"non_blocking": True}] * 3


# What forks must not have touched.

_FORK_SAFE = """
    import importlib, os, sys, warnings
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import torch

    def touched(*_, **__):
        raise AssertionError("CUDA was touched")

    torch.cuda._is_compiled = lambda: True
    torch.cuda._device_count_nvml = lambda: 8
    torch.cuda._lazy_init = touched
    torch._C._cuda_getDeviceCount = touched
    torch._C._cuda_getCurrentRawStream = touched  # which a CPU's build lacks, and PyTorch's compiler imports
    from meshmark.adapter.registry import builtin_adapters, load_adapter
    from meshmark.environment import describe
    from meshmark.launch.launch import _ALWAYS
    from meshmark.environment import num_gpus
    from meshmark.passes.noise import noise_key
    from tests.factories import make_case
    import meshmark.cli.commands, meshmark.pytest_plugin.plugin

    assert num_gpus() == 8, num_gpus()
    assert describe("cuda", "nccl", 1).machine == "8 CUDA devices", describe("cuda", "nccl", 1).machine
    noise_key(make_case(), 5, "cuda")
    adapters = [load_adapter(target) for target in builtin_adapters().values()]
    there = [a for a in adapters if not a.virtual_environment and not any(r.missing for r in a.requires)]
    frameworks = [name for adapter in there for name in adapter.modules()]
    assert {"deepspeed", "megatron.core", "accelerate", "fairscale", "lightning_fabric"} <= set(frameworks)
    warnings.simplefilter("ignore")
    for name in (*_ALWAYS, *frameworks):
        importlib.import_module(name)
    assert not torch.cuda.is_initialized()
"""


@pytest.mark.slow
def test_what_is_done_before_a_fork_does_not_touch_cuda(tmp_path: Path) -> None:
    """On a machine where NVML tells of eight GPUs and there is no `nvidia-smi`."""
    path = {"PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment_ = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"} | path
    code = textwrap.dedent(_FORK_SAFE)
    done = subprocess.run([sys.executable, "-c", code], env=environment_, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_framework_that_starts_cuda_when_it_is_imported_is_named(tmp_path: Path) -> None:
    """By a stand-in for torch, for here is no CUDA to start."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("from torch import cuda\n")
    (tmp_path / "torch" / "cuda.py").write_text("started = False\ndef is_initialized(): return started\n")
    (tmp_path / "greedy.py").write_text("import torch.cuda\ntorch.cuda.started = True\n")
    root = str(Path(environment.__file__).parent.parent)
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), root])}
    for modules, greedy in ((["torch"], False), (["greedy"], True)):
        server = ForkServer.start(variables, modules)
        try:
            if greedy:
                with pytest.raises(MeshmarkError, match="importing greedy started CUDA .* --launcher torchrun"):
                    server.await_ready("greedy", seconds=60)
            else:
                server.await_ready("torch", seconds=60)
        finally:
            server.close()


@pytest.mark.parametrize("name", ["megatron", "megatron-gpt", "megatron-gpt-zero1"])
def test_megatron_s_layers_have_the_one_queue_that_they_rely_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = load_adapter(builtin_adapters()[name])
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    assert adapter.environment("cpu") == {} and adapter.environment("cuda") == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    assert adapter.environment("cuda") == {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, "as its user says"


# Where engines put things.


class Strays(TorchDispatchMode):
    """Names the operators that are given tensors of two devices; scalars may come from the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.dim()]
        if len({tensor.device.type for tensor in tensors}) > 1:
            self.found.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("moved", [True, False])
@pytest.mark.parametrize("name", ["gpt-mini", "llama-tiny", "vit-digits"])
def test_everything_of_an_engine_is_on_its_context_s_device(
    name: str, moved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`meta` stands for a GPU: a build of PyTorch for CPUs makes no tensor of CUDA's, not even a fake one, and of the
    frameworks only plain PyTorch takes `meta`. What were left on the host would be seen: a batch that is not moved."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())  # which knows no `meta`
    if not moved:
        monkeypatch.setattr(Batch, "to", lambda batch, device: batch)
    case, device = make_case(workload=workload(name)), torch.device("meta")
    context = RankContext(rank=0, world_size=1, device=device, backend="gloo", scratch=tmp_path)
    with Strays() as strays:
        engine = Single().build(case, context)
        if not moved:
            with contextlib.suppress(RuntimeError):
                engine.backward(make_batch(case.workload, 0))
            assert strays.found
            return
        shares = [engine.evaluate(make_batch(case.workload, 0)), engine.backward(make_batch(case.workload, 0))]
        gradients = list(engine.gradients().values())
        engine.update()
    held = engine.holdings()
    states = [state for state in held.optimizer_states if state.dim()]
    placed = [*shares, *gradients, *held.parameters, *engine.parameters().values(), *engine.buffers().values(), *states]
    assert {tensor.device.type for tensor in placed} == {"meta"} and not strays.found
    assert len(states) == 2 * len(gradients) > 0


@pytest.mark.parametrize("precision", Precision.PRESETS.values(), ids=str)
@pytest.mark.parametrize("matmul", [None, *Matmul], ids=str)
def test_no_utilisation_exceeds_the_peak_of_the_arithmetic_in_use(precision: Precision, matmul: Matmul | None) -> None:
    """TF32 had been held against the peak of fp32, seven times lower."""
    tuning = Tuning(matmul=matmul) if matmul else Tuning()
    case = make_case(layout=Layout(dp=1), precision=precision, tuning=tuning)
    record = make_timed(case=case, environment=make_environment(machine=f"1 x {H100}", device="cuda"))
    found, _ = peak_flops_per_second(record)
    gpu = gpu_of_device(H100)
    assert gpu and found
    if matmul is Matmul.TF32 and precision.compute is Dtype.FP32:
        assert found == gpu.peak_flops["tf32"]
    elif precision.compute.short in gpu.peak_flops:
        assert found == gpu.peak_flops[precision.compute.short]
    else:
        assert found == record.timing.peak_flops_per_second, "which was measured under the same tuning"
