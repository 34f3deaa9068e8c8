"""What really happened in one step of one rank: memory, traffic, time.

May import: adapter.
"""
