"""Observe unchanged training scripts for a few steps, and judge them by a float64 recomputation.

`meshmark check` starts the script's ranks. In each of them `recorder` notes what enters the model, the gradients that
enter its outputs, and what the optimizer does. Then rank 0 recomputes the gradients of all ranks with a copy of the
model. It reports whether the script trains correctly and what it optimises. Inside a rank it needs only torch and
numpy.

May import: launch, judge.
"""
