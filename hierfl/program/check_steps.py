"""The check that gradients of a program can be taken, for several clients at once or for one at a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.func import grad

from hierfl.core.trees import Tree, tree_map
from hierfl.data.batch import ClientBatch
from hierfl.program.check_distributions import kind_of
from hierfl.program.handlers import unchecked, untouched_store
from hierfl.program.program import Params, Program, ProgramError
from hierfl.program.terms import traces_of
from hierfl.program.traces import Site, samples, scored

Loss = Callable[[Params, ClientBatch], Tensor]


def check_steps(program: Program, batch: ClientBatch) -> Program:
    """Take a gradient as the clients' steps do, and say whether `torch.vmap` can carry several clients.

    Args:
        program: to check.
        batch: a few rows of one client.

    Returns:
        The program, with `mapped` set. Where it is false a warning names the site.

    Raises:
        ProgramError: no gradient can be taken; the message names the site.
    """
    shared, own = program.start()
    params = {**shared, **own}
    if not params:
        return program

    def loss(params: Params, batch: ClientBatch) -> Tensor:
        return program.terms(params, batch).loss(program.share).sum()

    with untouched_store(), unchecked(), torch.no_grad():
        if program.keyed and _works(_at_once, loss, params, batch):
            return program
        if not _works(_alone, loss, params, batch):
            raise ProgramError(
                f"{_at_fault(_alone, program, params, batch)} has no gradient by torch.func.grad, which every "
                f"method takes: use another distribution, or torch functions in place of NumPy's "
                f"(hierfl.diagnostics.nuts can sample a model whose gradients torch.autograd alone can take)"
            )
        if not program.keyed:
            return program
        where = _at_fault(_at_once, program, params, batch)
    warnings.warn(
        f"{where} cannot be computed for several clients at once (torch.vmap): clients run one at a time",
        stacklevel=4,
    )
    return replace(program, mapped=False)


def _alone(loss: Loss, params: Params, batch: ClientBatch) -> None:
    grad(loss)(params, batch)


def _at_once(loss: Loss, params: Params, batch: ClientBatch) -> None:
    """Take the gradient for two copies of the client under `torch.vmap`."""

    def of_one(params: Params, fields: Tree) -> Params:
        return grad(loss)(params, replace(batch, **fields))

    fields = {
        "fields": dict(batch.fields),
        "client_fields": dict(batch.client_fields),
        "counts": batch.counts,
        "own_keys": batch.own_keys,
        **({} if batch.rows is None else {"rows": batch.rows}),
    }
    twice = tree_map(lambda v: torch.stack([v, v]), (params, fields))
    torch.vmap(of_one)(*twice)


def _works(how: Callable[..., None], loss: Loss, params: Params, batch: ClientBatch) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about functions that it maps slowly
            how(loss, params, batch)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError, AssertionError):
        return False
    return True


class _Reached(Messenger):
    """Collects the names of the sites that a run passes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def _pyro_post_sample(self, msg: Site) -> None:
        self.names.add(msg["name"])


def _at_fault(
    how: Callable[..., None], program: Program, params: Params, batch: ClientBatch
) -> str:
    """Return in words the first site of the model that cannot be computed in this way."""
    reached = _Reached()

    def model(batch: ClientBatch) -> None:
        with reached:
            program.model(batch)

    def density(params: Params, batch: ClientBatch, *names: str) -> Tensor:
        _, trace = traces_of(model, program.guide, params, batch, batch)
        terms = (scored(s, s["fn"].log_prob(s["value"])) for n, s in samples(trace) if n in names)
        return sum((term.sum() for term in terms), torch.zeros(()))

    _, trace = traces_of(program.model, program.guide, params, batch, batch)
    nodes = dict(samples(trace))
    if not _works(how, density, params, batch):  # the model itself fails, between two sites
        wrong = next((name for name in nodes if name not in reached.names), None)
    else:
        fails = (n for n in nodes if not _works(how, _of_site(density, n), params, batch))
        wrong = next(fails, None)
    if wrong is None:
        return "the guide"
    return f"site '{wrong}' ({kind_of(nodes[wrong]['fn'])}) of the model"


def _of_site(density: Callable[..., Tensor], name: str) -> Loss:
    """Return the density of one site as a loss."""
    return lambda params, batch: density(params, batch, name)
