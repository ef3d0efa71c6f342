"""Checks of a program: its plates, sites, starting values and gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor
from torch.func import grad

from hierfl.core.trees import Tree, tree_map
from hierfl.core.user_warnings import warn
from hierfl.data.batch import CLIENTS, DATA, ClientBatch
from hierfl.program.failures import why_in_line
from hierfl.program.handlers import traces_of, unchecked, untouched_store
from hierfl.program.program import Params, Program, ProgramError, refuse_first
from hierfl.program.sites import Family, Latents
from hierfl.program.supports import kind_of
from hierfl.program.traces import (
    Site,
    in_clients,
    is_deterministic,
    is_latent,
    samples,
    scored,
)

Loss = Callable[[Params, ClientBatch], Tensor]
FAILS = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError, AssertionError)


def check_steps(program: Program, batch: ClientBatch) -> Program:
    """Take a gradient as local steps do, and find whether `torch.vmap` can carry clients."""
    shared, own = program.start()
    params, loss = {**shared, **own}, program.loss
    if not params:
        return program
    with untouched_store(), unchecked(), torch.no_grad():
        error = _error(_at_once, loss, params, batch) if program.keyed else None
        if program.keyed and error is None:
            return program
        if _error(_alone, loss, params, batch) is not None:
            raise ProgramError(
                f"{_at_fault(_alone, program, params, batch)} has no gradient by torch.func.grad, "
                "which every method takes: use another distribution, or torch functions in place "
                "of NumPy's (hierfl.diagnostics.nuts can sample a model whose gradients "
                "torch.autograd alone can take)"
            )
        if error is None:
            return program
        where = _at_fault(_at_once, program, params, batch)
        line = why_in_line(error)
        of_draws = _error(_draws_at_once, loss, params, batch) is not None
    warn(
        f"{where} cannot be computed for several clients at once (torch.vmap): clients run one at "
        f"a time{line and f', slowly; {line}'}",
    )
    line = line or f"at {where}, whose density torch.vmap does not carry: use another"
    return replace(program, mapped=False, unmapped_line=line if of_draws else "")


def _alone(loss: Loss, params: Params, batch: ClientBatch) -> None:
    grad(loss)(params, batch)


def _at_once(loss: Loss, params: Params, batch: ClientBatch) -> None:
    """Take autograd's gradient for two copies under vmap; torch.func.grad imports dynamo, a second."""

    def of_one(params: Params, fields: Tree) -> Tensor:
        return loss(params, replace(batch, **fields))

    fields: Tree = {"fields": dict(batch.fields), "client_fields": dict(batch.client_fields)}
    fields |= {"counts": batch.counts, "own_keys": batch.own_keys}
    if batch.rows is not None:
        fields["rows"] = batch.rows
    params, fields = tree_map(_twice, (params, fields))
    with torch.enable_grad():
        for leaf in params.values():
            leaf.requires_grad_()
        total = torch.vmap(of_one)(params, fields).sum()
        if total.requires_grad:
            torch.autograd.grad(total, list(params.values()), allow_unused=True)


def _draws_at_once(loss: Loss, params: Params, batch: ClientBatch) -> None:
    """Compute the loss of two values of the params under vmap, with the same rows."""
    torch.vmap(lambda values: loss(values, batch))(tree_map(_twice, params))


def _twice(value: Tensor) -> Tensor:
    return torch.stack([value, value]).detach()


def _error(
    how: Callable[..., None], loss: Loss, params: Params, batch: ClientBatch
) -> Exception | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about functions that it maps slowly
            how(loss, params, batch)
    except FAILS as error:
        return error
    return None


