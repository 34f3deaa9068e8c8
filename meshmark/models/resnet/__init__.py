"""Residual networks: `config` has the dimensions, `module` the layers."""
