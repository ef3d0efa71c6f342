"""Draws of a guide with the logs of their weights: what each client answers with in a round, and what stays with it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyro
import torch
from pyro import poutine
from torch import Tensor

from hierfl.core import noise
from hierfl.core.trees import Tree, tree_map
from hierfl.data.batch import ClientBatch
from hierfl.posterior.draws import Draws, each_client, together
from hierfl.posterior.proposals import Coordinates
from hierfl.program.handlers import Answer
from hierfl.program.program import Params, Program
from hierfl.program.sites import Values
from hierfl.program.traces import in_clients, samples

if TYPE_CHECKING:
    from hierfl.runs.result import Fit

INNER = 8  # draws of own sites a draw of z
LIMIT = 2000  # numbers of a client, or global ones: weights of more come down to one draw, whatever the guide


@dataclass(frozen=True, eq=False)
class Weighed:
    """Draws and their weights.

    Args:
        draws: of every latent and deterministic site, shared (S, *shape), own (S, N, *shape), unweighed.
        log_shared: (S,) log p(z) / q(z).
        log_own: (S, N) log W_k, an estimate of log p(y_k | z); nothing else leaves a client.
        at: (S, K) coordinates of z, those of the guide's Gaussian sites.
        log_q: (S,) their density under the guide.
    """

    draws: Draws
    log_shared: Tensor
    log_own: Tensor
    at: Tensor
    log_q: Tensor

    @property
    def total(self) -> Tensor:
        """(S,) log weights of all sites together as draws of the guide, what the server adds up."""
        return self.log_shared + self.log_own.sum(1)


def joined(one: Weighed, other: Weighed) -> Weighed:
    """The draws of both."""
    draws = (
        {name: torch.cat([value, theirs[name]]) for name, value in mine.items()}
        for mine, theirs in (
            (one.draws.shared, other.draws.shared),
            (one.draws.own, other.draws.own),
        )
    )
    rest = (
        (one.log_shared, other.log_shared),
        (one.log_own, other.log_own),
        (one.at, other.at),
        (one.log_q, other.log_q),
    )
    return Weighed(Draws(*draws), *(torch.cat(both) for both in rest))


def weigh(
    fit: Fit,
    count: int,
    *,
    inner: int = INNER,
    seed: int = 0,
    shared: bool = True,
    points: Tensor | None = None,
    apart: str = "posterior",
) -> Weighed:
    """Draws of the guide with their weights.

    Args:
        fit: of labelled clients.
        count: S.
        inner: draws of a client's own sites a draw of the global ones, of which it keeps one.
        seed: of the draws.
        shared: whether weights of the global sites are wanted too, so that their guide must have a density.
        points: (S, K) coordinates that the guide's Gaussian global sites are to have; None: the guide draws them.
        apart: a word that makes these draws other than those with another.

    Raises:
        ValueError: a guide without a density, or clients without labels.
    """
    program = fit.program
    check_labelled(fit)
    check_density(fit, shared=shared)
    times = inner if program.latents.local_block.size else 1

    def one(params: Params, own: ClientBatch, asked: ClientBatch) -> Tree:
        point = (
            None
            if points is None
            else points.index_select(0, torch.as_tensor(own.words[-1]).long()[None])[0]
        )
        values, log_shared, log_own, at, log_q = over_own(program, params, own, times, point)
        parts = log_own.softmax(0).cumsum(0)
        uniform = noise.uniforms(noise.fold(own.key[0], noise.word("psis")), ())
        kept = (parts < uniform).sum().clamp(max=times - 1)[None]
        mean = log_own.logsumexp(0) - math.log(times)
        shared_parts = {"shared": log_shared[0], "at": at[0], "log_q": log_q[0]}
        return {
            "values": {n: v.index_select(0, kept)[0] for n, v in values.items()},
            "own": mean,
            **shared_parts,
        }

    where, width = (
        (fit.federation, fit.message, fit.progress.table),
        times * (1 + program.latents.local_block.size // 16),
    )
    chunks = [
        tree
        for _, tree in each_client(*where, one, draws=count, seed=seed, width=width, apart=apart)
    ]
    drawn = together(program, [chunk["values"] for chunk in chunks])
    _check_varies(fit, drawn, shared=shared)
    of_z = (
        chunks[0][name][0] for name in ("shared", "at", "log_q")
    )  # the same whichever client is asked
    log_shared, at, log_q = of_z
    log_own = torch.cat([chunk["own"] for chunk in chunks]).T
    if points is not None:  # some lie so far out that nothing is defined there: they weigh nothing
        nowhere = ~(log_shared.isfinite() & log_own.isfinite().all(1))
        log_shared, log_own = (
            log_shared.masked_fill(nowhere, -torch.inf),
            log_own.masked_fill(nowhere[:, None], 0.0),
        )
    bad = log_own.isnan().any(0)
    if bool(bad.any()):
        name = fit.clients[int(bad.nonzero()[0, 0])]
        raise ValueError(
            f"the log weights of client '{name}' are NaN: its likelihood is not defined where the guide draws"
        )
    return Weighed(drawn, log_shared, log_own, at, log_q)


def over_own(
    program: Program, params: Params, batch: ClientBatch, times: int, point: Tensor | None = None
) -> tuple[Values, Tensor, Tensor, Tensor, Tensor]:
    """`times` draws of a client's own sites at one z: values, log p(z) / q(z), log W_k, coordinates and density of z, (times, ...)."""

    def again(m: Tensor) -> tuple[Values, Tensor, Tensor, Tensor, Tensor]:
        keys = noise.fold(batch.own_keys, noise.word("own"), m)  # the root key stays: the same z
        z = Coordinates(point)

        def guide(b: ClientBatch) -> None:
            with z:
                program.guide(b)

        values, terms = replace(program, guide=guide).weighed(params, replace(batch, own_keys=keys))
        return values, -terms.global_kl, -(terms.nll + terms.local_kl)[0], z.vector(), z.log_q()

    index = torch.arange(times, dtype=torch.int32)
    if program.keyed:
        found: tuple[Values, Tensor, Tensor, Tensor, Tensor] = torch.vmap(again)(index)
        return found
    each = [again(m) for m in index]
    values = tree_map(lambda *v: torch.stack(v), *[e[0] for e in each])
    first, second, third, fourth = (
        torch.stack(part) for part in zip(*(e[1:] for e in each), strict=True)
    )
    return values, first, second, third, fourth


