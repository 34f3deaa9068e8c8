"""Models made smaller by quantization and pruning, judged against their specifications: docs/compression.md.

May import: models, spec, reference, measure, adapter, judge, records.
"""
