"""Whether algorithms converge as their papers say: claims with closed forms, races to a target, published numbers.

`python -m studies.convergence` (`make convergence`) writes reports/convergence.md; `pytest
studies/convergence/test_claims.py -k NAME` checks one claim.
"""
