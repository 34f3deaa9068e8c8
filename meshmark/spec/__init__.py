"""What is asked: case, layout, workload, optimizer, precision, model, hardware. No torch.
Frozen dataclasses that say a case in words of the field, validated when they are made, and their identities: a
case's id, a workload's fingerprint. Whatever another folder needs to know of a case, it asks here; nothing here
knows how it is trained, measured or judged.

May import: nothing.
"""
