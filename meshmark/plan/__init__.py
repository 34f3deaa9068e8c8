"""Plan training on a cluster: memory and time of any layout, and the best layout.

A model, a GPU, a recipe and rates make a `Grid` of layouts. Memory and time are computed from the grid, and searches
and predictions from these. Every formula works on a whole `Grid` (columns of layouts), so that one layout and a
hundred thousand take the same path. Only `microbenchmarks`, and `calibrate` where it measures, import torch. No
framework is imported.

May import: models, spec, theory.
"""
