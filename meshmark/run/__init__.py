"""From a case to its record and its verdicts: requests, passes, ranks, launches, nodes.

May import: spec, reference, theory, adapter, measure, judge.
"""
