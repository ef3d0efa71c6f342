"""Draws of a guide with their log importance weights."""

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor

from hierfl.core import noise
from hierfl.core.trees import Tree, tree_class
from hierfl.data.batch import ClientBatch
from hierfl.posterior.client_loop import at_each_draw, each_draw, wide_draws_at_once
from hierfl.posterior.draws import Draws, joined_draws
from hierfl.posterior.proposals import Coordinates, Stretched
from hierfl.posterior.snapshot import Snapshot
from hierfl.program.handlers import Substitute, unchecked
from hierfl.program.program import Params, Program
from hierfl.program.sites import Values
from hierfl.program.traces import in_clients, samples

INNER = 8  # draws of the local sites for each draw of the global ones
LIMIT = 2000  # unknowns, local or global, beyond which one draw outweighs all others
WEIGHTED = ("fedlaplace", "two_stage")  # methods that weight and resample draws of the global sites


@tree_class
class Weighed:
    """Draws before resampling, and their log weights.

    `log_shared` (S,) is log p(z) / q(z). `log_own` (S, N) is log W_k, the mean weight of a client's
    local draws: W_k is an unbiased estimate of p(y_k | z). `log_first` (S, N) is that of its first
    draw alone, and `variance` (S, N) that of W_k / p(y_k | z), 0 for a single draw: only the first
    two, and the third's mean, leave a client. `at` (S, K) are coordinates of z: the guide's
    Gaussian global sites; `log_q` (S,) is their log density under the guide.
    """

    draws: Draws
    log_shared: Tensor
    log_own: Tensor
    log_first: Tensor
    variance: Tensor
    at: Tensor
    log_q: Tensor

    @property
    def total(self) -> Tensor:
        """Log weights of all sites together, (S,): the sum that the server forms."""
        return self.log_shared + self.log_own.sum(1)

    @property
    def raw(self) -> Tensor:
        """Log weights of single draws of all sites, (S,), without averages over local draws."""
        return self.log_shared + self.log_first.sum(1)


