"""Markdown reports from records alone.

May import: spec, theory, measure, judge, run, conformance.
"""
