"""From a case to its record and its verdicts.

The runner turns a case into requests and launches them. It gathers the reports of the ranks into a record. A record is
judged against the truth and the plan. A timed run is also compared with the run that was judged.

May import: models, spec, theory, adapter, judge, measure, records, passes, launch.
"""
