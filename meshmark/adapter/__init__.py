"""The interface to every framework: `Adapter`, `Engine`, `Loop`, the registry, the matrix and `single`.

An `Adapter` says what its framework can do (`Capabilities`) and what it is known to hold and send, and builds an
`Engine` in each rank; an engine trains and shows what it has, and neither times nor judges itself. What engines of
whole replicas share is `DataParallelEngine`. docs/adapter.md says how to write one.

May import: models, spec, reference, theory.
"""
