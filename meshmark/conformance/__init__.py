"""What must hold of any framework: scenarios that show it, clauses that say it, judges that find it out.
A scenario is a pass over a varied case, shared by the clauses that read it; a clause ends as yes, no, a known
gap or unsupported, always with its evidence.

May import: spec, reference, theory, adapter, judge, measure, records, passes, run.
"""
