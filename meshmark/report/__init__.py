"""Markdown reports from records alone.
Tables and plots, and what the planner says beside what was measured. Nothing is launched: a report can be made
anywhere, and of other machines' records.

May import: spec, theory, adapter, plan, judge, measure, records, run, conformance.
"""
