"""What the traces of a program on one client and on two show of its sites and params."""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import Any

import pyro.distributions as dist
import torch
from torch import nn
from torch.distributions import kl_divergence, transform_to

from hierfl.core import noise
from hierfl.data.batch import CLIENTS, DATA
from hierfl.program.check_distributions import kind_of
from hierfl.program.keyed_draws import Noise, NoKeyedDraw, draw
from hierfl.program.prior_center import has_mean
from hierfl.program.program import ParamSpec, ProgramError
from hierfl.program.sites import Latents, LatentSite
from hierfl.program.traces import Site, in_clients, is_deterministic, is_latent


def latents_of(single: Any, pair: Any) -> Latents:
    """Return the latent sites of a model, from its traces on one and on two clients."""
    return Latents(
        tuple(
            _latent(site, pair.nodes[name])
            for name, site in single.nodes.items()
            if is_latent(site)
        )
    )


def _latent(site: Site, pair: Site) -> LatentSite:
    """Return a latent site, as the traces on one and on two clients show it."""
    plates = tuple(
        (f.name, f.size, f.dim)
        for f in site["cond_indep_stack"]
        if f.name != CLIENTS and f.vectorized
    )
    if any(dim >= -2 for _, _, dim in plates) and in_clients(site):
        raise ProgramError(
            f"site '{site['name']}': plates beside clients (dim -2) and data (dim -1) take dim -3 and below"
        )
    if in_clients(site) != in_clients(pair):
        raise ProgramError(
            f"site '{site['name']}' is inside the clients plate for some numbers of clients only"
        )
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
    )
    back, _ = latent.constrain(latent.free_start)
    if not torch.allclose(back, latent.start, rtol=1e-2, atol=1e-3):
        raise ProgramError(
            f"site '{site['name']}' ({kind_of(fn)}) starts at {latent.start.flatten()[0].item():.3g}, which "
            f"the map from real numbers onto its support does not reach: use a distribution whose support "
            f"has finite bounds, or none"
        )
    return latent


def derived_of(trace: Any) -> dict[str, int | None]:
    """Return the deterministic sites that are not one value a row.

    Returns:
        Name -> number of plates left of the clients; None for a global site.
    """
    found: dict[str, int | None] = {}
    for name, site in trace.nodes.items():
        if is_deterministic(site) and not any(f.name == DATA for f in site["cond_indep_stack"]):
            found[name] = len(site["fn"].batch_shape) - 2 if in_clients(site) else None
    return found


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
                    f"param '{name}' is declared both inside and outside the clients plate: give them two "
                    f"names"
                )
            specs[name] = spec
    return tuple(specs.values())


def _param(site: Site, pair: Site) -> ParamSpec:
    """Return a param's specification; its clients' dimension differs between one client and two."""
    constraint = site["kwargs"].get("constraint", dist.constraints.real)
    start = transform_to(constraint).inv(site["value"].detach()).clone()
    before, after = site["value"].shape, pair["value"].shape
    # a module is shared by all clients wherever it is registered
    is_weight = any(isinstance(given, nn.Parameter) for given in site["args"]) and before == after
    local = in_clients(site) and not is_weight
    differ = [d for d, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    if len(differ) != int(local):
        where, mend = "outside", "it must not depend on the clients"
        if local:
            where, mend = "inside", "give it one entry a client, (num_clients, 1, ...)"
        raise ProgramError(
            f"param '{site['name']}' is {where} the clients plate, but its shape is {tuple(before)} for one "
            f"client and {tuple(after)} for two: {mend}"
        )
    axis = differ[0] - len(before) if local else 0
    return ParamSpec(site["name"], local, constraint, start, axis)


def closed_of(model: Any, guide: Any) -> frozenset[str]:
    """Return the sites whose KL has a closed form that is valid.

    It is valid where every latent site before it in the model is also drawn before it in the guide.
    """
    order = {name: i for i, name in enumerate(guide.nodes)}
    before: list[str] = []
    closed = set()
    for name, site in model.nodes.items():
        if not is_latent(site):
            continue
        q = guide.nodes[name]["fn"]
        if not isinstance(q, dist.Delta) and all(order[b] < order[name] for b in before):
            with suppress(NotImplementedError):
                kl_divergence(q, site["fn"])
                closed.add(name)
        before.append(name)
    return frozenset(closed)


def is_keyed(guide: Any) -> bool:
    """Return whether keys can draw every site of a guide; where not, warn that clients run one at a time."""
    unkeyed = []
    for name, site in guide.nodes.items():
        if not is_latent(site):
            continue
        try:
            draw(site["fn"], Noise(noise.root_key(0), axis=0))
        except NoKeyedDraw as error:
            if not site["fn"].has_rsample:
                raise ProgramError(
                    f"site '{name}' of the guide is drawn from {error}, which has no reparameterized draw: "
                    f"no gradient passes through it"
                ) from error
            unkeyed.append(name)
    if unkeyed:
        kind = type(guide.nodes[unkeyed[0]]["fn"]).__name__
        warnings.warn(
            f"site '{unkeyed[0]}' is drawn from {kind}, no known transform of normals or uniforms: clients "
            f"run one at a time",
            stacklevel=5,
        )
    return not unkeyed
