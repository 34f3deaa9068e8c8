"""From what a rank computed to what is wrong with it: trace, truth, noise, deviations, diagnosis.
A run is judged by induction, each step from where the run is: loss and gradients against one process in float64,
the update against a float64 optimizer fed the run's own gradients; equal means within a small factor of the noise
that rounding alone makes. What fails is explained by the faults that would look like it.

May import: spec, reference, adapter, algorithms.
"""
