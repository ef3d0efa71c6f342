"""Labels of rows at given draws: observed, their log densities, and replicated."""

import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hierfl.core import noise
from hierfl.core.process import one_at_a_time
from hierfl.core.trees import Tree, tree_map
from hierfl.data.batch import ClientBatch, full_batch
from hierfl.data.clients import ClientData
from hierfl.engine.client_store import taken
from hierfl.posterior.client_loop import CLIENT_DRAWS_AT_ONCE, labeled
from hierfl.posterior.draws import Draws, at_draws, in_program_shapes, posterior_draws
from hierfl.posterior.moments import without_unknown
from hierfl.posterior.snapshot import Snapshot, restricted
from hierfl.program.handlers import unchecked
from hierfl.program.program import Params, Program
from hierfl.program.sites import Values
from hierfl.program.supports import LACKING

if TYPE_CHECKING:
    from hierfl.formulas.formula import Frames


def observed(fit: Snapshot, data: ClientData) -> dict[str, Tensor]:
    """Return the known labels by observed site, (n, *event) of rows or (N, *event) of clients."""
    fields = {**data.fields, **data.client_fields}
    known = {site: fields[name] for site, name in fit.program.labels.items() if name in fields}
    rows = fit.program.terms_of_rows
    return {site: without_unknown(data, v) if site in rows else v for site, v in known.items()}


@one_at_a_time
def log_likelihoods(fit: Snapshot, draws: Draws) -> dict[str, Tensor]:
    """Return log densities of rows (S, n) or clients (S, N), by observed site and factor."""
    program, data = fit.program, fit.federation.data
    missing = set(program.labels) - set(observed(fit, data))
    if missing:
        raise ValueError(
            f"the clients' rows have no labels for site '{min(missing)}': there is no likelihood"
        )

    def one(params: Params, values: Values, batch: ClientBatch) -> Tree:
        densities = program.log_likelihoods(values, batch, params)
        # summed over the plates left of the clients
        return {n: v.flatten(0, -3).sum(0) if v.dim() > 2 else v for n, v in densities.items()}

    by_site: dict[str, list[Tensor]] = {site: [] for site in (*program.labels, *program.factors)}
    for chunk in at_draws(fit, draws, one):
        for site, value in chunk.found.items():  # (C, S, 1, B), or (C, S, 1, 1) of clients
            of_rows = site in program.terms_of_rows
            inside = chunk.asked.mask() if of_rows else torch.ones(len(chunk.ids), 1).bool()
            by_site[site].append(value[:, :, 0].movedim(1, -1)[inside].T)
    return {site: torch.cat(densities, 1) for site, densities in by_site.items()}


@one_at_a_time
def replicate(
    fit: Snapshot,
    rows: "ClientData | Frames",
    *,
    site: str | None = None,
    draws: int = 200,
    seed: int = 0,
) -> Tensor:
    """Draw labels of some rows from the posterior predictive distribution, (S, n).

    The labels of one draw share its latent sites, so labels of one client's rows are dependent.
    Arguments and errors are those of `predict`; `draws` is S.
    """
    site, data = fit.program.observed_site(site), fit._rows(rows)
    of_rows = restricted(fit, data)
    latents = posterior_draws(of_rows, draws=draws, seed=seed)
    drawn: Tensor = sampled(of_rows, latents, data, seed, count=draws)[site]
    return drawn if data is rows else data.frame_rows.arranged(drawn, 1)


def sampled(
    fit: Snapshot, draws: Draws, rows: ClientData, seed: int, *, count: int = 1
) -> dict[str, Tensor]:
    """Draw a label of each row (S, n, *event), with a seed for each client, so that none affects others."""
    program, salt = fit.program, (noise.word("predictive"),)
    shared, own = in_program_shapes(program, draws)
    count = draws.count or count
    by_site: dict[str, list[Tensor]] = {site: [] for site in program.labels}
    for k in range(fit.federation.data.num_clients):
        index = torch.tensor([k])
        batch = labeled(full_batch(rows, index, seed=seed, at=salt), program)
        state = tree_map(lambda v: v[0], taken(fit.progress.table, index))
        params = fit.federation.client.params(fit.message, state)
        values = {**shared, **{name: value[k] for name, value in own.items()}}
        labels = _labels_of_client(program, params, batch, {"index": torch.arange(count), **values})
        for site, value in labels.items():
            value = value.squeeze(1)  # (S, B, *event), or (S, 1, B, *event) of packed rows
            by_site[site].append(value.squeeze(1) if program.joint.get(site) else value)
    return {site: torch.cat(labels, 1) for site, labels in by_site.items()}


def _labels_of_client(
    program: Program, params: Params, batch: ClientBatch, values: Values
) -> dict[str, Tensor]:
    """Draw one client's labels at latent sites (S, ...); `index` (S,) says S without sites."""

    def at(values: Values) -> Values:
        latents = {name: value for name, value in values.items() if name != "index"}
        labels = program.observed(latents, batch, params)
        return {site: fn.sample() for site, (fn, _) in labels.items()}

    with torch.random.fork_rng(devices=[]), unchecked(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about mapped samplers that are slow
        first, second = batch.key[0].tolist()
        noise.seed_torch(((first & 0x7FFFFFFF) << 32) | (second & 0xFFFFFFFF))
        try:
            labels: dict[str, Tensor] = torch.vmap(
                at, randomness="different", chunk_size=CLIENT_DRAWS_AT_ONCE
            )(values)
        except LACKING as error:
            names = ", ".join(f"'{name}'" for name in program.labels)
            raise ValueError(
                f"labels of the observed sites {names} cannot be drawn, since a distribution "
                "among them has no sampler: observe them by a distribution with `sample`"
            ) from error
        except RuntimeError:  # torch has no mapped sampler for a few (Student's t, Beta)
            trees = [at({n: v[s] for n, v in values.items()}) for s in range(len(values["index"]))]
            labels = tree_map(lambda *v: torch.stack(v), *trees)
    return labels
