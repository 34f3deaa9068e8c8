"""Requirements on a machine that others have set up, such as a GPU lent for an hour: an older PyTorch, missing
packages, a library that a build of PyTorch does not know."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from meshmark.passes.kernels import drivers_cuda
from meshmark.records.record_file import RecordFile
from tests.factories import make_good, make_timed

ROOT = Path(__file__).parent.parent
CHECKED = "2.11"
"""PyTorch, of whose wheel (CUDA 13) every name below was looked up in 2026-11, and every public one."""

PRIVATE = {
    "_BatchNorm": "torch.nn.modules.batchnorm",
    "_functorch": "torch._C",
    "_modules": "torch.nn:Module",
    "_numels": "torch.distributed.fsdp._flat_param:FlatParameter",
    "_param_infos": "torch.distributed.fsdp._flat_param:FlatParameter",
    "_parameters": "torch.nn:Module",
    "_shapes": "torch.distributed.fsdp._flat_param:FlatParameter",
    "_shared_param_infos": "torch.distributed.fsdp._flat_param:FlatParameter",
    "_use_orig_params": "torch.distributed.fsdp._flat_param:FlatParamHandle",
    "_record_memory_history": "torch.cuda.memory",
    "_snapshot": "torch.cuda.memory",
    "_stage": "torch.distributed.pipelining.schedules:PipelineScheduleSingle",
    "_step_microbatches": "torch.distributed.pipelining.schedules:_PipelineSchedule",
    "_version": "torch:Tensor",
    "_backward_hooks": "torch:Tensor",
    "_post_accumulate_grad_hooks": "torch:Tensor",
    "_shard_param_infos": "torch.distributed.fsdp._flat_param:FlatParameter",
    "_sleep": "torch.cuda",
    "_cuda_clearCublasWorkspaces": "torch._C",
    "_destroy": "torch.library:Library",
    "_distributed_c10d": "torch._C",
    "_dump_fr_trace": "torch._C._distributed_c10d",
    "_dump_nccl_trace": "torch._C._distributed_c10d",
    "_foreach_add_": "torch",
    "_foreach_copy_": "torch",
    "_foreach_div_": "torch",
    "_foreach_mul_": "torch",
    "_foreach_sub_": "torch",
    "_foreach_zero_": "torch",
    "_get_cudnn_sdp_enabled": "torch._C",
    "_get_flash_sdp_enabled": "torch._C",
    "_get_fsdp_state": "torch.distributed.fsdp._fully_shard._fully_shard:FSDPModule",
    "_get_math_sdp_enabled": "torch._C",
    "_get_mem_efficient_sdp_enabled": "torch._C",
    "_get_sdp_priority_order": "torch._C",
    "_get_unflat_views": "torch.distributed.fsdp._flat_param:FlatParamHandle",
    "_handle": "torch.distributed.fsdp._common_utils:_FSDPState",
    "_dynamo": "torch",
    "_engine_run_backward": "torch.autograd",
    "_comm_hooks": "torch.distributed.algorithms",
    "_fsdp_api": "torch.distributed.fsdp._fully_shard",
    "_fsdp_param": "torch.distributed.fsdp._fully_shard",
    "_fsdp_param_group": "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState",
    "_fully_shard": "torch.distributed.fsdp",
    "_impls": "torch.library",
    "_internal": "torch.testing",
    "_len_torch_dispatch_stack": "torch._C",
    "_len_torch_function_stack": "torch._C",
    "_python_dispatch": "torch.utils",
    "_fqns": "torch.distributed.fsdp._flat_param:FlatParameter",
    "_internal_rpc_pickler": "torch.distributed.rpc.internal",
    "_optimizer_step_post_hooks": "torch.optim:Optimizer",
    "_optimizer_step_pre_hooks": "torch.optim:Optimizer",
    "_numels_with_padding": "torch.distributed.fsdp._flat_param:FlatParameter",
    "_params": "torch.distributed.fsdp._flat_param:FlatParameter",
    "_utils": "torch.distributed.tensor",
    "_world": "torch.distributed.distributed_c10d",
}
"""PyTorch's private names that adapters and the core use, and where they are; behind a colon, the class whose attribute
it is. Any of them may go with the next release: a new use is looked up in `CHECKED`, then written here."""
_OF_CUDA_BUILDS = {"_cuda_clearCublasWorkspaces", "_dump_nccl_trace"}
_OTHERS = {
    "_actions",
    "_activation_checkpointing_kwargs",
    "_allocate_or_extend_buffers",
    "_CFuncPtr",
    "_clear",
    "_exit_function",
    "_format_config",
    "_forward_module",
    "_fsdp_kwargs",
    "_get_expert_parallel_group",
    "_get_param_partition_rank",
    "_get_sequence_parallel_group",
    "_get_zero_param_intra_parallel_group",
    "_getframe",
    "_global_grad_norm",
    "_grad_acc_hooks",
    "_init_deepspeed_distributed",
    "_loaded_ops",
    "_model_mapping",
    "_muon_allgather_buffers",
    "_orig_size",
    "_param_name_groups",
    "_param_to_rank",
    "_precompute_checkpointable_values",
    "_run_exitfuncs",
    "_saved_other",
    "_saved_self",
    "_set_world_ranks",
    "_to_copy",
}
"""Private names of argparse, atexit, multiprocessing, os, sys, ctypes; of Transformers, DeepSpeed, Fabric, FairScale;
autograd, ATen."""
_MISSING = ("ruptures", "plotly", "itables", "deepspeed", "fairscale", "lightning_fabric", "megatron", "jsonschema")
"""Packages that Meshmark can use, and that such a machine lacked."""


def private_names() -> set[str]:
    """Attributes beginning with one underscore that are read and that no module here defines, and such modules."""
    trees = [
        ast.parse(path.read_text()) for folder in ("meshmark", "adapters") for path in (ROOT / folder).rglob("*.py")
    ]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)} - own
    modules = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    read |= {part for module in modules if module.startswith("torch.") for part in module.split(".")}
    return {name for name in read if name.startswith("_") and not name.startswith("__")}


@pytest.mark.slow
def test_private_names_of_pytorch_are_known_and_there() -> None:
    assert private_names() - {"_C"} == PRIVATE.keys() | _OTHERS
    requirement = f"torch>={CHECKED}"
    assert requirement in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    lacking = [name for name, place in PRIVATE.items() if not _has(place, name)]
    assert set(lacking) <= (set() if torch.version.cuda else _OF_CUDA_BUILDS)


def _has(place: str, name: str) -> bool:
    module, _, cls = place.partition(":")
    owner = importlib.import_module(module)
    if not cls:
        return hasattr(owner, name) or (hasattr(owner, "__path__") and _is_module(f"{module}.{name}"))
    return hasattr(getattr(owner, cls), name) or bool(re.search(rf"\b{name}\b", inspect.getsource(getattr(owner, cls))))


def _is_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


_WITHOUT = f"""
    import sys
    for name in {_MISSING!r}:
        sys.modules[name] = None
    import pytest
    from meshmark.cli.commands import main
    for command in (["doctor"], ["report", sys.argv[1], "-o", sys.argv[1] + "/report.md"], ["calibrate", "--help"]):
        try:
            code = main(command)
        except SystemExit as ended:
            code = ended.code
        assert not code, (command, code)
    sys.exit(pytest.main(["suites", "--conformance", "--profile", "--collect-only", "-q", "-p", "no:cacheprovider"]))
"""


def test_what_a_gpu_run_takes_does_without_packages_that_may_be_missing(tmp_path: Path) -> None:
    file = RecordFile(tmp_path)
    file.append(make_good())
    file.append(make_timed())
    file.close()
    code = "\n".join(line.removeprefix("    ") for line in _WITHOUT.splitlines())
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "test_equivalence[ddp-dp2.mb3-gpt-tiny-fp32]" in done.stdout and "test_profile[" in done.stdout
    assert (tmp_path / "report.md").is_file()


def test_the_driver_is_asked_for_its_cuda_itself(tmp_path: Path) -> None:
    """By a stand-in for libcuda.so.1: CUDA's documented interface, for here is no driver."""
    source, library = tmp_path / "cuda.c", tmp_path / "libcuda.so"
    source.write_text("int answer; int cuDriverGetVersion(int *version) { *version = 13020; return answer; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    assert drivers_cuda(str(library)) == "13.2"
    source.write_text(source.read_text().replace("int answer", "int answer = 3"))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", f"{library}.3", str(source)], check=True)
    with pytest.raises(OSError, match="answers 3"):
        drivers_cuda(f"{library}.3")
