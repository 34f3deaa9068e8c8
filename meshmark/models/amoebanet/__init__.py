"""AmoebaNet: `config` has the dimensions, `module` the layers."""
