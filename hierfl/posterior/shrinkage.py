"""Shrinkage: how far clients' estimates are pulled toward the population."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from torch import Tensor

from hierfl.core import noise
from hierfl.core.trees import Tree, tree_map
from hierfl.data.batch import ClientBatch
from hierfl.posterior.client_loop import at_each_draw, each_draw
from hierfl.posterior.draws import Draws, at_draws, joined_local, mapped_or_in_turn
from hierfl.posterior.moments import mean_and_variance
from hierfl.posterior.snapshot import Snapshot
from hierfl.program.handlers import Substitute
from hierfl.program.program import Params, Program
from hierfl.program.sites import Values
from hierfl.program.without_rows import WithoutRows, is_unknown, shape_alone

# draws of the global sites where the ratio at each is in closed form, and clients x draws at most
CLOSED, MOST_CLOSED = 4000, 1 << 22
# else draws of the global sites, and of the local sites at each: a relative error of sqrt(2 / 750)
POINTS, AT_POINT = 50, 16


class Shrinkage(NamedTuple):
    """Shrinkage of a local site, (N, *shape), and its Monte Carlo standard error."""

    value: Tensor
    error: Tensor


def shrinkage(
    fit: Snapshot, sites: list[str], *, points: int = POINTS, draws: int = AT_POINT, seed: int = 0
) -> dict[str, Shrinkage]:
    """Estimate the shrinkage Var(w_k | z, y_k) / Var(w_k | z) of local sites, averaged over z.

    z are the global sites. Where w_k ~ Normal(mu, tau^2) and the client's own estimate has standard
    error s, this is B = s^2 / (s^2 + tau^2), and the client's posterior mean is B mu + (1 - B)
    times its own estimate: 0 where its rows decide alone, 1 where they say nothing. A guide with
    the client's factor has the ratio in closed form (`FromFactor.shrinkage`), exact where the
    likelihood is Gaussian. Of another one it is estimated by `points` draws of z with `draws` of
    w_k at each; one whose local sites are too narrow, or too wide, gives too low, or high, a value.

    Of a formula's intercept beside correlated slopes it is that of the intercept at the means of the
    columns, as is its prior, wherever it is reported.

    Sources: B of Morris 1983, JASA 78, Eq. 1.9; the pooling factor of each group in Gelman and
    Pardoe 2006, Technometrics 48, section 1.

    Returns:
        Site -> (N, *shape); NaN where the prior has no variance in closed form, where it depends on
        another local site, and at point estimates. Without rows, sites whose prior depends on them are left out.
    """
    program = fit.program
    sampled = [site for site in sites if site not in program.derived]
    if not sampled:
        return {}
    weights = {site: of for site, of in _origins(program).items() if site in sampled}
    of_client: Callable[..., Tree] = partial(_sampled, program, sampled, weights, draws)
    how: dict[str, Any] = {"width": draws * width_of(program), "seed": seed, "salt": "shrinkage"}
    guide = _guide_of(program)
    if getattr(guide, "has_shrinkage", False):  # in closed form
        of_client = partial(_in_closed_form, program, sampled, _turn(program, weights))
        how |= {"width": width_of(program), "reads": "none"}
        points = max(points, min(CLOSED, MOST_CLOSED // len(fit.clients)) // guide.mixing_nodes)
    chunks = mapped_or_in_turn(fit, lambda s: each_draw(s, of_client, draws=points, **how))
    # (N, S, ...), with the same plates as a draw
    ratios = joined_local(program, [chunk.found for chunk in chunks])
    return {
        site: Shrinkage(value.mean(0), value.std(0, correction=0) / len(value) ** 0.5)
        for site, value in ratios.items()
    }


def width_of(program: Program) -> int:
    """Return the width of a draw for `each_draw`, in rows; 2 or more."""
    return 2 + (program.latents.global_block.size + program.latents.local_block.size) // 16


def _origins(program: Program) -> dict[str, Tensor]:
    """Return the weights (D,) of a vector's entries in the one that its first entry stands for."""
    model: Any = inspect.unwrap(program.model)
    if not hasattr(model, "layouts"):
        return {}
    from hierfl.formulas.writer import origins  # formulae takes half a second

    sizes = {site.name: site.size for site in program.latents.local_block.sites}
    at = {site: torch.tensor(of) for site, of in origins(model).items()}
    return {site: of for site, of in at.items() if sizes.get(site) == len(of)}


