"""What traces on one and on two clients show of sites, params, factors and labels."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor, nn
from torch.distributions import kl_divergence, transform_to

from hierfl.core import noise
from hierfl.core.gaussians import turned_root
from hierfl.core.user_warnings import warn
from hierfl.data.batch import CLIENTS, ClientBatch
from hierfl.program.handlers import KeyedNoise, NoKeyedDraw, draw, untouched_store
from hierfl.program.program import ParamSpec, ProgramError, refuse_first
from hierfl.program.sites import Latents, LatentSite, Model
from hierfl.program.supports import kind_of
from hierfl.program.traces import (
    NORMAL,
    Center,
    Near,
    Site,
    has_mean,
    in_clients,
    in_data,
    is_deterministic,
    is_factor,
    is_latent,
    samples,
    unit_of,
    with_one_changed,
)


def likelihood_factors(
    model: Model, trace: Any, batch: ClientBatch, labels: Collection[str]
) -> dict[str, bool]:
    """Return the likelihood's factors -> whether by row; those outside the data plate must read fields."""
    by_row = {n: in_data(s) for n, s in samples(trace) if is_factor(s) and in_clients(s)}
    of_clients = {name for name, is_by_row in by_row.items() if not is_by_row}
    for name in of_clients and of_clients - _reading(model, batch, of_clients):
        del by_row[name]
    if not by_row and not labels:
        raise ProgramError(
            "the model observes no field inside the clients plate: give a likelihood, "
            "pyro.sample(..., obs=batch.y)"
        )
    return by_row


def _reading(model: Model, batch: ClientBatch, names: Collection[str]) -> set[str]:
    """Return the factors that change with a field of rows, off the centers, which may hide a dependence."""
    at = partial(Near, 0.5, 1)
    with at(), pyro.validation_enabled(False):
        nodes = poutine.trace(model).get_trace(batch).nodes
    before = {name: _density(nodes[name]) for name in names}
    return {
        name
        for _, other in with_one_changed(model, batch, at)
        for name in names
        if not torch.equal(_density(other[name]), before[name])
    }


def _density(site: Site) -> Tensor:
    return torch.as_tensor(site["fn"].log_prob(site["value"]))


def latents_of(single: Any, pair: Any) -> Latents:
    """Return the latent sites of a model, from its traces on one and on two clients."""
    sites = []
    for name, site in single.nodes.items():
        if is_latent(site):
            sites.append(_latent(site, pair.nodes[name]))
    return Latents(tuple(sites))


# sd of an entry given those before it, relative to its sd, below which a root is the unit
CORRELATED = 0.5


def _latent(site: Site, pair: Site) -> LatentSite:
    """Return a latent site, as the traces on one and on two clients show it."""
    plates = tuple(
        (f.name, f.size, f.dim)
        for f in site["cond_indep_stack"]
        if f.name != CLIENTS and f.vectorized
    )
    refuse_first(_faults_of_site(site, pair, plates))
    fn = site["fn"]
    latent = LatentSite(
        site["name"],
        in_clients(site),
        plates,
        fn.batch_shape,
        fn.event_shape,
        fn.support,
        has_mean(fn),
        site["value"].detach().clone(),
        _unit(fn, is_local=in_clients(site)),
    )
    back, _ = latent.constrain(latent.free_start)
    if not torch.allclose(back, latent.start, rtol=1e-2, atol=1e-3):
        raise ProgramError(
            f"site '{site['name']}' ({kind_of(fn)}) starts at "
            f"{latent.start.flatten()[0].item():.3g}, which the map from real numbers onto its "
            "support does not reach: use a distribution whose support has finite bounds, or none"
        )
    return latent


def faults_of_rows(trace: Any, other: Any) -> Iterator[str]:
    """Say which global sites some rows have, and others do not or in another shape."""
    shapes = [
        {n: tuple(s["value"].shape) for n, s in samples(of) if is_latent(s) and not in_clients(s)}
        for of in (trace, other)
    ]
    for name in sorted(shapes[0].keys() | shapes[1].keys()):
        here, there = (of.get(name) for of in shapes)
        if here != there:
            how = "for some rows only" if None in (here, there) else f"as {here} and as {there}"
            yield (
                f"site '{name}' is sampled {how}, since the model takes the number of its groups from "
                "the rows of a batch: compute it from all rows, outside the model, groups = "
                "int(data.fields[name].max()) + 1"
            )


def _faults_of_site(
    site: Site, pair: Site, plates: Iterable[tuple[str, int | None, int | None]]
) -> Iterator[str]:
    if any(dim is not None and dim >= -2 for _, _, dim in plates) and in_clients(site):
        yield (
            f"site '{site['name']}': plates beside clients (dim -2) and data (dim -1) take dim -3 "
            f"and below, pyro.plate(name, size, dim=-3), or are an event of the site, "
            f"fn.expand([size]).to_event(1): docs/recipes.md, 'A plate within a client'"
        )
    if in_clients(site) != in_clients(pair):
        yield f"site '{site['name']}' is inside the clients plate for some numbers of clients only"


