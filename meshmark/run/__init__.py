"""From a case to its record and its verdicts: requests, passes, ranks, launches, nodes.
The runner turns a case into requests, the launcher forks a process a rank from a server that has the
frameworks imported, the worker does a pass there and leaves a report, and the gathered reports become a record: one
self-describing line of a file. A crash or a hang is an outcome in it.

May import: spec, reference, algorithms, theory, adapter, measure, judge.
"""
