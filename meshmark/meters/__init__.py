"""Meters watch an engine from outside: what PyTorch's allocator and communication layer did, not what an adapter says."""
