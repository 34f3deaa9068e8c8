"""What users ask of a cluster that they have not got: memory and time of any layout, and the best one.

A model, a GPU, a recipe and rates make a `Grid` of layouts, that its memory and time, and those searches and
predictions.
Every formula works on a `Grid` (columns of layouts) at once, so that one layout and a hundred thousand take one path.
torch is imported by `microbenchmarks` alone, and by `calibrate` where it measures; no framework is.

May import: spec, theory.
"""
