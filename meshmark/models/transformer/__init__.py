"""The decoder-only transformers GPT and LLaMA, and BERT: `config` has the dimensions, `module` the layers."""
