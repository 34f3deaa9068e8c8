"""Processes: nodes, ranks, their folders, their time limits, and how they end.

A launcher runs a request in fresh processes, one per rank, and collects their results. A crash or a hang is a result
too.

May import: spec, reference, adapter, measure, records, passes.
"""
