"""The planner: memory and time of any layout, in closed form, and the search for the best one.

    model, system, recipe, rates -> Grid of layouts -> memory, time -> search, predict, tables, validate

Every formula works on a `Grid` (columns of layouts) at once, so that one layout and a hundred thousand take one path.
"""
