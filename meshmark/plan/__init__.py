"""Predicts what the suites measure, and plans: memory and time of any layout in closed form, the best layout.

    model, system, recipe, rates -> Grid of layouts -> memory, time -> search, predict, tables, validate

Every formula works on a `Grid` (columns of layouts) at once, so that one layout and a hundred thousand take one path.
`states` and `traffic` are the exact counts of one case that the suites judge against. torch is imported by
`measure`, and by `calibrate` and `dry_run` where they measure; no framework is.
"""