def _turn(program: Program, weights: Mapping[str, Tensor]) -> Tensor:
    """Return the matrix (D, D) by which local vectors have the entries that are judged."""
    block = program.latents.local_block
    turn, at = torch.eye(block.size), 0
    for site in block.sites:
        if site.name in weights or site.has_root:
            # of values, which scalars are in units of
            entries = torch.eye(site.size).view(site.size, *site.start.shape)
            values = site.transform(entries) - site.transform(torch.zeros_like(entries))
            of_values = values.reshape(site.size, site.size)
            turn[at : at + site.size, at : at + site.size] = of_values.T
            if site.name in weights:
                turn[at, at : at + site.size] = of_values @ weights[site.name]
        at += site.size
    return turn


def _turned(value: Tensor, weights: Tensor) -> Tensor:
    return torch.cat([(value @ weights.to(value))[..., None], value[..., 1:]], -1)


def _in_closed_form(
    program: Program,
    known: list[str],
    turn: Tensor,
    params: Params,
    own: ClientBatch,
    batch: ClientBatch,
) -> Tree:
    own = shape_alone(own) if isinstance(program.guide, WithoutRows) else own
    with Substitute(params, own):
        ratios = _guide_of(program).shrinkage(own, turn)
    return {site: of for site, of in ratios.items() if site in known and not is_unknown(of)}


def _guide_of(program: Program) -> Any:
    guide = program.guide
    return guide.run if isinstance(guide, WithoutRows) else guide


def _sampled(
    program: Program,
    known: list[str],
    weights: Mapping[str, Tensor],
    draws: int,
    params: Params,
    own: ClientBatch,
    batch: ClientBatch,
) -> Tree:
    def at(m: Tensor) -> Tree:
        # the root key stays, and so do the draws of the global sites
        keys = noise.fold(own.own_keys, noise.word("own"), m)
        values = program.draw(params, replace(own, own_keys=keys))
        prior = prior_moments(program, params, values, own)
        fns = program.priors(params, values, batch=own) if weights else {}
        found = {s: {"value": values[s], **of} for s, of in prior.items() if s in known}
        for site, of in weights.items():
            moved = {name: _turned(found[site][name], of) for name in ("value", "mean")}
            covariance = fns[site].covariance_matrix @ of.to(moved["value"])
            first = (covariance @ of.to(covariance))[..., None]
            variance = torch.cat([first, found[site]["variance"][..., 1:]], -1)
            found[site] = {**moved, "variance": variance}
        return found

    found = at_each_draw(at, draws, program)
    computed = {n: of for n, of in found.items() if not any(map(is_unknown, of.values()))}
    return {site: _ratio(moments) for site, moments in computed.items()}


def prior_moments(
    program: Program, params: Params, values: Values, batch: ClientBatch
) -> dict[str, dict[str, Tensor]]:
    """Return mean and variance of each local site's prior at given sites, NaN where it has no closed form."""
    found = {}
    for site, fn in program.priors(params, values, batch=batch).items():
        try:
            mean, variance = mean_and_variance(site, fn)
        except ValueError:
            mean = variance = torch.full_like(values[site], torch.nan)
        moments = {"mean": mean, "variance": variance}
        shape = values[site].shape
        found[site] = tree_map(lambda v, shape=shape: v.expand(shape), moments)
    return found


def in_prior_units(fit: Snapshot, draws: Draws) -> dict[str, Tensor]:
    """Return local sites less their prior's mean, in its sds and uncorrelated, (S, N, *shape); NaN without these."""
    program = fit.program

    def one(params: Params, values: Values, batch: ClientBatch) -> Tree:
        prior = prior_moments(program, params, values, batch)
        away = {site: values[site] - of["mean"] for site, of in prior.items()}
        scaled = {site: value / prior[site]["variance"].sqrt() for site, value in away.items()}
        for site, fn in program.priors(params, values, batch=batch).items():
            if isinstance(fn, dist.MultivariateNormal):
                column = away[site][..., None]
                scaled[site] = torch.linalg.solve_triangular(fn.scale_tril, column, upper=False)[
                    ..., 0
                ]
        return scaled

    chunks = at_draws(fit, draws, one)
    return joined_local(program, [chunk.found for chunk in chunks])


def _ratio(moments: Values) -> Tensor:
    """Return the variance of draws over that of their prior; NaN without one prior."""
    spread = moments["value"].var(0)
    prior = moments["variance"][0]
    same = ((moments["variance"] == prior) & (moments["mean"] == moments["mean"][0])).all(0)
    return torch.where(same & (spread > 0.0) & prior.isfinite(), spread / prior, torch.nan)
