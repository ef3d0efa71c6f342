"""DP-PVI: differentially_private(pvi(...)) against PVI, its own invariant, and the accountant."""

from typing import Any

import torch

from hierfl.methods import differentially_private, pvi
from tests.methods.test_pvi import close, e1, line
from tests.programs import federation, fit, logistic

FAINT: dict[str, Any] = {"clipping_norm": 1e6, "noise_multiplier": 1e-30, "secret": 1}


def test_clients_keep_what_they_sent() -> None:
    """Without noise q is the prior times the factors that clients keep, also where they are clipped."""
    how = {**FAINT, "clipping_norm": 0.2}
    fitted = fit(differentially_private(pvi(line, draws=2), **how), e1(), rounds=3)
    state, kept = fitted.progress.server["method"], fitted.progress.table["factor"]
    for name in ("shift", "precision"):
        close(state["q"][name] - state["prior"][name] - kept[name].sum(0), 0.0, 1e-9)
    norms = sum(kept[n].flatten(1).square().sum(1) for n in ("shift", "precision")).sqrt()
    assert float(norms.max()) <= 3 * 0.2 + 1e-6  # three messages of norm 0.2 at most
    assert float(norms.max()) > 0.5


def test_noise_leaves_a_distribution_that_knows_no_less_than_the_prior() -> None:
    how: dict[str, Any] = {"clipping_norm": 0.5, "noise_multiplier": 3.0, "secret": 4}
    for factors in ("full", "diagonal"):
        method = pvi(logistic, factors=factors, draws=2, steps=1)
        fitted = fit(differentially_private(method, **how), federation(), rounds=2)
        state = fitted.progress.server["method"]
        bent = torch.linalg.eigvalsh(state["q"]["precision"] - state["prior"]["precision"])
        assert float(bent.min()) > -1e-8
