"""Measure memory, traffic and time of one step of one rank.

A watch around one step reads the allocator, the saved tensors and the collectives that were issued. The framework is
only asked which tensors are parameters, gradients and states.

May import: spec, adapter.
"""
