"""Make reports from records alone.

Reports have tables and plots, and compare plans with measurements. Nothing is launched, so a report can be made
anywhere, also from records of other machines.

May import: models, spec, theory, adapter, plan, judge, measure, records, inference, run, conformance.
"""
