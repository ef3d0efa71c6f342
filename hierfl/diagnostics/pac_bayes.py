"""A PAC-Bayes bound on the risk of a posterior: what it holds for, and its terms.

Let pi be a distribution of all latent sites that was fixed before the rows were seen, n the number
of rows, independent of each other, and let the loss of a row lie in an interval of width c. For an
eta > 0 that was fixed as well, with probability at least 1 - delta over the rows, for every
posterior q,

    risk(q) <= empirical risk(q) + (KL(q || pi) + log(1 / delta)) / eta + eta c^2 / (8 n).

The risk is E_q[loss] on new rows of the same clients, in the same shares; it is not that of new
clients. The last term is Hoeffding's bound of the slack in Eq. (9) of Vedadi et al. 2023, which is
Theorem 3 of Germain et al. 2016. That slack is infinite for many unbounded losses, so the log loss
is clipped. The KL of a hierarchy is that of the global sites, plus that of each client's own given
the global ones. Clients' rows may have different distributions.

A prior that was trained on the same rows is not fixed before them. Learn it from some of the rows
and take the bound on the others:

    first, second = data.split(0.5, seed=0)
    before = hierfl.fit(method, first)
    diagnostics.pac_bayes(before.personalize(second), prior=before).bound()

Sources: Catoni 2007, arXiv:0712.0248; Germain et al. 2016; Alquier et al. 2016, arXiv:1506.04091,
section 4; priors from part of the data: Dziugaite et al. 2021, arXiv:2006.10929.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from hierfl.core.arguments import expect, expect_count
from hierfl.core.process import one_at_a_time
from hierfl.core.tables import Shown, printed
from hierfl.core.trees import tree_leaves
from hierfl.data.batch import ClientBatch
from hierfl.data.clients import ClientData
from hierfl.posterior.client_loop import each_draw
from hierfl.posterior.draws import posterior_draws
from hierfl.posterior.moments import kind_of
from hierfl.posterior.snapshot import (
    Snapshot,
    expect_fit,
    first_client,
    learned_params,
    model_trace,
)
from hierfl.posterior.weights import already_weighted, check_labeled
from hierfl.program.program import Params
from hierfl.program.traces import is_likelihood, samples

MARGIN = 3.0  # Monte Carlo standard errors that are added to the bound


@printed
@dataclass(frozen=True)
class PacBayes:
    """The terms of the bound.

    Args:
        empirical_risk: mean loss of a row, averaged over draws of the posterior; a share of wrong
            answers, or nats.
        kl: KL divergence of the posterior from the prior, all sites together, nats.
        rows: number of rows in the mean.
        width: of the interval in which the loss of a row lies.
        se_risk: Monte Carlo standard error of `empirical_risk`.
        se_kl: Monte Carlo standard error of `kl`, nats; 0 where the KL is in closed form.
    """

    empirical_risk: float
    kl: float
    rows: int
    width: float = 1.0
    se_risk: float = 0.0
    se_kl: float = 0.0

    def __tables__(self) -> Shown:
        terms = {
            "empirical risk": (self.empirical_risk, self.se_risk),
            "KL from the prior, nats": (self.kl, self.se_kl),
            "rows": (self.rows, math.nan),
            "width of the loss": (self.width, math.nan),
        }
        frame = pd.DataFrame.from_dict(terms, orient="index", columns=["value", "se"])
        bound = self.bound()
        return Shown(
            "PAC-Bayes bound",
            frame,
            f"With probability 0.95 the risk on new rows of the same clients is below {bound:.3g}"
            + (
                "." if bound < self.width else ", which says nothing: the loss itself is no larger."
            ),
        )

    def bound(self, *, eta: float | None = None, delta: float = 0.05) -> float:
        """Return a number that the risk is below with probability 1 - delta over the rows.

        Three Monte Carlo standard errors of the posterior's draws are added.

        Args:
            eta: > 0, fixed before the rows were seen; None: the best of about log2(rows) values
                that depend on the number of rows alone, each taken at delta divided by their
                number.
            delta: in (0, 1].

        Raises:
            ValueError: `eta` or `delta` is out of range.
        """
        expect(delta=(delta, "(0, 1]"), eta=(eta, "(0, inf) or None"))
        if eta is not None:
            return self._at(eta, delta)
        count = max(1, math.ceil(math.log2(self.rows))) + 1
        # the best eta for log terms of 1, 2, 4, ... nats
        etas = [math.sqrt(8.0 * self.rows * 2.0**j) / self.width for j in range(count)]
        return min(self._at(one, delta / count) for one in etas)

    def _at(self, eta: float, delta: float) -> float:
        risk = self.empirical_risk + MARGIN * self.se_risk
        kl = self.kl + MARGIN * self.se_kl
        slack = eta * self.width**2 / (8.0 * self.rows)
        return risk + (kl - math.log(delta)) / eta + slack


@one_at_a_time
def pac_bayes(
    fit: Snapshot,
    *,
    prior: Snapshot | None = None,
    site: str | None = None,
    clip: tuple[float, float] | None = None,
    draws: int = 100,
    seed: int = 0,
) -> PacBayes:
    """Estimate the terms of the bound; each client returns two scalars per draw.

    Args:
        fit: of labeled clients.
        prior: the fit of other rows that `fit` was personalized from: what it learned is then
            fixed. None: the prior is that of the model, which may learn no params.
        site: the observed site; None: the model's only one.
        clip: the log loss of a row in nats, held between these two numbers; None: the 0-1 loss of
            the likelier class, for binary and categorical labels.
        draws: S, of the posterior, 2 or more.
        seed: of the draws.

    Raises:
        ValueError: the prior was learned from the same rows, or has no density that q can be
            compared with; the guide places sites at points, where the KL is infinite; the labels
            are missing, or are numeric and `clip` is None; `clip` or `draws` is out of range.
        KeyError: the model observes no such site.
    """
    expect_fit(fit)
    expect_count(draws, "draws", least=2)
    if clip is not None and not -math.inf < clip[0] < clip[1] < math.inf:
        raise ValueError(f"clip is {clip}: it must be two finite numbers, the lower one first")
    program, data = fit.program, fit.federation.data
    name = program.observed_site(site)
    check_labeled(fit)
    check_prior(fit, prior)
    _check_loss(fit, name, clip)

    def one(params: Params, own: ClientBatch, batch: ClientBatch) -> dict[str, Tensor]:
        terms = program.terms(params, own)
        values = program.draw(params, own)  # the same draw: it is a function of the batch's keys
        fn, label = program.observed(values, own, params)[name]
        each = _loss(fn, label, clip) * own.mask()
        return {"loss": each.sum(), "own": terms.local_kl.sum(), "shared": terms.global_kl}

    risk, own = torch.zeros(draws), torch.zeros(draws)
    shared = torch.zeros(draws)
    for chunk in each_draw(fit, one, draws=draws, seed=seed, salt="pac_bayes"):
        risk = risk + chunk.found["loss"].sum(0) / data.num_rows
        own = own + chunk.found["own"].sum(0)
        shared = chunk.found["shared"][0]  # the same for every client
    kl = own if prior is not None else own + shared
    width = 1.0 if clip is None else clip[1] - clip[0]
    (mean, se), (nats, se_nats) = _mean(risk), _mean(kl)
    return PacBayes(mean, max(nats, 0.0), data.num_rows, width, se, se_nats)


def _mean(values: Tensor) -> tuple[float, float]:
    return float(values.mean()), float(values.std() / math.sqrt(len(values)))


def _loss(fn: Any, label: Tensor, clip: tuple[float, float] | None) -> Tensor:
    if clip is not None:
        log_prob: Tensor = fn.log_prob(label)
        return (-log_prob).clamp(*clip)
    base = getattr(fn, "base_dist", fn)
    if kind_of(fn) == "binary":
        return ((base.probs > 0.5) != (label > 0.5)).to(base.probs.dtype)
    return (base.probs.argmax(-1) != label).to(base.probs.dtype)


def _check_loss(fit: Snapshot, site: str, clip: tuple[float, float] | None) -> None:
    program, batch = fit.program, fit.program.prototype
    params = fit.params_at_first
    with torch.no_grad():
        fn, _ = program.observed(program.draw(params, batch), batch, params)[site]
    if clip is None and kind_of(fn) not in ("binary", "categorical"):
        raise ValueError(
            f"the labels of site '{site}' are not classes, and their log loss has no bound: "
            f"give the range to clip it to, pac_bayes(fit, clip=(low, high)) in nats"
        )


SPLIT = "pac_bayes(before.personalize(other_rows), prior=before)"


def check_prior(fit: Snapshot, prior: Snapshot | None) -> None:
    """Refuse a `prior` fit that learned from the bound's rows, and posteriors without a finite KL."""
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
    latent = {site.name for site in fit.program.latents.sites} | set(fit.program.derived)
    for name, site in samples(model_trace(fit)):
        if name not in latent and not is_likelihood(site):
            raise ValueError(
                f"site '{name}' is a factor or an observation of the prior, which then has no "
                "normalized density to take a KL from: write it as a latent site (pyro.sample)"
            )


def _check_spread(fit: Snapshot, *, shared: bool) -> None:
    if not fit.program.latents.sites:
        return
    drawn = posterior_draws(first_client(fit), draws=8)
    for site in fit.program.latents.sites:
        if (site.is_local or shared) and drawn.is_fixed(site):
            raise ValueError(
                f"the guide of '{fit.method.name}' places site '{site.name}' at a point, whose KL "
                "from any prior with a density is infinite: fit with a guide that has spread "
                "(guides.conditional, structured, mean_field)"
            )
    if shared and already_weighted(fit):
        raise ValueError(
            f"{fit.method.name} has resampled its draws, and the points have no density to take a "
            "KL from: fit with fedlaplace(..., weighting_rounds=0)"
        )
