"""One eager, validated trace of a user's program: what is global, what is local, and every mistake named once, with its mend."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch.distributions import kl_divergence, transform_to

from hierfl.core import noise
from hierfl.data.batch import CLIENTS, DATA, ClientBatch, gather, keys_of
from hierfl.data.clients import ClientData
from hierfl.program.check_boundary import check_boundary
from hierfl.program.check_data import (
    by_row,
    check_finite,
    check_labels,
    check_labels_by_row,
    check_names,
    check_scored,
    fields_read,
    label_fields,
    supports_of,
)
from hierfl.program.check_program import check_cover, check_plates, check_start
from hierfl.program.handlers import Answer, untouched_store
from hierfl.program.keyed_draws import Noise, NoKeyedDraw, draw
from hierfl.program.prior_centre import Centre, has_mean
from hierfl.program.program import ParamSpec, Program, ProgramError, Reads
from hierfl.program.sites import Family, Guide, Latents, LatentSite, Model
from hierfl.program.traces import Site, in_clients, is_deterministic, is_latent

ROWS = 5  # rows of the clients a program is read on: neither 1 nor 2, so that plates and clients are told apart


def read(model: Model, guide: Guide | Family, data: ClientData, *, seed: int = 0) -> Program:
    """Read a program off eager, validated traces on two of the clients.

    Args:
        model: the generative program.
        guide: a guide function, or a family to make one of.
        data: the federation it will run on.
        seed: of values that the program itself draws for its params.

    Raises:
        ValueError: NaN or infinity in a field, or labels outside the support of their site, naming client and field.
        ProgramError: anything wrong with the program itself.
    """
    check_names(data)
    check_finite(data)
    one, two = _prototype(data, [0]), _prototype(data, [0, data.num_clients - 1])
    with pyro.validation_enabled(True):
        # two clients first: a local site read outside its plate shows only where they are not one
        pair, single = (_trace(model, batch, "model", seed, _Start()) for batch in (two, one))
        latents = Latents(
            tuple(
                _latent(site, pair.nodes[name])
                for name, site in single.nodes.items()
                if is_latent(site)
            )
        )
        with untouched_store():
            labels = label_fields(model, pair, two)
        supports = supports_of(pair, labels, data)
        check_labels(supports, data)
        check_scored(pair, labels)
        with untouched_store():
            check_labels_by_row(
                model, data, [site for site in labels if by_row(pair.nodes[site]["fn"])]
            )
        family = guide
        guide = guide.on(model, latents) if isinstance(guide, Family) else guide
        guided, guided_pair = (
            _trace(guide, batch, "guide", seed, Answer({}, batch)) for batch in (one, two)
        )
        check_cover(latents, guided)
        check_boundary(model, one, "model", _Start())
        check_boundary(guide, one, "guide", Answer({}, one))
        params = _params([single, guided], [pair, guided_pair])
        unkeyed = _unkeyed(guided)
        if unkeyed:
            kind = type(guided.nodes[unkeyed[0]]["fn"]).__name__
            warnings.warn(
                f"site '{unkeyed[0]}' is drawn from {kind}, no transform of normals or uniforms: clients run one at a time",
                stacklevel=3,
            )
        with untouched_store():
            reads = Reads(
                fields_read(model, one, _Start()), fields_read(guide, one, Answer({}, one))
            )
        program = Program(
            model=model,
            guide=guide,
            latents=latents,
            params=params,
            closed=_closed(single, guided),
            derived=_derived(single),
            labels=labels,
            supports=supports,
            reads=reads,
            num_clients=data.num_clients,
            prototype=one,
            keyed=not unkeyed,
            reads_all_rows=bool(
                isinstance(family, Family) and getattr(family.build, "reads_all_rows", False)
            ),
        )
        check_start(program, one)
    return program


def _prototype(data: ClientData, ids: list[int]) -> ClientBatch:
    chosen = torch.tensor(ids)
    place = torch.arange(ROWS)[None]
    inside = place < data.counts[chosen][:, None]
    index = data.offsets[chosen][:, None] + torch.where(inside, place, 0)
    return gather(data, chosen, index, inside, keys_of(data, chosen, 0, 0))


class _Start(Centre):
    """Sets every latent site to the centre of its prior; a discrete one is refused."""

    def _pyro_sample(self, msg: Site) -> None:
        free = not msg["done"] and not msg["is_observed"] and not isinstance(msg["fn"], _Subsample)
        if free and getattr(msg["fn"].support, "is_discrete", False):
            raise ProgramError(
                f"site '{msg['name']}' is discrete ({type(msg['fn']).__name__}) and latent, which no guide here can follow: "
                f"sum it out in the likelihood (dist.MixtureSameFamily), or observe it"
            )
        super()._pyro_sample(msg)


def _trace(
    program: Callable[[ClientBatch], Any],
    batch: ClientBatch,
    what: str,
    seed: int,
    handler: Messenger,
) -> Any:
    try:
        with untouched_store():
            torch.manual_seed(
                seed & 0x7FFFFFFF
            )  # for a param's own random start; the generator is put back after
            try:
                with handler:
                    trace = poutine.trace(program).get_trace(batch)
            except (
                NoKeyedDraw
            ):  # of two clients at once, which only shapes are wanted of: `_unkeyed` finds out
                trace = poutine.trace(program).get_trace(batch)
    except ProgramError:
        raise
    except Exception as error:
        fields = {k: tuple(v.shape) for k, v in {**batch.fields, **batch.client_fields}.items()}
        dtypes = {k: str(v.dtype).removeprefix("torch.") for k, v in batch.fields.items()}
        raise ProgramError(
            f"the {what} fails on a batch of {batch.num_clients} client(s): {type(error).__name__}: {error}\n"
            f"the batch's fields, [clients, rows, ...]: {fields}, of {dtypes}"
        ) from error
    for name, site in trace.nodes.items():
        if (
            site["type"] == "sample"
            and not isinstance(site["fn"], _Subsample)
            and not is_deterministic(site)
        ):
            check_plates(name, site, batch)
    return trace


def _latent(site: Site, pair: Site) -> LatentSite:
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
    return LatentSite(
        site["name"],
        in_clients(site),
        plates,
        fn.batch_shape,
        fn.event_shape,
        fn.support,
        has_mean(fn),
        site["value"].detach().clone(),
    )


def _derived(trace: Any) -> dict[str, int | None]:
    """Deterministic sites that are not one value a row: name -> plates left of the clients, None for a global one."""
    found: dict[str, int | None] = {}
    for name, site in trace.nodes.items():
        if is_deterministic(site) and not any(f.name == DATA for f in site["cond_indep_stack"]):
            found[name] = len(site["fn"].batch_shape) - 2 if in_clients(site) else None
    return found


def _params(singles: list[Any], pairs: list[Any]) -> tuple[ParamSpec, ...]:
    specs: dict[str, ParamSpec] = {}
    for single, pair in zip(singles, pairs, strict=True):
        for name, site in single.nodes.items():
            if site["type"] != "param":
                continue
            constraint = site["kwargs"].get("constraint", dist.constraints.real)
            start = transform_to(constraint).inv(site["value"].detach()).clone()
            before, after = site["value"].shape, pair.nodes[name]["value"].shape
            local = in_clients(site)
            differ = [d for d, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
            if len(differ) != int(local):
                where = "inside" if local else "outside"
                raise ProgramError(
                    f"param '{name}' is {where} the clients plate, but its shape is {tuple(before)} for one client and "
                    f"{tuple(after)} for two: "
                    + (
                        "give it one entry a client, (num_clients, 1, ...)"
                        if local
                        else "it must not depend on the clients"
                    )
                )
            if name in specs and specs[name].is_local != local:
                raise ProgramError(
                    f"param '{name}' is declared both inside and outside the clients plate: give them two names"
                )
            specs[name] = ParamSpec(
                name, local, constraint, start, differ[0] - len(before) if local else 0
            )
    return tuple(specs.values())


def _closed(model: Any, guide: Any) -> frozenset[str]:
    """Sites with a closed-form KL that holds: what comes before them in the model is drawn before them in the guide too."""
    order = {name: i for i, name in enumerate(guide.nodes)}
    before: list[str] = []
    closed = set()
    for name, site in model.nodes.items():
        if not is_latent(site):
            continue
        of = guide.nodes[name]["fn"]
        if not isinstance(of, dist.Delta) and all(order[b] < order[name] for b in before):
            try:
                kl_divergence(of, site["fn"])
                closed.add(name)
            except NotImplementedError:
                pass
        before.append(name)
    return frozenset(closed)


def _unkeyed(guide: Any) -> tuple[str, ...]:
    """Sites of a guide that no key can draw: clients are then run one at a time."""
    found = []
    for name, site in guide.nodes.items():
        if is_latent(site):
            try:
                draw(site["fn"], Noise(noise.root_key(0), axis=0))
            except NoKeyedDraw as error:
                if not site["fn"].has_rsample:
                    raise ProgramError(
                        f"site '{name}' of the guide is drawn from {error}, which has no reparameterised draw: no gradient passes it"
                    ) from error
                found.append(name)
    return tuple(found)
