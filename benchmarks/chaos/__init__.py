"""Chaos: the suites run while what they run on is killed, stopped, filled and cut at random times by a seed, and what
they leave is checked. `python -m benchmarks.chaos` leaves reports/chaos.md.
"""
