"""What really happened in one step of one rank: memory, traffic, time.
A watch around one step reads the allocator, the saved tensors and the collectives that were really issued;
nothing is asked of the framework but which tensors are parameters, gradients and states.

May import: spec, adapter.
"""
