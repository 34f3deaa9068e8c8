"""Algorithms that are not synchronous SGD, one folder a family.

A family's `__init__` has its algorithms: frozen dataclasses of options that derive from
`meshmark.spec.algorithm.Algorithm`. Its `transition` has their equations, which compute in whatever precision they are
given: in float64 they are the truth, in a run's own precision they are part of the noise. Its `faults` has the ways in
which they are got wrong. Engines in `adapters/` do the same by messages, and are judged by these. Families are imported
through `algorithm_classes`, never by name. docs/algorithms.md has the list.

May import: models, spec, reference, theory.
"""
