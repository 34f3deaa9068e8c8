"""Vision transformers: `config` has the dimensions, `module` the layers."""
