"""Predicts what the suites measure, and plans: memory and time of any layout in closed form, the best layout.

    model, system, recipe, rates -> Grid of layouts -> memory, time -> search, predict, tables, validate

Every formula works on a `Grid` (columns of layouts) at once, so that one layout and a hundred thousand take one path.
`states` is what `memory` says of one rank of a case, `traffic` the exact count of the bytes that it asks for: both are
what the suites judge against. torch is imported by `measure`, and by `calibrate` and `dry_run` where they measure; no
framework is.
"""