def check_labelled(fit: Fit) -> None:
    """Refuse clients without labels."""
    data = fit.federation.data
    missing = [
        label
        for label in fit.program.labels.values()
        if label not in {**data.fields, **data.client_fields}
    ]
    if missing:
        raise ValueError(
            f"the clients' rows have no field '{missing[0]}': without labels there is no likelihood to weigh by"
        )


def check_density(fit: Fit, *, shared: bool) -> None:
    """Refuse guides that place points, whose draws have no density, so no weights; and networks, whose weights say nothing."""
    program = fit.program
    for block, asked in (
        (program.latents.global_block, shared),
        (program.latents.local_block, True),
    ):
        if asked and block.size > LIMIT:
            site = max(block.sites, key=lambda s: s.size)
            raise ValueError(
                f"the guide has {block.size} numbers to weigh ({site.size} of them in site '{site.name}'), and the limit is {LIMIT}: "
                f"of so many, one draw outweighs all others; judge such a fit by its predictions"
            )
    params, batch = (
        fit.federation.client.params(fit.message, fit.federation.client.own),
        program.prototype,
    )
    with pyro.validation_enabled(False), torch.no_grad(), Answer(params, batch):
        nodes = poutine.trace(program.guide).get_trace(batch)
    spread = {
        in_clients(site)
        for _, site in samples(nodes)
        if not isinstance(_base(site["fn"]), pyro.distributions.Delta)
    }
    for site in program.latents.sites:
        if site.is_local not in spread and (site.is_local or shared):
            raise ValueError(_no_density(fit, site.name))


def _check_varies(fit: Fit, drawn: Draws, *, shared: bool) -> None:
    """A point beside sites that are spread has no density either."""
    for site in fit.program.latents.sites:
        values = (drawn.own if site.is_local else drawn.shared)[site.name]
        if (site.is_local or shared) and len(values) > 1 and bool((values == values[:1]).all()):
            raise ValueError(_no_density(fit, site.name))


def _no_density(fit: Fit, site: str) -> str:
    if fit.method.name == "fedlaplace":
        return "fedlaplace has weighed its draws already, and the points that are left have no density: see k_hat in fit.history"
    return (
        f"the guide of '{fit.method.name}' places site '{site}' at points, which have no density to weigh: fit with a guide that "
        f"spreads (guides.conditional, structured, mean_field)"
    )


def _base(fn: object) -> object:
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return fn
