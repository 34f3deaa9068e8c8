"""Measure memory, traffic and time of one step of one rank.

`Watch` sees each allocation and collective of a step by PyTorch's profiler and flight recorder. The framework is
only asked which tensors are parameters, gradients and states.

May import: spec, adapter.
"""
