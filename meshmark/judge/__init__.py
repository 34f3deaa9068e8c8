"""From what was measured to a verdict: truth, noise, deviations, diagnosis.

May import: spec, reference, theory, measure.
"""
