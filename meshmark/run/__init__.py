"""From a case to its record: requests, passes, ranks, launches, nodes.

May import: spec, reference, theory, adapter, measure, judge.
"""
