"""Hugging Face's Trainer over a tiny Llama, with accumulation and texts of unequal length.

`hf_trainer.py bf16` trains in bf16 and computes activations again. `hf_trainer.py zero 3` trains with DeepSpeed.
"""

import sys
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Texts(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int):
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(4, 17, (1,), generator=generator))
        ids = torch.randint(1, 60, (16,), generator=generator)
        labels = ids.clone()
        labels[length:] = -100
        return {"input_ids": ids, "labels": labels, "attention_mask": (labels != -100).long()}


def main(low: bool, stage: int | None) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32,
    )  # fmt: skip
    deepspeed = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100},
        "zero_allow_untested_optimizer": True,
    }
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=5, use_cpu=True,
            report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True, learning_rate=1e-3,
            bf16=low, gradient_checkpointing=low, deepspeed=deepspeed if stage else None,
        )  # fmt: skip
        Trainer(LlamaForCausalLM(config), arguments, train_dataset=Texts()).train()


if __name__ == "__main__":
    main("bf16" in sys.argv, int(sys.argv[-1]) if "zero" in sys.argv else None)
