import numpy as np
import pytest
from scipy import integrate
from scipy.special import expit
from scipy.stats import binom, halfnorm, norm

from benchmarks import growth


@pytest.mark.slow
def test_the_exact_posterior_is_that_of_a_direct_integral() -> None:
    yes = np.array([0, 5, 3])

    def density(mu: float, tau: float) -> float:
        a = np.linspace(mu - 8.0 * tau, mu + 8.0 * tau, 2001)
        prior = norm.pdf(a, mu, tau)
        each = [integrate.trapezoid(prior * binom.pmf(k, 5, expit(a)), a) for k in yes]
        return float(norm.pdf(mu, 0.0, 1.5) * halfnorm.pdf(tau) * np.prod(each))

    mu, tau = np.linspace(-6.0, 6.0, 61), np.linspace(0.05, 6.0, 60)
    share = np.array([[density(m, t) for t in tau] for m in mu])
    share /= share.sum()
    found = growth.exact(yes, (0.0, 1.0, 3.0, 0.49))
    assert abs(found[0, 0] - (share.sum(1) @ mu)) < 0.02
    assert abs(found[1, 0] - (share.sum(0) @ tau)) < 0.03


def test_ten_clients_are_right() -> None:
    found = growth.measured(10)
    assert abs(found["mu off"]) < 0.1 and abs(found["tau off"]) < 0.15 and 0.9 < found["sds"] < 1.1
