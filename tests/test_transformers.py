"""Models of Hugging Face Transformers, by their own code, from a config.json."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from meshmark.cli.options import chosen_workloads
from meshmark.errors import InputError
from meshmark.judge.truth import exact_gradients, initial_values
from meshmark.models.module import block_classes
from meshmark.reference import transformers_model
from meshmark.reference.data import make_batch
from meshmark.spec.own_model import OwnModelConfig

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "examples" / "transformers"
pytest.importorskip("transformers")


def config(folder: Path, **changes: object) -> Path:
    """Write the Llama example with some keys changed."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads((CONFIGS / "llama.json").read_text()) | changes))
    return path


@pytest.mark.slow
def test_one_command_judges_a_config_under_two_frameworks(tmp_path: Path) -> None:
    command = ["-m", "pytest", "-q", "suites", "--workload", f"hf:{CONFIGS / 'llama.json'}", "--adapters", "ddp,fsdp2"]
    command += ["-k", "equivalence or memory or communication", "--world", "2", "--results", str(tmp_path)]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    for adapter in ("ddp-dp2.mb4", "fsdp2-dp2.zero3.mb4"):
        assert re.search(rf"{adapter}-llama\.\w+-fp32 +yes +as planned +as planned", done.stdout), done.stdout


def test_a_model_with_dropout_is_refused_with_the_keys_to_change(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"attention_dropout=0\.1: .*set these to 0"):
        chosen_workloads(f"hf:{config(tmp_path, attention_dropout=0.1)}", None, None)


@pytest.mark.parametrize(
    "suffix, changes, error",
    [
        (":AutoModelForNothing", {}, "no data for the head 'AutoModelForNothing'; expected one of"),
        (":AutoModelForSpeechSeq2Seq", {}, "has no AutoModelForSpeechSeq2Seq of model_type 'llama'"),
        ("", {"model_type": "lama"}, "lama"),
    ],
)
def test_what_cannot_be_built_is_an_error_that_says_what_to_do(
    tmp_path: Path, suffix: str, changes: dict[str, object], error: str
) -> None:
    with pytest.raises(InputError, match=error):
        chosen_workloads(f"hf:{config(tmp_path, **changes)}{suffix}", None, None)


