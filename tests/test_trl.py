"""TRL's `SFTTrainer`: judged as engines are, wrong where a subclass is, and what it takes loss of by default.

Without TRL (`pip install trl==1.16.0`) these tests skip.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from meshmark.adapter.contract import Adapter
from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.adapters.trl import TRLSFT, examples
from meshmark.cli.options import chosen_workloads
from meshmark.judge.faults import Fault
from meshmark.launch.launch import ForkserverLauncher
from meshmark.reference.data import IGNORED
from meshmark.run.runner import Runner, RunOptions
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.workload import workload
from tests.broken import loops

ROOT = Path(__file__).parent.parent
LAYOUT = Layout(dp=2, num_micro_batches=4)


class SFTDividesLossTwice(loops.DividesLossTwice, TRLSFT):
    pass


class SFTDividesByOwnTokens(loops.DividesByOwnTokens, TRLSFT):
    pass


def _case(name: str) -> Case:
    (llama,) = chosen_workloads(f"hf:{ROOT}/examples/transformers/llama.json", None, None)
    case = Case(adapter=name, workload=llama, layout=LAYOUT)
    if reason := load_adapter(builtin_adapters()["trl-sft"]).refusal(case, "cpu", "gloo"):
        pytest.skip(reason)
    return case


@pytest.mark.slow
def test_it_is_judged_as_an_engine_is(launcher: ForkserverLauncher, tmp_path: Path) -> None:
    case = _case("trl-sft")
    runner = Runner(launcher, builtin_adapters(), RunOptions(observed_steps=3), tmp_path)
    record = runner.observe(case)
    runner.close()
    judged = {verdict.suite: verdict.passed for verdict in record.verdicts}
    assert judged == {"equivalence": True, "memory": True, "communication": True}, record.outcome.message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "fault"), [(SFTDividesLossTwice, Fault.SCALED), (SFTDividesByOwnTokens, Fault.UNEVEN)]
)
def test_a_wrong_subclass_fails_and_is_named(
    broken: type[Adapter], fault: Fault, launcher: ForkserverLauncher, tmp_path: Path
) -> None:
    target, case = {"broken": f"{__name__}:{broken.__name__}"}, _case("broken")
    runner = Runner(launcher, target, RunOptions(), tmp_path)
    record = runner.observe(case)
    runner.close()
    diagnosis = record.equivalence.diagnosis
    assert diagnosis is not None and diagnosis.fault is fault, (diagnosis, record.outcome.message)


def test_an_example_is_a_row_with_its_labels_shifted_back() -> None:
    case = _case("trl-sft")
    example = next(examples(case))
    assert len(example["input_ids"]) == len(example["labels"]) and example["labels"][0] == IGNORED
    assert any(label != IGNORED for label in example["labels"])


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of Transformers, about TRL's own defaults
@pytest.mark.skipif(find_spec("trl") is None, reason="pip install trl==1.16.0")
def test_by_default_only_completions_are_trained(tmp_path: Path) -> None:
    """Of examples with a prompt and a completion; of texts, all tokens."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer  # type: ignore[attr-defined,unused-ignore]

    words = Tokenizer(WordLevel({"<eos>": 0, "a": 1, "b": 2, "c": 3}, unk_token="<eos>"))
    words.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment,unused-ignore]
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}

    def labels(rows: dict[str, list[str]]) -> list[int]:
        trainer = SFTTrainer(
            model=LlamaForCausalLM(LlamaConfig(vocab_size=4, **sizes)),
            args=SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[]),
            train_dataset=Dataset.from_dict(rows),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>"),
        )
        batch = trainer.data_collator([trainer.train_dataset[0]])
        found: list[int] = batch["labels"][0].tolist()
        return found

    completed = labels({"prompt": ["a b"], "completion": [" c"]})
    assert completed[:2] == [IGNORED, IGNORED] and completed[2] == 3
    assert labels({"text": ["a b c"]})[:3] == [1, 2, 3]


def test_it_is_refused_on_models_that_transformers_does_not_bring() -> None:
    case = Case(adapter="trl-sft", workload=workload("gpt-mini"), layout=LAYOUT)
    assert "trains models of Transformers alone" in str(TRLSFT.supports(case, "cpu", "gloo"))
