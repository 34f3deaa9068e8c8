"""Passes that a rank runs over a case: observe it, time it, measure its noise, or test one clause.

A pass drives an engine for some steps and returns a rank report.

May import: models, spec, reference, theory, adapter, algorithms, judge, measure, records.
"""
