"""Requirements for any framework: scenarios that test them, clauses that state them, and judges that decide them.

A scenario is a pass over a varied case, shared by the clauses that read it. A clause ends as yes, no, a known gap or
unsupported, always with its evidence.

May import: models, spec, reference, theory, adapter, judge, measure, records, passes, run, inference.
"""