def refused(folder: Path, **changes: object) -> str:
    """Return why a config is refused."""
    with pytest.raises(InputError) as raised:
        chosen_workloads(f"hf:{config(folder, **changes)}", None, None)
    assert "config.json" in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    "key, value, limit",
    [
        ("num_hidden_layers", 10**9, "at most 2,000"),
        ("vocab_size", 10**12, "at most 10,000,000"),
        ("num_labels", 10**9, "at most 100,000"),
        ("max_position_embeddings", 10**12, "at most 1,000,000,000"),
        ("text_config", {"num_layers": 10**9}, "at most 2,000"),
        ("sizes", [[10**12]], "at most 10,000,000"),
    ],
)
def test_a_size_that_no_model_has_is_refused_before_it_is_read(
    tmp_path: Path, key: str, value: object, limit: str
) -> None:
    """Transformers makes a list of all layers, and a name for every class."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("transformers.AutoConfig.for_model", lambda *_, **__: pytest.fail("read"))
        assert limit in refused(tmp_path, **{key: value})


def test_a_model_without_room_is_refused_before_it_is_allocated(tmp_path: Path) -> None:
    with LessMemory(2**30):
        told = refused(tmp_path, hidden_size=10**6, head_dim=None)
    assert re.search(r"the model takes at least [\d,.]+ GB in float32, and this machine has [\d,.]+ GB; take", told)


def test_a_batch_without_room_is_refused_before_it_is_allocated(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads((CONFIGS / "resnet.json").read_text()) | {"image_size": 10**6}))
    with LessMemory(2**30), pytest.raises(InputError, match=r"config.json: no batch fits .* takes at least .* GB"):
        chosen_workloads(f"hf:{file}:AutoModelForImageClassification", None, None)


def test_a_model_of_too_many_modules_is_refused_while_they_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_model, "_MOST_MODULES", 20)
    assert "over 20 modules; take fewer layers" in refused(tmp_path)


LARGE = {
    "gpt2": {"model_type": "gpt2", "attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0, "summary_first_dropout": 0},
    "llama-3.1-405b": {
        "model_type": "llama",
        "num_hidden_layers": 126,
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500_000_000,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "n_routed_experts": 256,
        "vocab_size": 129_280,
        "max_position_embeddings": 163_840,
        "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    },
    "llama-4-positions": {"model_type": "llama", "max_position_embeddings": 10_485_760, "attn_implementation": "sdpa"},
    "22k-classes": {
        "model_type": "vit",
        "id2label": {str(i): f"a name of some forty characters, number {i}" for i in range(21_841)},
        "attn_implementation": None,
        "_attn_implementation_autoset": True,
    },
}


@pytest.mark.parametrize("name", LARGE)
def test_no_limit_but_the_memory_refuses_a_published_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(transformers_model, "memory_bytes", lambda: 2**43)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LARGE[name]))
    head = ":AutoModelForImageClassification" if name == "22k-classes" else ""
    transformers_model.from_target(f"hf:{path}{head}")


def test_a_file_that_is_no_config_is_refused_and_named(tmp_path: Path) -> None:
    """A pipe was waited for, and nested lists ended in a traceback."""

    def told(name: str) -> str:
        with pytest.raises(InputError) as raised:
            chosen_workloads(f"hf:{tmp_path / name}", None, None)
        assert name in str(raised.value)
        return str(raised.value)

    os.mkfifo(tmp_path / "pipe.json")
    unblocked = threading.Timer(5, (tmp_path / "pipe.json").write_text, ["{}"])  # so that it fails and does not hang
    unblocked.daemon = True
    unblocked.start()
    assert "no regular file" in told("pipe.json")
    unblocked.cancel()
    (tmp_path / "nested.json").write_text("[" * 100_000 + "]" * 100_000)
    assert "not JSON" in told("nested.json")
    (tmp_path / "deep.json").write_text('{"model_type": "llama", "x": ' + "[" * 400 + "]" * 400 + "}")
    assert "over 50 objects and lists within one another" in told("deep.json")
    with (tmp_path / "sparse.json").open("wb") as sparse:
        sparse.truncate(5 * 2**20)
    assert "over 4,194,304 bytes" in told("sparse.json")
    (tmp_path / "list.json").write_text("[]")
    assert "no model_type" in told("list.json")
    assert "No such file" in told("missing.json")


@pytest.mark.parametrize("changes", [{"hidden_size": -1}, {"hidden_size": "64"}, {"num_attention_heads": 0}])
def test_a_config_that_transformers_cannot_build_is_an_error_of_the_file(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    assert "Transformers" in refused(tmp_path, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"_attn_implementation": "org/repo"},
        {"attn_implementation": "kernels-community/flash-attn2@main:function"},
        {"attn_implementation": "paged|org/repo"},
        {"attn_implementation": "flash_attention_2"},
        {"attn_implementation": {"": "org/repo"}},
        {"experts_implementation": "deepgemm"},
        {"_experts_implementation_internal": "org/repo"},
        {"text_config": {"attn_implementation": "org/repo"}},
        {"parts": [{"_attn_implementation": "org/repo"}]},
        {"backbone": "org/repo"},
        {"vision_config": {"architecture": "hf-hub:org/repo"}},
    ],
)
def test_what_the_hub_would_be_asked_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]
) -> None:
    monkeypatch.setattr("transformers.integrations.hub_kernels.get_kernel", lambda *_, **__: pytest.fail("loaded"))
    assert "nothing is downloaded here" in refused(tmp_path, **changes)


def test_code_of_a_repository_is_neither_asked_about_nor_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    head = "AutoModelForSpeechSeq2Seq"
    file = config(tmp_path, auto_map={head: "org/repo--code.Model"})
    with pytest.raises(InputError, match=f"has no {head} of model_type 'llama'"):
        chosen_workloads(f"hf:{file}:{head}", None, None)


class LessMemory:
    """Lets the process have no more than so many further bytes of address space."""

    def __init__(self, further: int) -> None:
        self.further, self.before = further, resource.getrlimit(resource.RLIMIT_AS)

    def __enter__(self) -> None:
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + self.further, self.before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_AS, self.before)


def test_two_configs_are_two_workloads(tmp_path: Path) -> None:
    (first,) = chosen_workloads(f"hf:{CONFIGS / 'llama.json'}", None, None)
    (second,) = chosen_workloads(f"hf:{config(tmp_path, rope_theta=5e5)}", None, None)
    assert first.model.num_parameters == second.model.num_parameters
    assert first.name.partition(".")[2] != second.name.partition(".")[2]


def described(target: str) -> OwnModelConfig:
    (workload,) = chosen_workloads(f"hf:{CONFIGS}/{target}", None, None)
    assert isinstance(workload.model, OwnModelConfig)
    return workload.model


def test_a_dry_run_counts_what_modules_read() -> None:
    """Three of T5's modules read one weight: twice more in the forward pass, once more in the backward pass."""
    t5, bert = described("t5.json:AutoModelForSeq2SeqLM"), described("bert.json:AutoModelForMaskedLM")
    assert t5.gathers == ((128 * 32, 3),) and bert.gathers == ((128 * 32, 2),)
    assert described("llama.json").gathers == () and described("llama.json").indexed == 0
    experts = 2 * 4 * (2 * 64 * 32 + 32 * 64)  # layers, experts, gate and up, down
    assert described("mixtral.json").indexed == experts


def test_blocks_are_the_classes_that_a_model_names_less_those_with_shared_weights() -> None:
    """BERT names its embeddings too, whose weight is that of the head."""
    whisper = described("whisper.json:AutoModelForSpeechSeq2Seq")
    assert {kind.__name__ for kind in block_classes(whisper)} == {"WhisperEncoderLayer", "WhisperDecoderLayer"}
    bert = described("bert.json:AutoModelForMaskedLM")
    assert {kind.__name__ for kind in block_classes(bert)} == {"BertLayer"}


@pytest.mark.parametrize("target", ["gemma3.json", "deepseek-v3.json", "t5.json:AutoModelForSeq2SeqLM"])
def test_the_truth_computes_nothing_in_float32(target: str) -> None:
    """Norms, rotary positions and routers cast to float32 by themselves, which the truth turns into float64."""
    (workload,) = chosen_workloads(f"hf:{CONFIGS}/{target}", None, None)
    values, batch = initial_values(workload), make_batch(workload, 0)
    exact_gradients(workload, values, batch)
    with Narrow() as seen:
        exact_gradients(workload, values, batch)
    assert seen.computed == set()


class Narrow(TorchDispatchMode):
    """Notes operators that read and make float32 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.computed: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        made = func(*args, **(kwargs or {}))
        copies = (torch.ops.aten.detach.default, torch.ops.aten.lift_fresh.default)
        if func not in copies and all(any(map(is_narrow, pytree.tree_leaves(part))) for part in (args, made)):
            self.computed.add(str(func))
        return made


def is_narrow(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.bfloat16)
