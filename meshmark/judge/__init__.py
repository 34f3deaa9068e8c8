"""Judge what a rank computed: trace, truth, noise, deviations, diagnosis.

A run is judged by induction, each step from where the run is. Loss and gradients are compared with one process in
float64, and the update with a float64 optimizer that gets the run's own gradients. Equal means within a small factor
of the noise of rounding alone. Failures are explained by the faults that would produce them.

May import: models, spec, reference, adapter, algorithms.
"""
