"""From a case to its record and its verdicts.

The runner turns a case into requests and has them launched. It gathers the reports of the ranks into a record and
judges it against the truth, the plan and, in time, against the run that was judged.

May import: models, spec, theory, adapter, judge, measure, records, passes, launch.
"""