def _unit(fn: Any, *, is_local: bool) -> Tensor | None:
    """Return the unit of a site; None where it is 1, and of local sites that are not Normal."""
    unit = unit_of(fn)
    base = getattr(fn, "base_dist", fn)
    if is_local and isinstance(base, dist.MultivariateNormal):
        root = base.scale_tril.detach()
        narrow = root.diagonal(dim1=-2, dim2=-1) < CORRELATED * base.stddev
        if bool(narrow.any() and root.isfinite().all()):
            return turned_root(root).expand(*fn.shape(), fn.event_shape[-1])
    if unit is None or bool((unit == 1.0).all()) or (is_local and not isinstance(base, NORMAL)):
        return None
    return unit


def derived_of(trace: Any) -> dict[str, int | None]:
    """Return deterministic sites (not by row) -> plates left of the clients, None if global."""
    plates: dict[str, int | None] = {}
    for name, site in trace.nodes.items():
        if is_deterministic(site) and not in_data(site):
            plates[name] = len(site["fn"].batch_shape) - 2 if in_clients(site) else None
    return plates


def params_of(singles: list[Any], pairs: list[Any]) -> tuple[ParamSpec, ...]:
    """Return every param of model and guide, from their traces on one and on two clients."""
    specs: dict[str, ParamSpec] = {}
    for single, pair in zip(singles, pairs, strict=True):
        for name, site in single.nodes.items():
            if site["type"] != "param":
                continue
            spec = _param(site, pair.nodes[name])
            if name in specs and specs[name].is_local != spec.is_local:
                raise ProgramError(
                    f"param '{name}' is declared both inside and outside the clients plate: give "
                    "them two names"
                )
            specs[name] = spec
    return tuple(specs.values())


def _param(site: Site, pair: Site) -> ParamSpec:
    """Return a param's specification; its clients' dimension differs between one client and two."""
    constraint = site["kwargs"].get("constraint", dist.constraints.real)
    start = transform_to(constraint).inv(site["value"].detach()).clone()
    before, after = site["value"].shape, pair["value"].shape
    # a module is shared by all clients wherever it is registered
    is_weight = (
        any(isinstance(start_value, nn.Parameter) for start_value in site["args"])
        and before == after
    )
    local = in_clients(site) and not is_weight
    differ = [d for d, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    if len(differ) != int(local):
        where, fix = "outside", "it must not depend on the clients"
        if local:
            where = "inside"
            fix = (
                "give it one entry per client, (num_clients, 1, ...), or declare one for all of them "
                "before batch.clients() (of LocScaleReparam and AutoReparam: LocScaleReparam(0.0))"
            )
        raise ProgramError(
            f"param '{site['name']}' is {where} the clients plate, but its shape is "
            f"{tuple(before)} for one client and {tuple(after)} for two: {fix}"
        )
    axis = differ[0] - len(before) if local else 0
    return ParamSpec(site["name"], local, constraint, start, axis)


def observed_outside(trace: Any) -> dict[str, Site]:
    """Return the sites that are observed inside the clients' plate but outside that of the rows."""
    return {
        name: site
        for name, site in samples(trace)
        if site["is_observed"]
        and not is_deterministic(site)
        and in_clients(site)
        and not in_data(site)
    }


def closed_of(model: Any, guide: Any) -> frozenset[str]:
    """Return the sites whose KL has a valid closed form: both draw the same sites before them."""
    order = list(guide.nodes)
    last, closed = -1, set()  # where the guide has drawn all that the model has drawn so far
    for name, site in model.nodes.items():
        if not is_latent(site):
            continue
        q, at = guide.nodes[name]["fn"], order.index(name)
        if not isinstance(q, dist.Delta) and last < at:
            with suppress(NotImplementedError):
                kl_divergence(q, site["fn"])
                closed.add(name)
        last = max(last, at)
    return frozenset(closed)


def is_keyed(guide: Any) -> bool:
    """Return whether keys can draw every guide site; if not, warn that clients run one by one."""
    unkeyed = []
    for name, site in guide.nodes.items():
        if not is_latent(site):
            continue
        try:
            draw(site["fn"], KeyedNoise(noise.root_key(0), axis=0))
        except NoKeyedDraw as error:
            if not site["fn"].has_rsample:
                raise ProgramError(
                    f"site '{name}' of the guide is drawn from {error}, which has no "
                    "reparameterized draw: no gradient passes through it"
                ) from error
            unkeyed.append(name)
    if unkeyed:
        kind = type(guide.nodes[unkeyed[0]]["fn"]).__name__
        warn(
            f"site '{unkeyed[0]}' is drawn from {kind}, no known transform of normals or "
            "uniforms: clients run one at a time",
        )
    return not unkeyed


def check_sizes(model: Model, trace: Any, batch: ClientBatch) -> None:
    """Refuse a latent site with one value per row: its shape would differ between clients."""
    latent: dict[str, torch.Size] = {}
    for name, site in samples(trace):
        if is_latent(site):
            latent[name] = site["fn"].event_shape
    if batch.num_rows not in chain.from_iterable(latent.values()):
        return
    fields = {name: v[:, :-1] for name, v in batch.fields.items()}
    rows = None if batch.rows is None else batch.rows[:, :-1]
    with untouched_store(), Center():
        fewer: Any = poutine.trace(model).get_trace(replace(batch, fields=fields, rows=rows)).nodes
    for name, shape in latent.items():
        if fewer[name]["fn"].event_shape != shape:
            raise ProgramError(
                f"site '{name}' is latent and has one value per row (event shape {tuple(shape)} for "
                f"{batch.num_rows} rows), while clients differ in their rows: sum it out, by "
                f"batch.joint_normal where it is Gaussian"
            )
