"""Requests to ranks, the reports of ranks, and the records made of them, in memory and on disk.

A request says what a rank is to measure, and a rank report is its answer. A record is the gathered, versioned outcome
of one pass over one case: one self-describing line of DIR/records.jsonl. Reading records needs no torch.

May import: models, spec, theory, judge, measure.
"""
