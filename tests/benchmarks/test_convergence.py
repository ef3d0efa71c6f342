"""The calibration of `convergence`: its posteriors are right, and its table counts what it says."""

import numpy as np
from scipy.stats import halfnorm, norm

from benchmarks.convergence_problems import NAMES, problem


def test_quadrature_agrees_with_the_closed_form_given_the_spread() -> None:
    """With Gaussian rows, given tau all is Gaussian: the means of clients are Normal(mu, tau^2 +
    1 / n).
    """
    found = problem("spread", 3)
    data = found.data
    owner, y = data.row_client.numpy(), data.fields["y"].numpy()
    counts = np.bincount(owner)
    means = np.bincount(owner, y) / counts
    taus = np.exp(np.linspace(np.log(1e-4), np.log(8.0), 4000))
    variance = taus[:, None] ** 2 + 1.0 / counts
    precision = 0.25 + (1.0 / variance).sum(1)
    loc = (means / variance).sum(1) / precision
    # p(means | tau) = p(means, mu) / p(mu | means) at mu = loc
    log_p = norm.logpdf(means, loc[:, None], np.sqrt(variance)).sum(1) + norm.logpdf(loc, 0.0, 2.0)
    log_p += 0.5 * np.log(2.0 * np.pi / precision) + halfnorm.logpdf(taus) + np.log(taus)
    share = np.exp(log_p - log_p.max())
    share /= share.sum()
    mu, sd = found.moments["mu"]
    assert np.allclose(mu, share @ loc, atol=1e-3)
    assert np.allclose(sd**2, share @ (1.0 / precision + loc**2) - (share @ loc) ** 2, rtol=5e-3)
    tau, tau_sd = found.moments["tau"]
    assert np.allclose(tau, share @ taus, atol=2e-3)
    assert np.allclose(tau_sd, np.sqrt(share @ taus**2 - (share @ taus) ** 2), rtol=5e-3)


def test_every_problem_is_drawn_from_its_seed() -> None:
    for name in NAMES:
        first, again, other = (problem(name, seed).moments for seed in (1, 1, 2))
        assert all(np.array_equal(first[site][0], again[site][0]) for site in first)
        assert any(
            first[site][0].shape != v[0].shape or (first[site][0] != v[0]).any()
            for site, v in other.items()
        )
