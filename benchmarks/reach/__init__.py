"""Reach: which lines and options of the frameworks judged passes execute, and which mutants of them are killed.

`python -m benchmarks.reach` runs judged passes under coverage.py and leaves baselines/reach/measured.json; the page
reports/reach.md is made of that file alone. `python -m benchmarks.reach.mutants` runs mutants of the frameworks.
docs/reach.md explains how reach is measured.
"""
