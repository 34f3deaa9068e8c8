"""What one case must hold, send and compute, in closed form; what the suites judge by. No fitted rates, no torch.

May import: spec.
"""
