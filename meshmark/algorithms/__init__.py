"""What one step makes of the states of all replicas: each algorithm's exact transition, one small file a family.
The same lines compute in whatever precision they are given: in float64 they are the truth, in a run's own precision
they are part of the noise. Engines in `adapters/` do it by messages, and are judged by these. docs/algorithms.md has
the list.

May import: spec, reference.
"""
