"""What must hold of any framework: scenarios that show it, clauses that say it, judges that find it out.

May import: spec, reference, adapter, judge, run.
"""
