"""The interface to every framework: `Adapter`, `Engine`, `Loop`, the registry, the matrix and `single`.

An `Adapter` declares what its framework supports (`Capabilities`), and the memory and traffic that it is known to need.
It builds an `Engine` in each rank. An engine trains and exposes its state; it neither times nor judges itself.
`DataParallelEngine` is the base of engines that run whole replicas. docs/adapter.md explains how to write an adapter.

May import: models, spec, reference, theory.
"""
