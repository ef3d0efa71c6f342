"""Whether a PAC-Bayes bound holds: a prior fixed before the rows, and a finite KL."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from pyro import poutine

from hierfl.core.trees import tree_leaves
from hierfl.data.clients import ClientData
from hierfl.engine.client_store import taken
from hierfl.posterior.draws import posterior_draws
from hierfl.posterior.learned import learned_params
from hierfl.posterior.snapshot import Restricted, Snapshot, expect_fit
from hierfl.posterior.weights import already_weighted
from hierfl.program.handlers import Answer, unchecked, untouched_store
from hierfl.program.traces import is_likelihood, samples

SPLIT = "pac_bayes(before.personalize(other_rows), prior=before)"


def check_prior(fit: Snapshot, prior: Snapshot | None) -> None:
    """Refuse priors learned from the rows of the bound, and posteriors without a finite KL.

    `prior` is the fit that everything above the clients was learned in; None: it is the model's.
    """
    learned = [spec.name for spec in learned_params(fit) if prior is None or spec.is_local]
    if learned and prior is None:
        raise ValueError(
            f"the model learns '{learned[0]}' from the same rows, so that its prior is not fixed "
            "before them and no bound holds: learn it from some rows and take the bound on "
            f"others, {SPLIT}"
        )
    if learned:
        raise ValueError(
            f"the model learns '{learned[0]}' of each client from the rows of the bound, a point "
            "whose KL is infinite: make it a latent site (pyro.sample)"
        )
    if prior is not None:
        expect_fit(prior, "prior")
        _check_split(fit, prior)
    _check_factors(fit)
    _check_spread(fit, shared=prior is None)


def _check_split(fit: Snapshot, prior: Snapshot) -> None:
    """Refuse a fit that is no personalization of the prior's, or has the same rows."""
    ours, theirs = (tree_leaves(one.message) for one in (fit, prior))
    same = len(ours) == len(theirs) and all(
        a.shape == b.shape and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)
    )
    if not same:
        raise ValueError(
            "the fit has learned since the prior was fixed: only clients' own sites may be "
            f"inferred from the rows of the bound, {SPLIT}"
        )
    if _within(fit.federation.data, prior.federation.data):
        raise ValueError(
            "all rows of the bound are among those that the prior was learned from: keep some "
            f"apart, data.split(0.5, seed=0), and {SPLIT}"
        )


def _within(few: ClientData, many: ClientData) -> bool:
    """Return whether rows are among others, beyond what equal values explain."""
    a, b = _rows(few, many.names), _rows(many, many.names)
    if a.shape[1:] != b.shape[1:] or not set(few.names) <= set(many.names):
        return False
    kinds, counts = np.unique(b, axis=0, return_counts=True)
    both, together = np.unique(np.concatenate([a, b]), axis=0, return_counts=True)
    if len(both) > len(kinds):
        return False
    return 2 * len(kinds) > len(b) or bool((together == 2 * counts).all())


def _rows(data: ClientData, names: tuple[str, ...]) -> NDArray[np.float64]:
    """Return rows as a matrix (n, 1 + features), the client's index among `names` first."""
    place = {name: k for k, name in enumerate(names)}
    own = torch.tensor([place.get(name, -1) for name in data.names])[data.row_client]
    fields = [data.fields[name].double().reshape(data.num_rows, -1) for name in sorted(data.fields)]
    found: NDArray[np.float64] = torch.cat([own[:, None].double(), *fields], 1).numpy()
    return found


def _check_factors(fit: Snapshot) -> None:
    """Refuse a model with factors or labels above the clients: its prior is unnormalized."""
    program, batch = fit.program, fit.program.prototype
    params = fit.federation.client.params(fit.message, fit.federation.client.own)
    with untouched_store(), torch.no_grad(), unchecked():
        given = poutine.condition(program.model, data=program.draw(params, batch))
        with Answer(params, batch):
            trace = poutine.trace(given).get_trace(batch)
    latent = {site.name for site in program.latents.sites} | set(program.derived)
    for name, site in samples(trace):
        if name not in latent and not is_likelihood(site):
            raise ValueError(
                f"site '{name}' is a factor or an observation of the prior, which then has no "
                "normalized density to take a KL from: write it as a latent site (pyro.sample)"
            )


def _check_spread(fit: Snapshot, *, shared: bool) -> None:
    """Refuse sites that the guide places at points."""
    data, none = fit.federation.data, torch.tensor([0])
    first = Restricted(
        fit.method,
        replace(fit.federation, data=data.select([0])),
        replace(fit.progress, table=taken(fit.progress.table, none)),
        fit.message,
    )
    if not fit.program.latents.sites:
        return
    drawn = posterior_draws(first, draws=8)
    for site in fit.program.latents.sites:
        values = (drawn.own if site.is_local else drawn.shared)[site.name]
        if (site.is_local or shared) and bool((values == values[:1]).all()):
            raise ValueError(
                f"the guide of '{fit.method.name}' places site '{site.name}' at a point, whose KL "
                "from any prior with a density is infinite: fit with a guide that spreads "
                "(guides.conditional, structured, mean_field)"
            )
    if shared and already_weighted(fit):
        raise ValueError(
            f"{fit.method.name} has resampled its draws, and the points have no density to take a "
            "KL from: fit with fedlaplace(..., weighting_rounds=0)"
        )
