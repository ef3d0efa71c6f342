"""Checks of a traced program: batch shapes against plates, guide against model, a finite start."""

from __future__ import annotations

from typing import Any

import pyro.distributions as dist

from hierfl.data.batch import CLIENTS, DATA, ClientBatch
from hierfl.program.check_distributions import kind_of
from hierfl.program.program import Params, Program, ProgramError
from hierfl.program.sites import Family, Latents
from hierfl.program.terms import traces_of
from hierfl.program.traces import Site, in_clients, is_latent, samples, scored


def check_plates(name: str, site: Site, batch: ClientBatch) -> None:
    """Refuse a site whose batch shape is not that of its plates, or that is in the wrong plates.

    Args:
        name: of the site.
        site: of a trace.
        batch: that was traced.

    Raises:
        ProgramError: the site is in the data plate but not in the clients plate; it is observed outside the
            clients plate; it is latent in the data plate; or its batch shape is not that of its plates.
    """
    frames = {f.name: f for f in site["cond_indep_stack"] if f.vectorized}
    shape = tuple(site["fn"].batch_shape)
    if DATA in frames and CLIENTS not in frames:
        raise ProgramError(
            f"site '{name}' is in the data plate but not in the clients plate: open batch.data() inside "
            f"batch.clients()"
        )
    is_factor = isinstance(site["fn"], dist.Unit)
    if site["is_observed"] and CLIENTS not in frames and not is_factor and len(shape) > 1:
        raise ProgramError(
            f"site '{name}' is observed outside the clients plate: put it inside `with batch.clients():`"
        )
    wanted = [1] * max(0, *(-f.dim for f in frames.values()), 0)
    for frame in frames.values():
        wanted[frame.dim] = frame.size
    if shape != tuple(wanted):
        raise _wrong_shape(name, shape, tuple(wanted), list(frames), batch, site["is_observed"])
    if DATA in frames and is_latent(site):
        raise ProgramError(
            f"site '{name}' is latent in the data plate, one value a row (shape {shape}): observe it "
            f"(obs=batch.{name}), sum it out in the likelihood of the row, or of all rows (batch.joint_normal)"
        )


def _wrong_shape(
    name: str,
    shape: tuple[int, ...],
    wanted: tuple[int, ...],
    plates: list[str],
    batch: ClientBatch,
    observed: bool,
) -> ProgramError:
    """Return the error of a site whose batch shape is not that of its plates."""
    clients = batch.num_clients
    if CLIENTS not in plates and len(shape) >= 2 and shape[-2] == clients > 1:
        return ProgramError(
            f"site '{name}' is outside the clients plate, but its batch shape {shape} has a dimension of "
            f"clients: it reads a local site; move it inside `with batch.clients():`"
        )
    if observed and plates == [CLIENTS] and shape == (clients, batch.num_rows):
        return ProgramError(
            f"site '{name}' has batch shape {shape}, one value a row, outside the data plate: put it inside "
            f"`with batch.data():`"
        )
    return ProgramError(
        f"site '{name}' has batch shape {shape}; its plates ({', '.join(plates) or 'none'}) require "
        f"{wanted}: declare its own dimensions with .to_event({_own_dimensions(shape, wanted)}), or open a "
        f"plate for them"
    )


def _own_dimensions(shape: tuple[int, ...], wanted: tuple[int, ...]) -> int:
    """Return the number of dimensions at the right of a batch shape that no plate accounts for."""
    for k in range(1, len(shape) + 1):
        if shape[:-k] == wanted:
            return k
    if len(shape) <= len(
        wanted
    ):  # the plates have broadcast it: only dimensions that differ are its own
        pairs = zip(reversed(shape), reversed(wanted), strict=False)
        return max((k for k, (own, plate) in enumerate(pairs, 1) if own != plate), default=1)
    fits = (k for k in range(1, len(shape) + 1) if all(n == 1 for n in shape[:-k]))
    return next(fits, len(shape) - len(wanted))


