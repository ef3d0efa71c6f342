"""ArviZ groups of a fit: arrays with named dimensions; large networks are summarized by layer."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from hierfl.core.arguments import expect, expect_count
from hierfl.core.process import one_at_a_time
from hierfl.data.clients import ClientData
from hierfl.posterior.arviz_io import arviz_of
from hierfl.posterior.corrected import Corrected, corrected
from hierfl.posterior.draws import Draws, posterior_draws, prior_draws
from hierfl.posterior.labels import log_likelihoods, observed, sampled
from hierfl.posterior.layer_summaries import (
    STATISTICS,
    Network,
    by_layer,
    drawn_by_layer,
    of_all_clients,
    split,
)
from hierfl.posterior.snapshot import Snapshot, by_state_alone, global_sites, restricted
from hierfl.posterior.weights import WEIGHTED
from hierfl.program.sites import dims_of

if TYPE_CHECKING:
    from arviz import InferenceData

    from hierfl.formulas.formula import Frames

EXPAND = 1000  # the largest network, in scalars of one client or of the global level, to write out
ROW, CLIENT = "row", "client"


@dataclass(frozen=True, eq=False)
class Groups:
    """Parts of an ArviZ object; `dims`: "group/variable" -> names of dimensions after chain and draw."""

    fit: Snapshot
    arrays: dict[str, dict[str, Any]] = field(default_factory=dict)
    dims: dict[str, list[str]] = field(default_factory=dict)
    coords: dict[str, Any] = field(default_factory=dict)

    def sites(self, group: str, draws: Draws) -> None:
        """Add draws of sites, with the names and labels of their dimensions."""
        self.coords[CLIENT] = list(self.fit.clients)
        for name, value in draws.sites.items():
            lead = [CLIENT] if name in draws.own else []
            labels = labels_of(self.fit, name, value.shape[1 + len(lead) :])
            self.coords.update(labels)
            self.put(group, name, value, [*lead, *labels])

    def layers(self, group: str, draws: Draws, networks: Mapping[str, Network]) -> None:
        """Add layer summaries, (S, L, 4) or by client (S, N, L, 4), one variable per statistic."""
        for name, net in networks.items():
            value = draws.sites[name]
            self.coords[f"{name}_layer"] = list(net.layers)
            for i, statistic in enumerate(STATISTICS):
                lead = [CLIENT] if net.is_local else []
                self.put(group, f"{name}_{statistic}", value[..., i], [*lead, f"{name}_layer"])

    def rows(self, group: str, values: Mapping[str, Tensor], data: ClientData) -> None:
        """Add values with one entry per row, (..., n, *event), or per client, (..., N, *event)."""
        order, labels = rows_in_order(data)
        owners = [data.names[k] for k in data.row_client[order].tolist()]
        self.coords.update({ROW: labels, "row_client": (ROW, owners), CLIENT: list(data.names)})
        for site, value in values.items():
            lead = 0 if group == "observed_data" else 1
            rest = value.shape[lead + 1 :]
            first = ROW if self._is_by_row(group, site) else CLIENT
            value = value.index_select(lead, order) if first == ROW else value
            dims = [first, *(f"{site}_dim_{i}" for i in range(len(rest)))]
            self.put(group, site, value, dims)

    def _is_by_row(self, group: str, site: str) -> bool:
        program = self.fit.program
        if site not in program.joint:
            return site in program.terms_of_rows
        return group == "observed_data" or (group != "log_likelihood" and program.joint[site])

    def arviz(self, attributes: Mapping[str, Any]) -> Any:
        """Make the ArviZ object."""
        return arviz_of(self.arrays, self.dims, self.coords, attributes)

    def put(self, group: str, name: str, value: Tensor, dims: list[str]) -> None:
        """Add one variable, with the names of its dimensions in this group."""
        self.arrays.setdefault(group, {})[name] = value.detach().numpy()
        self.dims[f"{group}/{name}"] = dims


def rows_in_order(data: ClientData) -> tuple[Tensor, list[Any]]:
    """Return positions of rows (n,) in the order of the frame they were read from, and its labels."""
    if data.frame_rows is None:
        return torch.arange(data.num_rows), list(range(data.num_rows))
    return data.frame_rows.order, data.frame_rows.labels


def labels_of(fit: Snapshot, name: str, shape: Sequence[int]) -> dict[str, list[Any]]:
    """Return the dimensions of a site and their labels, by `dims_of`, else by the one field with as many features."""
    declared = dims_of(fit.program.model).get(name, ())
    if declared and [len(labels) for _, labels in declared] == list(shape):
        return {dim: list(labels) for dim, labels in declared}
    features, found = fit.federation.data.features, dict[str, list[Any]]()
    for i, size in enumerate(shape):
        fields = [of for of, labels in features.items() if len(labels) == size]
        # a dimension may not appear twice
        named = len(fields) == 1 and fields[0] not in found
        found |= (
            {fields[0]: list(features[fields[0]])} if named else {f"{name}_dim_{i}": [*range(size)]}
        )
    return found


def attributes(fit: Snapshot, seed: int) -> dict[str, Any]:
    """Return what was run, as numbers and strings that netCDF can store."""
    history = fit.progress.history
    return {
        "inference_library": "hierfl",
        "inference_library_version": version("hierfl"),
        "method": fit.method.name,
        "seed": fit.federation.seed,
        "draws_seed": seed,
        "rounds": fit.progress.round,
        "clients": len(fit.clients),
        "rows": fit.federation.data.num_rows,
        "bytes_up": sum(int(r.get("bytes_up", 0)) for r in history),
        "bytes_down": sum(int(r.get("bytes_down", 0)) for r in history),
        **{f"{name}_version": version(name) for name in ("torch", "pyro-ppl", "numpy", "arviz")},
    }


def drawn_groups(
    fit: Snapshot, draws: int, *, seed: int, var_names: Collection[str] | None, expand: int
) -> Groups:
    """Draw from the guide; summarize networks by layer unless they are small or named."""
    # of a fit without rows the global sites can be drawn even where the guide reads rows
    of_all = var_names is not None and set(var_names) <= global_sites(fit.program)
    first = posterior_draws(fit, draws=1, seed=seed, keep=var_names if of_all else None)
    keep, large = split(first, var_names, expand)
    chunks = drawn_by_layer(by_state_alone(fit), keep, large, draws=draws, seed=seed)
    return _grouped(fit, "posterior", of_all_clients([*chunks]), large)


def given_groups(
    fit: Snapshot, group: str, draws: Draws, *, var_names: Collection[str] | None, expand: int
) -> Groups:
    """Do the same with draws that are given."""
    large, small = by_layer(draws, expand, var_names)
    return _grouped(fit, group, small, large)


def _grouped(fit: Snapshot, group: str, draws: Draws, large: Mapping[str, Network]) -> Groups:
    groups = Groups(fit)
    groups.sites(group, draws.only(draws.sites.keys() - large))
    groups.layers(group, draws, large)
    return groups


OF_GUIDE = "draws of a fitted guide, not of a Markov chain: r_hat and ess do not apply"
OF_METHOD = (
    "draws weighted and resampled by the method itself, not of a Markov chain: k_hat judges them"
)
RESAMPLED = "draws of a fitted guide, resampled by Pareto-smoothed weights, some several times"


@one_at_a_time
def posterior(
    fit: Snapshot,
    draws: int = 1000,
    *,
    seed: int = 0,
    var_names: Collection[str] | None = None,
    expand: int = EXPAND,
    correct: Literal["auto", "psis"] | None = "auto",
    log_likelihood: bool = False,
) -> "InferenceData":
    """Draw the latent sites as an ArviZ InferenceData, or a DataTree with ArviZ 1.

    Local sites have a dimension `client` with the clients' names, and features have theirs. A
    network of more than `expand` scalars is summarized by layer, as `<network>_mean`, `_sd`,
    `_rms` and `_largest` with a dimension `<network>_layer`. Attributes record what was run.
    Draws are independent; 100 or more, if 4 divides their number, are in four chains, for
    ArviZ's R-hat.

    Args:
        fit: whose sites are drawn.
        draws: S.
        seed: of the draws.
        var_names: return only these sites, written out however large they are.
        expand: the largest network, in scalars, that is still written out.
        correct: "psis": weight the guide's draws and resample them, in one to three more rounds
            in which each client returns one number per draw (`hierfl.diagnostics.corrected`).
            None: the guide's own draws. "auto": "psis" if `hierfl.fit(model, data)` chose the
            method and found its weights trustworthy.
        log_likelihood: add `log_likelihood`, by row, and `observed_data`: az.loo needs both.

    Raises:
        KeyError: a site in `var_names` does not exist.
        ValueError: `draws` is below 1; the guide has no density to correct; or the rows have no
            labels for `log_likelihood`.
    """
    expect_count(draws, "draws")
    expect(correct=(correct, ("auto", "psis", None)))
    if correct == "auto":
        correct = "psis" if fit.progress.corrected else None
    if correct is None:
        groups = drawn_groups(fit, draws, seed=seed, var_names=var_names, expand=expand)
        latents = posterior_draws(fit, draws=draws, seed=seed) if log_likelihood else None
        about_draws = _about_uncorrected(fit)
    else:
        weighted = corrected(fit, draws, seed=seed)
        latents = weighted.draws
        groups = given_groups(fit, "posterior", latents, var_names=var_names, expand=expand)
        about_draws = {"approximation": RESAMPLED, **_about(weighted, len(fit.clients))}
    if log_likelihood and latents is not None:
        data = fit.federation.data
        groups.rows("log_likelihood", log_likelihoods(fit, latents), data)
        groups.rows("observed_data", observed(fit, data), data)
    return groups.arviz({**attributes(fit, seed), **about_draws})


def _about_uncorrected(fit: Snapshot) -> dict[str, Any]:
    """Return what draws are that no further round has weighted."""
    k_hats = [record["k_hat"] for record in fit.progress.history if "k_hat" in record]
    if k_hats and fit.method.name in WEIGHTED:
        return {"approximation": OF_METHOD, "k_hat": float(k_hats[-1])}
    return {"approximation": OF_GUIDE}


def _about(weighted: Corrected, clients: int) -> dict[str, Any]:
    # a client sends one log weight a proposal, and in the first round also that of a single draw
    scalars = (weighted.proposals + weighted.proposals // weighted.rounds) * clients
    return {
        "k_hat": weighted.k_hat,
        "k_hat_guide": weighted.k_hat_guide,
        "k_hat_clients": weighted.k_hat_clients.to_numpy(),
        "effective_draws": weighted.effective,
        "proposals": weighted.proposals,
        "bytes_up_psis": scalars * torch.get_default_dtype().itemsize,
        "log_evidence": weighted.log_evidence,
    }


@one_at_a_time
def posterior_predictive(
    fit: Snapshot, draws: int = 500, *, rows: "ClientData | Frames | None" = None, seed: int = 0
) -> "InferenceData":
    """Draw labels from the posterior predictive distribution.

    The ArviZ groups are `posterior_predictive` and, for labeled rows, `observed_data`.

    Args:
        fit: whose labels are drawn.
        draws: S; each row gets one label for each draw of the latent sites.
        rows: rows of fitted clients, matched by name. None: the fitted rows.
        seed: of the draws.

    Raises:
        KeyError: a client was not fitted.
        ValueError: a field is missing or holds NaN; `draws` is below 1.
    """
    expect_count(draws, "draws")
    asked = fit.federation.data if rows is None else fit._rows(rows)
    _check_drawable(fit)
    of_rows = restricted(fit, asked)
    groups = Groups(of_rows)
    latents = posterior_draws(of_rows, draws=draws, seed=seed)
    groups.rows("posterior_predictive", sampled(of_rows, latents, asked, seed), asked)
    labels = observed(of_rows, asked)
    if labels:
        groups.rows("observed_data", labels, asked)
    return groups.arviz(attributes(fit, seed))


@one_at_a_time
def prior(
    fit: Snapshot,
    draws: int = 500,
    *,
    seed: int = 0,
    var_names: Collection[str] | None = None,
    expand: int = EXPAND,
    predictive: bool = False,
) -> "InferenceData":
    """Draw the latent sites from the prior, learned params at their fitted values.

    Args:
        fit: whose sites are drawn.
        draws: S.
        seed: of the draws.
        var_names: return only these sites, written out however large they are.
        expand: as in `posterior`.
        predictive: also draw a label for each row: groups `prior_predictive` and
            `observed_data`.

    Raises:
        KeyError: a site in `var_names` does not exist.
        ValueError: `draws` is below 1.
    """
    expect_count(draws, "draws")
    drawn = prior_draws(fit, draws=draws, seed=seed)
    groups = given_groups(fit, "prior", drawn, var_names=var_names, expand=expand)
    if predictive:
        _check_drawable(fit)
        data = fit.federation.data
        groups.rows("prior_predictive", sampled(fit, drawn, data, seed), data)
        groups.rows("observed_data", observed(fit, data), data)
    return groups.arviz(attributes(fit, seed))


def _check_drawable(fit: Snapshot) -> None:
    """Refuse to draw labels where the likelihood has factors alone; the error names the factor."""
    if not fit.program.labels:
        fit.program.observed_site(None)
