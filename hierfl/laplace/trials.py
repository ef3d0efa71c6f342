"""Linear predictors eta = base + design w, found by trial at random points; not proven."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from pyro import poutine
from torch import Tensor

from hierfl.core.process import double_precision
from hierfl.data.batch import ClientBatch, in_double
from hierfl.laplace.links import all_linked, log_likelihoods, predictors, scores
from hierfl.program.handlers import Substitute, unchecked, untouched_store
from hierfl.program.program import Program
from hierfl.program.sites import Values
from hierfl.program.traces import Site, in_clients, is_factor, samples
from hierfl.program.wrapped import priors_alone

# Random points near 0 and far from it, TRIES of each, show a predictor that bends or is clamped.
SIZES, TRIES = (0.3, 2.0, 8.0), 3
# Raised where a program cannot be computed: general methods need no structure, and report it.
FAILS = (RuntimeError, ValueError, NotImplementedError, TypeError, AttributeError, IndexError)
# Shares of the distance of points, the first at which predictors are at most LARGEST: exp(1000) has
# no digits, and a column may be 1000.
NEARER, LARGEST = (1.0, 0.1, 0.01, 1e-3), 300.0
STEP = 2.0**-12  # along a scalar, by which slopes of predictors are read
MANY = 1 << 20  # codes of a field
SHOWN = 256  # codes of a field up to which made-up rows show all of them
Terms = Callable[[Tensor], Mapping[str, Site]]  # w (D,) -> the observed sites, by name


def perturbed(
    batch: ClientBatch,
    *,
    names_of_labels: frozenset[str],
    g: torch.Generator,
    codes: Mapping[str, tuple[int, int]] | None = None,
) -> ClientBatch:
    """Return a batch with perturbed features, integers and booleans redrawn to show all `codes`, and its own labels."""
    known = {} if codes is None else codes

    def moved(name: str, v: Tensor) -> Tensor:
        if name in names_of_labels:
            return v
        if v.dtype == torch.bool or name in known:
            low, high = known.get(name, (0, 1))
            count = high + 1 - low
            if count > MANY:  # a permutation would take memory for each
                return (low + torch.randint(count, v.shape, generator=g)).to(v.dtype)
            turns = [torch.randperm(count, generator=g) for _ in range(-(-v.numel() // count))]
            return (low + torch.cat(turns)[: v.numel()].view(v.shape)).to(v.dtype)
        if not v.is_floating_point():
            return v
        u = torch.rand(v.shape, generator=g, dtype=v.dtype)  # positive features stay positive
        largest = float(v.abs().max()) if v.numel() else 0.0  # a column may be in units of 1e6
        return v * (1.0 + 0.3 * u) + (0.1 * min(1.0, 10.0 * largest) if largest else 0.1) * u

    fields = {name: moved(name, v) for name, v in batch.fields.items()}
    return replace(batch, fields=fields, rows=None)


def first_row(batch: ClientBatch) -> ClientBatch:
    """Return a batch of each client's first row alone."""
    fields = {name: v[:, :1] for name, v in batch.fields.items()}
    return replace(batch, fields=fields, rows=None if batch.rows is None else batch.rows[:, :1])


def sites_at(program: Program, values: Values, batch: ClientBatch) -> dict[str, Site]:
    """Return the sample sites of the model on a batch, by name, with the values given."""
    with Substitute({}, batch):
        trace = poutine.trace(poutine.condition(program.model, data=values)).get_trace(batch)
    return dict(samples(trace))


def prior_sites_at(program: Program, values: Values, batch: ClientBatch) -> dict[str, Site]:
    """Return `sites_at` without what integrals over rows' sites add."""
    with priors_alone():
        return sites_at(program, values, batch)


def terms_at(program: Program, values: Values, batch: ClientBatch) -> dict[str, Site]:
    """Return what multiplies the priors of a client's sites, by name: the likelihood, and factors that read no rows."""
    sites = sites_at(program, values, batch)
    others = (name for name, site in sites.items() if is_factor(site) and in_clients(site))
    names = dict.fromkeys((*program.labels, *program.factors, *others))
    return {name: sites[name] for name in names}


