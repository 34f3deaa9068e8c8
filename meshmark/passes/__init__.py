"""Passes that a rank runs over a case: observe it, time it, measure its noise, or test one clause.

A pass drives an engine for some steps and returns a rank report. Rank 0 judges with PyTorch's own functions, whatever
the framework has put in their place. If its truth still differs from that of the noise runs, a fresh process judges.

May import: models, spec, reference, theory, adapter, algorithms, judge, measure, records.
"""
