"""Algorithms that are not synchronous SGD, one folder a family.

A family's `__init__` has its algorithms: frozen dataclasses of options that derive from
`meshmark.spec.algorithm.Algorithm`. Its `transition` has their equations, which compute in any precision: in float64
they are the truth, and in a run's own precision they are part of the noise. Its `faults` has common mistakes, which a
diagnosis tries. Engines in `adapters/` implement the same algorithms over torch.distributed, and are judged by these.
Families are imported through `algorithm_classes`, never by name. docs/algorithms.md has the list.

May import: models, spec, theory.
"""
