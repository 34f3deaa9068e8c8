"""Models of Hugging Face Transformers, by their own code, from a config.json."""

from __future__ import annotations

import json
import re
import subprocess
import sys
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
    for adapter in ("ddp-dp2.mb2", "fsdp2-dp2.zero3.mb2"):
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
