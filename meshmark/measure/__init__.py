"""Meters watch an engine from outside: what the allocator and the communication layer did, not what an adapter says."""