def weigh(
    fit: Snapshot,
    count: int,
    *,
    inner: int = INNER,
    seed: int = 0,
    shared: bool = True,
    points: Tensor | None = None,
    salt: str = "posterior",
    stretch: bool = False,
) -> Weighed:
    """Draw S times from the guide and weight the draws; `inner` local draws each, globals if `shared`."""
    program = fit.program
    check_labeled(fit)
    check_density(fit, shared=shared)
    times = inner if program.latents.local_block.size else 1

    def one(params: Params, own: ClientBatch, batch: ClientBatch) -> Tree:
        d = torch.as_tensor(own.words[-1]).long()[None]  # the draw's number
        point = None if points is None else points.index_select(0, d)[0]
        values, log_shared, log_own, at, log_q = over_own(
            program, params, own, times, point, stretch=stretch
        )
        sums = log_own.softmax(0).cumsum(0)
        uniform = noise.uniforms(noise.fold(own.key[0], noise.word("psis")), ())
        which = (sums < uniform).sum().clamp(max=times - 1)[None]
        return {
            "values": {n: v.index_select(0, which)[0] for n, v in values.items()},
            "own": log_own.logsumexp(0) - math.log(times),
            "first": log_own[0],
            "variance": _variance(log_own),
            "shared": log_shared[0],
            "at": at[0],
            "log_q": log_q[0],
        }

    width = times * (1 + program.latents.local_block.size // 16)
    how: dict[str, Any] = {"draws": count, "seed": seed, "width": width, "salt": salt}
    chunks = [chunk.found for chunk in each_draw(fit, one, **how)]
    drawn = joined_draws(program, [chunk["values"] for chunk in chunks])
    for site in program.latents.sites:  # a point estimate beside sites that are spread
        if (site.is_local or shared) and drawn.count > 1 and drawn.is_fixed(site):
            raise ValueError(_no_density(fit, site.name))
    # these depend on z alone, and are the same for every client
    log_shared, at, log_q = (chunks[0][name][0] for name in ("shared", "at", "log_q"))
    log_own, first, variance = (
        torch.cat([chunk[name] for chunk in chunks]).T for name in ("own", "first", "variance")
    )
    if points is not None:  # the density may be undefined at points far out: weight 0
        undefined = ~(log_shared.isfinite() & log_own.isfinite().all(1))
        log_shared = log_shared.masked_fill(undefined, -torch.inf)
        log_own = log_own.masked_fill(undefined[:, None], 0.0)
    bad = log_own.isnan().any(0)
    if bool(bad.any()):
        name = fit.clients[int(bad.nonzero()[0, 0])]
        raise ValueError(
            f"the log weights of client '{name}' are NaN: "
            f"its likelihood is not defined where the guide draws"
        )
    return Weighed(drawn, log_shared, log_own, first, variance, at, log_q)


def _variance(log_weights: Tensor) -> Tensor:
    """Return the relative variance of the mean of weights, from log weights (M,)."""
    count = len(log_weights)
    if count == 1:
        return torch.zeros_like(log_weights[0])
    squares = (2.0 * log_weights.log_softmax(0)).exp().sum()  # 1 / M where all weights are equal
    return (count * squares - 1.0).clamp(min=0.0) / (count - 1)


OwnDraws = tuple[Values, Tensor, Tensor, Tensor, Tensor]


def over_own(
    program: Program,
    params: Params,
    batch: ClientBatch,
    times: int,
    point: Tensor | None = None,
    *,
    stretch: bool = False,
) -> OwnDraws:
    """Draw local sites several times at one z: values, log p(z) / q(z), log W_k, z, log q(z), (times, ...)."""

    def again(m: Tensor) -> OwnDraws:
        keys = noise.fold(batch.own_keys, noise.word("own"), m)  # the root key stays, and so does z
        z = Coordinates(point)
        wide = Stretched(m % 2 == 1, program.latents.local_block.size) if stretch else None

        def guide(b: ClientBatch) -> None:
            with z, wide or nullcontext():
                program.guide(b)

        values, terms = replace(program, guide=guide).draw_with_terms(
            params, replace(batch, own_keys=keys)
        )
        log_own = -(terms.nll + terms.local_kl)[0]
        log_own = log_own if wide is None else log_own + wide.correction()
        return values, -terms.global_kl, log_own, z.vector(), z.log_q()

    at_once = wide_draws_at_once(batch.num_rows, program)
    stacked: OwnDraws = at_each_draw(again, times, program, at_once=at_once)
    return stacked


def check_labeled(fit: Snapshot) -> None:
    """Refuse clients without labels."""
    data = fit.federation.data
    for label in fit.program.labels.values():
        if label not in {**data.fields, **data.client_fields}:
            raise ValueError(
                f"the clients' rows have no field '{label}': "
                f"without labels there is no likelihood to weight by"
            )


def check_density(fit: Snapshot, *, shared: bool) -> None:
    """Refuse point estimates, which have no density, and networks with too many unknowns."""
    program = fit.program
    latents = program.latents
    own = latents.local_block
    for block in (latents.global_block, own) if shared else (own,):
        if block.size > LIMIT:
            site = max(block.sites, key=lambda s: s.size)
            raise ValueError(
                f"the guide has {block.size} unknowns to weight ({site.size} of them in site "
                f"'{site.name}'), and the limit is {LIMIT}: with so many, one draw outweighs all "
                f"others; judge such a fit by its predictions"
            )
    spread = spread_levels(fit)
    for site in program.latents.sites:
        if site.is_local not in spread and (site.is_local or shared):
            raise ValueError(_no_density(fit, site.name))


def already_weighted(fit: Snapshot) -> bool:
    """Return whether the method itself has weighted and resampled the global sites."""
    return fit.method.name in WEIGHTED and not ended_early(fit) and False not in spread_levels(fit)


def ended_early(fit: Snapshot) -> bool:
    """Return whether the rounds ended before a self-stopping method was done."""
    server = fit.federation.server
    return server.stops_itself and not server.finished(fit.progress.server)


def spread_levels(fit: Snapshot) -> set[bool]:
    """Return the levels at which the guide spreads: True for local sites, False for global."""
    program, batch = fit.program, fit.program.prototype
    params = fit.params_at_first
    with unchecked(), torch.no_grad(), Substitute(params, batch):
        nodes = poutine.trace(program.guide).get_trace(batch)
    return {
        in_clients(site)
        for _, site in samples(nodes)
        if not isinstance(base_of(site["fn"]), pyro.distributions.Delta)
    }


def _no_density(fit: Snapshot, site: str) -> str:
    if already_weighted(fit):
        return (
            f"{fit.method.name} has weighted its draws already, and the resampled points have no "
            "density: leave correct= out, and see k_hat in fit.history"
        )
    if fit.method.name in WEIGHTED and ended_early(fit):
        return (
            f"the rounds ended before {fit.method.name} had weighted its draws, which have no "
            "density: allow more rounds"
        )
    return (
        f"the guide of '{fit.method.name}' places site '{site}' at points, which have no density: "
        f"fit with a guide that has spread (guides.conditional, structured, mean_field)"
    )


def base_of(fn: Any) -> Any:
    """Return the distribution that wrappers such as `Independent` are about."""
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return fn
