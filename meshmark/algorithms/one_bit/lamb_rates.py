"""Numbers of 1-bit LAMB (arXiv:2104.06069, algorithm 1); the defaults of DeepSpeed's `OnebitLamb`."""

RATIOS = (0.01, 10.0)
"""Least and most of a tensor's norm over its update's, in the warm-up."""
AVERAGED = 0.9
"""Fraction of the running mean of these ratios that a step keeps."""
FACTORS = (0.5, 4.0)
"""Least and most of what that mean is multiplied by once momenta are compressed."""
NEAR = 0.1
"""Largest relative change of that factor in a step."""
