"""Does an algorithm converge as its paper says? Exponents and constants on quadratics, where formulas are exact, and on
logistic regression of real images, whose optimum and points of rest are known; asked for by `make convergence`, for it
is of specifications, which `test_equivalence` holds engines to."""

import pytest

from meshmark.spec.algorithm import Algorithm
from studies.convergence.claim import Claim, measure
from studies.convergence.claims import BIASED, CLAIMS, UNBIASED, left_of_bias
from studies.convergence.claims_logistic import CORRECTED, left_of_logistic
from studies.convergence.targets import TASKS, race


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name.replace(" ", "-"))
def test_convergence(claim: Claim) -> None:
    """The exponent, and the constant beside it, within their intervals over seeds."""
    result = measure(claim)
    assert result.holds, str(result)


@pytest.mark.parametrize("spec", UNBIASED, ids=lambda spec: spec.id)
def test_no_bias(spec: Algorithm) -> None:
    assert left_of_bias(spec) < 1e-7


@pytest.mark.parametrize("spec", BIASED, ids=lambda spec: spec.id)
def test_bias(spec: Algorithm) -> None:
    """A twentieth of the heterogeneity stays for ever."""
    assert left_of_bias(spec) > 0.05


@pytest.mark.parametrize("spec", CORRECTED, ids=lambda spec: spec.id)
def test_the_optimum_of_logistic_regression_is_found(spec: Algorithm) -> None:
    assert left_of_logistic(spec) < 1e-6


@pytest.mark.parametrize(("task", "count"), [(0, 4), (0, 8), (1, 4), (2, 4)])
def test_the_target_takes_as_many_steps_as_synchronous_training(task: int, count: int) -> None:
    """By a one-sided test over seeds each way: too slow fails, and so does suspiciously fast."""
    make, specs = TASKS[task]
    failed = [
        f"{r.task}, {r.spec.id} over {count}: {r.verdict}, {r.ratio:.2f}"
        for r in race(make(count), specs)
        if r.verdict != "as promised"
    ]
    assert not failed
