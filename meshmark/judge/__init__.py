"""From what a rank computed to what is wrong with it: trace, truth, noise, deviations, diagnosis.

May import: spec, reference, adapter.
"""
