"""The command line: `meshmark doctor`, `cases`, `run`, `report`, `submit` and more.

May import: models, spec, reference, adapter, plan, measure, check, judge, records, passes, launch, report, regression.
"""