def _at_fault(
    how: Callable[..., None], program: Program, params: Params, batch: ClientBatch
) -> str:
    """Return in words the first site of the model that cannot be computed in this way."""
    reached = poutine.trace()

    def model(batch: ClientBatch) -> None:
        with reached:
            program.model(batch)

    def density(params: Params, batch: ClientBatch, name: str = "") -> Tensor:
        _, trace = traces_of(model, program.guide, params, batch, batch)
        site = dict(samples(trace)).get(name)
        return torch.zeros(()) if site is None else _density(site).sum()

    _, trace = traces_of(program.model, program.guide, params, batch, batch)
    nodes = dict(samples(trace))
    if _error(how, density, params, batch) is not None:  # the model itself fails, between two sites
        wrong = next((name for name in nodes if name not in reached.trace), None)
    else:
        fails = (n for n in nodes if _error(how, partial(density, name=n), params, batch))
        wrong = next(fails, None)
    if wrong is None:
        return "the guide"
    return f"site '{wrong}' ({kind_of(nodes[wrong]['fn'])}) of the model"


def faults_of_names(site: Site, batch: ClientBatch) -> Iterator[str]:
    """Say which plates are named as those of the batch, and are of another size, or take a subsample."""
    sizes = {CLIENTS: batch.num_clients, DATA: batch.num_rows}
    made = getattr(site["fn"], "size", None)  # of a plate's own site, as it is made
    if site["name"] in sizes and made not in (None, sizes[site["name"]]):
        yield _not_ours(site["name"], made)
    for frame in site["cond_indep_stack"]:
        ours = sizes.get(frame.name, frame.size)
        if getattr(frame, "full_size", None) not in (None, frame.size):
            yield (
                f"the plate '{frame.name}' takes a subsample: open batch.data(), and let the method "
                "use mini-batches of rows, hierfl.methods.fedsvi(model, batch_size=...)"
            )
        if ours != frame.size or (frame.name == CLIENTS and not frame.vectorized):
            yield _not_ours(frame.name, frame.size)


def _not_ours(name: str, size: Any) -> str:
    return (
        f"the plate '{name}', of {size}, is not the batch's own: open `with batch.{name}():` in place of "
        "pyro.plate, since a model is run on some of the clients, and on some of their rows"
    )


def faults_of_plates(name: str, site: Site, batch: ClientBatch) -> Iterator[str]:
    """Say whether a site is in the wrong plates, or of a shape that is not theirs."""
    plates: list[str] = []
    expected: list[int] = []
    for frame in site["cond_indep_stack"]:
        if frame.vectorized:
            plates.append(frame.name)
            expected = [1] * (-frame.dim - len(expected)) + expected
            expected[frame.dim] = frame.size
    shape = tuple(site["fn"].batch_shape)
    if DATA in plates and CLIENTS not in plates:
        yield (
            f"site '{name}' is in the data plate but not in the clients plate: open batch.data() "
            "inside batch.clients()"
        )
    is_factor = isinstance(site["fn"], dist.Unit)
    if site["is_observed"] and CLIENTS not in plates and not is_factor and len(shape) > 1:
        yield (
            f"site '{name}' is observed outside the clients plate: put it inside `with "
            "batch.clients():`"
        )
    if shape != tuple(expected):
        yield _wrong_shape(name, shape, tuple(expected), plates, batch, site["is_observed"])


def _wrong_shape(
    name: str,
    shape: tuple[int, ...],
    expected: tuple[int, ...],
    plates: list[str],
    batch: ClientBatch,
    observed: bool,
) -> str:
    clients = batch.num_clients
    if CLIENTS not in plates and len(shape) >= 2 and shape[-2] == clients > 1:
        return (
            f"site '{name}' is outside the clients plate, but its batch shape {shape} has a "
            "dimension of clients: it reads a local site; move it inside `with batch.clients():`"
        )
    if observed and plates == [CLIENTS] and shape == (clients, batch.num_rows):
        return (
            f"site '{name}' has batch shape {shape}, one value per row, outside the data plate: put "
            "it inside `with batch.data():`"
        )
    return (
        f"site '{name}' has batch shape {shape}; its plates ({', '.join(plates) or 'none'}) "
        f"require {expected}: declare its own dimensions with "
        f".to_event({_own_dimensions(shape, expected)}), or open a plate for them"
    )


