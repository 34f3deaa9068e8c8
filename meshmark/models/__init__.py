"""Model families that are the same for every framework, one folder a family.

A family's package has the dimensions and the sizes derived from them, as a `ModelConfig`; it does not import torch, so
that planners start fast. Its `module` has the layers, as a `Model`, whose initial values are functions of seed and
name. A family of image models is added by its folder alone: its presets in `DIGITS` become workloads. A model of a
user's own is another `ModelConfig`: see `meshmark.spec.own_model`. Models that are only planned are read from a
`config.json`.

May import: nothing.
"""
