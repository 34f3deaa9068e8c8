"""GPT with mixtures of experts: `config` has the dimensions, `module` the layers."""
