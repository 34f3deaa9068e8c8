"""Training scripts as they are: observed from outside for a few steps, and judged by a float64 recomputation.

`meshmark check` starts the script's ranks. In each of them `recorder` notes what enters the model, the gradients that
enter its outputs, and what the optimizer does. Then rank 0 recomputes the gradients of all ranks with a copy of the
model, and says whether the script trains correctly and what it optimises. In a rank it needs torch and numpy alone.

May import: judge.
"""
