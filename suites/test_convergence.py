"""Does an algorithm converge as its paper says? Exponents and constants on quadratics, where formulas are exact; asked
for by `make convergence`, for it is of specifications, which `test_equivalence` holds engines to."""

import pytest

from meshmark.algorithms.convergence import CLAIMS, UNBIASED, Claim, left_of_bias, measure
from meshmark.spec.algorithm import AlgorithmKind


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name.replace(" ", "-"))
def test_convergence(claim: Claim) -> None:
    """The exponent, and the constant beside it, within their intervals over seeds."""
    result = measure(claim)
    assert result.holds, str(result)


@pytest.mark.parametrize("kind", UNBIASED)
def test_no_bias(kind: AlgorithmKind) -> None:
    """Where DSGD stays a twentieth of the heterogeneity away for ever."""
    assert left_of_bias(AlgorithmKind.DSGD) > 0.05 > 1e-7 > left_of_bias(kind)
