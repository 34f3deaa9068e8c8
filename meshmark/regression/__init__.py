"""What became better or worse between runs, and how sure that is.
Two results folders, a folder and an accepted baseline, two environments in alternation, a range of commits, or a long
series of runs: verdicts are set side by side, bytes and collectives are exact, and times are tested with launches as
samples, corrected for the number of tests, so that the chance of a false alarm is known.

May import: spec, measure, records, run, conformance, report.
"""
