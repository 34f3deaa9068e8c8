"""What everyone trains: the models, their initial values, the data and the objective.

May import: spec.
"""
