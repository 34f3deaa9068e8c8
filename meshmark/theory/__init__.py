"""Closed forms for what a case must hold, send and compute, which the suites judge by. No fitted rates, no torch.

The inputs are columns of layouts (`Grid`). The outputs are bytes of states and activations, bytes by collective, and
FLOPs. A framework's choices (dtypes of copies, buckets, what is sharded) are a `TrainingRecipe`, which its adapter
selects. The planner uses the same formulas.

May import: models, spec.
"""
