"""Processes: nodes, ranks, their folders, their time limits, and how they end.

A launcher runs a request in fresh processes, one a rank, and brings home what they leave. A crash or a hang is an
outcome.

May import: spec, reference, adapter, measure, records, passes.
"""