def nearly_equal(value: Tensor, other: Tensor, *, exact: float = 1e-8) -> bool:
    """Return whether two tensors are equal up to rounding, relative and absolute."""
    return bool(torch.allclose(value, other, rtol=exact, atol=exact))


class Predictors(NamedTuple):
    """The linear predictors of all rows, site after site."""

    terms: Mapping[str, Site]  # the observed sites at w = 0
    base: Tensor  # (n,) predictors there
    design: Tensor  # (n, D)


def predictors_of(terms: Terms, size: int, dtype: torch.dtype | None = None) -> Predictors:
    """Return the linear predictors, read off at w = 0 and near it; size is D."""
    at_zero = terms(torch.zeros(size, dtype=dtype))
    base = predictors(at_zero)
    design = slopes_of(lambda w: predictors(terms(w)), base, size, dtype)
    return Predictors(at_zero, base, design)


def slopes_of(
    linear: Callable[[Tensor], Tensor], base: Tensor, size: int, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the slopes (n, D) of a linear function of w, whose value at 0 is `base` (n,).

    In double precision by steps so short that exp() of a predictor is a number where a column is 1e6.
    """
    eye = torch.eye(size, dtype=dtype)
    step = STEP if eye.dtype == torch.float64 else 1.0
    return ((torch.vmap(linear)(step * eye) - base) / step).mT


def is_linear(terms: Terms, w: Tensor, there: Mapping[str, Site] | None = None) -> bool:
    """Return whether each row's log likelihood at w (D,), where terms are `there`, is that at its linear predictor."""
    there = terms(w) if there is None else there
    if not all_linked(there):
        return False
    read, expected = predictors_of(terms, len(w)), log_likelihoods(there)
    at_linear = scores(read.terms, read.base + read.design @ w)
    return bool(expected.isfinite().all()) and nearly_equal(at_linear, expected)


def nearness(read: Callable[[float], Iterable[Tensor]]) -> float:
    """Return the share of the distance of all points at which no predictor is too large to compute with."""
    for share in NEARER:
        if all(float(eta.abs().max()) <= LARGEST for eta in read(share)):
            return share
    return 1.0


@contextmanager
def trial() -> Iterator[None]:
    """Evaluate programs in double precision, without gradients, checks and changes of params."""
    with untouched_store(), torch.no_grad(), unchecked(), double_precision():
        yield


def moved_rows(
    program: Program, g: torch.Generator, batch: ClientBatch | None = None
) -> ClientBatch:
    """Return rows, by default the prototype's, in double precision, perturbed, and repeated to show every code."""
    rows = in_double(program.prototype if batch is None else batch)
    labels = frozenset(program.labels.values())
    counts = (high + 1 - low for name, (low, high) in program.codes.items() if name not in labels)
    rows = repeated(rows, max((count for count in counts if count <= SHOWN), default=1))
    return perturbed(rows, names_of_labels=labels, g=g, codes=program.codes)


def repeated(batch: ClientBatch, least: int) -> ClientBatch:
    """Return a batch of at least so many rows, over and over again."""
    if batch.num_rows >= least:
        return batch
    index = torch.arange(least) % batch.num_rows
    fields = {name: v.index_select(1, index) for name, v in batch.fields.items()}
    return replace(batch, fields=fields, rows=None)


@torch.enable_grad()
def jacobian_of(function: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
    """Return the Jacobian (n, V) of a function at v (V,), by min(n, V) backward passes and one more.

    A program that loops over columns has hundreds of predictors, which read few scalars. The gradient of
    a weighted sum of predictors is linear in the weights: its own gradients are the columns.
    """
    v = v.detach().requires_grad_()
    value = function(v) + 0.0 * v.sum()
    if len(value) <= len(v):
        return torch.stack(_gradients(value, v))
    weights = torch.zeros_like(value, requires_grad=True)
    (along,) = torch.autograd.grad(value @ weights, v, create_graph=True)
    return torch.stack(_gradients(along, weights), -1)


def _gradients(values: Tensor, at: Tensor) -> list[Tensor]:
    return [
        torch.autograd.grad(value, at, retain_graph=True, materialize_grads=True)[0]
        for value in values
    ]
