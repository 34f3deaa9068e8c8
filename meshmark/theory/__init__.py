"""What one case must hold, send and compute, in closed form; what the suites judge by. No fitted rates, no torch.
Columns of layouts (`Grid`) go in, bytes of states and activations, bytes by collective and FLOPs come out. A
framework's own ways (copies in which width, buckets, what is sharded) are a `TrainingRecipe`, which its adapter
chooses. The planner stands on the same formulas.

May import: spec.
"""