def check_callable(model: Any, guide: Any) -> None:
    """Refuse a model that is no function, and a guide that is neither a function nor a family.

    Raises:
        ProgramError: one of them; the message names what was given instead.
    """
    if not callable(model) or isinstance(model, type):
        raise ProgramError(
            f"the model is a {_kind(model)}: give a function of a batch, def model(batch), or one of "
            f"hierfl.models"
        )
    if type(guide).__module__.startswith("pyro.infer.autoguide") or isinstance(guide, type):
        raise ProgramError(
            f"the guide is {_kind(guide)}, which knows no clients: give a family of hierfl.guides, such as "
            f"hierfl.guides.mean_field"
        )
    if not isinstance(guide, Family) and not callable(guide):
        raise ProgramError(
            f"the guide is a {_kind(guide)}: give a family such as hierfl.guides.mean_field, or a function "
            f"of a batch"
        )


def _kind(thing: Any) -> str:
    if isinstance(thing, type):
        return f"the class {thing.__name__}"
    words = f" {thing!r}" if isinstance(thing, str) else ""
    return type(thing).__name__ + words


def check_cover(latents: Latents, guide: Any) -> None:
    """Refuse a guide whose latent sites are not those of the model.

    Args:
        latents: the model's latent sites.
        guide: trace of the guide.

    Raises:
        ProgramError: the guide lacks a site, has an additional one that is not auxiliary, or has one of
            another shape or on the other side of the clients plate.
    """
    drawn = {name: site for name, site in guide.nodes.items() if is_latent(site)}
    for site in latents.sites:
        if site.name not in drawn:
            raise ProgramError(
                f"site '{site.name}' is in the model but not in the guide: add it there, or use an automatic "
                f"guide"
            )
        found, wanted = tuple(drawn[site.name]["value"].shape), tuple(site.start.shape)
        if found != wanted:
            raise ProgramError(
                f"site '{site.name}' has shape {found} in the guide, {wanted} in the model"
            )
        if in_clients(drawn[site.name]) != site.is_local:
            inside, outside = ("model", "guide") if site.is_local else ("guide", "model")
            raise ProgramError(
                f"site '{site.name}' is inside the clients plate in the {inside}, outside it in the {outside}"
            )
    known = {site.name for site in latents.sites}
    for name, drawn_site in drawn.items():
        if name not in known and not drawn_site["infer"].get("is_auxiliary"):
            raise ProgramError(
                f"site '{name}' is in the guide but not in the model: rename it, or mark it "
                f"infer={{'is_auxiliary': True}}"
            )


def check_start(program: Program, batch: ClientBatch) -> None:
    """Refuse a program whose log density is not finite at the guide's starting values.

    Args:
        program: to check.
        batch: a few rows.

    Raises:
        ProgramError: a part of the log density cannot be computed, or is NaN or infinite.
    """
    shared, own = program.start()
    params = {**shared, **own}
    try:
        terms = program.terms(params, batch)
    except ValueError as error:
        raise ProgramError(
            f"the log-density cannot be computed where the guide starts: {error}"
        ) from error
    for value, what in zip(terms, ("log-likelihood", "local sites", "global sites"), strict=True):
        if not bool(value.isfinite().all()):
            raise ProgramError(
                f"the log-density of the {what} is {value.flatten()[0].item()} where the guide starts"
                f"{_at_site(program, params, batch)}: check the scales there"
            )


def _at_site(program: Program, params: Params, batch: ClientBatch) -> str:
    """Return in words the first site of the model whose log density is not finite where the guide starts."""
    _, trace = traces_of(program.model, program.guide, params, batch, batch)
    for name, site in samples(trace):
        density = scored(site, site["fn"].log_prob(site["value"]))
        if not bool(density.isfinite().all()):
            return f", at site '{name}' ({kind_of(site['fn'])})"
    return ""