def _own_dimensions(shape: tuple[int, ...], expected: tuple[int, ...]) -> int:
    """Return the number of dimensions at the right of a batch shape that no plate accounts for."""
    for k in range(1, len(shape) + 1):
        if shape[:-k] == expected:
            return k
    if len(shape) <= len(expected):  # the plates have broadcast it: what differs is its own
        pairs = zip(reversed(shape), reversed(expected), strict=False)
        return max((k for k, (own, plate) in enumerate(pairs, 1) if own != plate), default=1)
    fits = (k for k in range(1, len(shape) + 1) if all(n == 1 for n in shape[:-k]))
    return next(fits, len(shape) - len(expected))


def faults_of_kinds(model: Any, guide: Any) -> Iterator[str]:
    """Say whether a model is no function, or a guide neither a function nor a family."""
    if not callable(model) or isinstance(model, type):
        yield (
            f"the model is a {_kind(model)}: give a function of a batch, def model(batch), or one "
            "of hierfl.models"
        )
    if type(guide).__module__.startswith("pyro.infer.autoguide") or isinstance(guide, type):
        yield (
            f"the guide is {_kind(guide)}, which knows no clients: give a family of hierfl.guides, "
            "such as hierfl.guides.mean_field (docs/from_pyro.md lists what stands for Pyro's)"
        )
    if not isinstance(guide, Family) and not callable(guide):
        yield (
            f"the guide is a {_kind(guide)}: give a family such as hierfl.guides.mean_field, or a "
            "function of a batch"
        )


def _kind(thing: Any) -> str:
    if isinstance(thing, type):
        return f"the class {thing.__name__}"
    words = f" {thing!r}" if isinstance(thing, str) else ""
    return type(thing).__name__ + words


def faults_of_cover(latents: Latents, guide: Any) -> Iterator[str]:
    """Say which latent sites of a guide are not those of the model."""
    drawn = {name: node for name, node in guide.nodes.items() if is_latent(node)}
    for site in latents.sites:
        guided = drawn.pop(site.name, None)
        if guided is None:
            yield (
                f"site '{site.name}' is in the model but not in the guide: add it there, or use an "
                "automatic guide"
            )
            continue
        shape, expected = tuple(guided["value"].shape), tuple(site.start.shape)
        if shape != expected:
            yield f"site '{site.name}' has shape {shape} in the guide, {expected} in the model"
        if in_clients(guided) != site.is_local:
            inside, outside = ("model", "guide") if site.is_local else ("guide", "model")
            yield (
                f"site '{site.name}' is inside the clients plate in the {inside}, outside it in "
                f"the {outside}"
            )
    for name, guided in drawn.items():
        if not guided["infer"].get("is_auxiliary"):
            yield (
                f"site '{name}' is in the guide but not in the model: rename it, or mark it "
                "infer={'is_auxiliary': True}"
            )


def check_start(program: Program, batch: ClientBatch) -> None:
    """Refuse a program whose log density is not finite at the guide's starting values."""
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
                f"the log-density of the {what} is {value.flatten()[0].item()} where the guide "
                f"starts{_at_site(program, params, batch)}: check the scales there"
            )


def _at_site(program: Program, params: Params, batch: ClientBatch) -> str:
    """Return in words the first model site whose log density is not finite at the start."""
    _, trace = traces_of(program.model, program.guide, params, batch, batch)
    for name, site in samples(trace):
        if not bool(_density(site).isfinite().all()):
            return f", at site '{name}' ({kind_of(site['fn'])})"
    return ""


def _density(site: Site) -> Tensor:
    return scored(site, site["fn"].log_prob(site["value"]))


class Plates(Messenger):
    """Checks the plates of each site as it is sampled, before a later line fails on its shape."""

    def __init__(self, batch: ClientBatch) -> None:
        super().__init__()
        self.batch = batch
        self.own: dict[str, int] = {}  # plates that the program makes itself

    def _pyro_post_sample(self, msg: Site) -> None:
        refuse_first(faults_of_names(msg, self.batch))
        if isinstance(msg["fn"], _Subsample):
            if msg["name"] not in (CLIENTS, DATA):
                self.own[msg["name"]] = msg["fn"].size
        elif not msg["is_observed"] and not is_deterministic(msg):
            refuse_first(faults_of_plates(msg["name"], msg, self.batch))
