"""The description of a case: layout, workload, optimizer, precision and hardware.

Frozen dataclasses describe a case in the field's own terms. They are validated when they are made. They also define
identities: a case's id and a workload's fingerprint. Other folders look up here what they need to know about a case.
Nothing here knows how a case is trained, measured or judged, and nothing here imports torch.

May import: models.
"""
