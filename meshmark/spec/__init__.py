"""What is asked: case, layout, workload, optimizer, precision, model, hardware. No torch.

May import: nothing.
"""
