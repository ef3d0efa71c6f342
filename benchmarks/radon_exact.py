"""The exact posterior of radon's scales, by quadrature: `python -m benchmarks.radon_exact`.

Given tau and sigma the model is linear and Gaussian, so that all else integrates out in closed
form. Prints the moments beside those of the published reference: Stan's centered chains hardly
enter the neck of the funnel, where tau is near 0, and leave tau's sd 3% too small.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

import hierfl
from benchmarks.reference_models import RADON
from hierfl.datasets import ReferenceSummary

Grid = NDArray[np.float64]
TAU, SIGMA = np.linspace(1e-4, 0.5, 500), np.linspace(0.66, 0.9, 120)


@cache
def scales() -> dict[str, ReferenceSummary]:
    """Return mean and sd of tau and sigma under half-normal priors."""
    data = hierfl.datasets.radon()
    y = data.fields["y"].double().numpy()
    x = np.column_stack([np.ones(len(y)), data.fields["x"].double().numpy()])
    starts, rows = data.offsets[:-1].numpy(), data.counts.numpy()
    own, total = np.add.reduceat(x, starts, 0), np.add.reduceat(y, starts)  # sums of each county

    def log_p(tau: float, sigma: float) -> float:
        share = tau**2 / (
            sigma**2 + rows * tau**2
        )  # (y - X w)' V^-1 (y - X w) by Woodbury, county by county
        precision = (x.T @ x - (own * share[:, None]).T @ own) / sigma**2 + np.eye(x.shape[1])
        pull = (x.T @ y - (own * share[:, None]).T @ total) / sigma**2
        square = (y @ y - (share * total**2).sum()) / sigma**2 - pull @ np.linalg.solve(
            precision, pull
        )
        log_det = 2.0 * len(y) * np.log(sigma) + np.log1p(rows * (tau / sigma) ** 2).sum()
        return float(
            -0.5 * (log_det + np.linalg.slogdet(precision)[1] + square + tau**2 + sigma**2)
        )

    logs = np.array([[log_p(tau, sigma) for sigma in SIGMA] for tau in TAU])
    p = np.exp(logs - logs.max())
    p /= p.sum()
    return {"tau": _moments(TAU, p.sum(1)), "sigma": _moments(SIGMA, p.sum(0))}


def _moments(x: Grid, p: Grid) -> ReferenceSummary:
    mean = (p * x).sum()
    return ReferenceSummary(
        np.array(mean), np.array(np.sqrt((p * (x - mean) ** 2).sum())), np.array(0.0)
    )


def main() -> None:
    """Print the exact moments beside the published ones."""
    published = RADON.shipped()
    assert published is not None
    for name, exact in scales().items():
        known = published[name]
        print(
            f"{name}: mean {float(exact.mean):.4f}, sd {float(exact.sd):.4f}; published "
            f"{float(known.mean):.4f}, "
            f"{float(known.sd):.4f}: sd {float(known.sd / exact.sd):.3f} of the exact one"
        )


if __name__ == "__main__":
    main()
