"""Compare runs: what became better or worse, and how certain that is.

The sides are two results folders, a folder and an accepted baseline, two environments in alternation, a range of
commits, or a long series of runs. Verdicts are compared directly, and bytes and collectives exactly. Times are tested
with launches as samples and corrected for the number of tests, so that the false alarm rate is known.

May import: spec, measure, records, launch, run, conformance, report.
"""
