"""Planning: federations drawn before there are data, and how an interval narrows with their size."""

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from pyro import poutine
from rich.console import Console
from rich.progress import track
from torch import Tensor

from hierfl.core.arguments import NoSuchName, expect_count, expect_integer, expect_kind, spelled
from hierfl.core.intervals import check_prob
from hierfl.core.process import one_at_a_time
from hierfl.core.tables import Shown, printed
from hierfl.data.batch import full_batch
from hierfl.diagnostics.simulated_data import drawn
from hierfl.engine.processes import crew
from hierfl.formulas.formula import Formula
from hierfl.guides import delta
from hierfl.posterior.site_table import entries_of
from hierfl.program.read import read
from hierfl.program.sites import Values
from hierfl.runs.fit import fit as run_fit
from hierfl.runs.result import Fit

Column = Sequence[Any] | Callable[[np.random.Generator, int], Any]
Columns = Mapping[str, Column]
DRAWN = {"trials"}  # additions to a response that can be drawn
DRAWS = 1000  # of each posterior, whose quantiles are the interval


class Simulated(NamedTuple):
    """A federation that was drawn: client -> its frame, and site -> its value, local ones (N, ...)."""

    frames: dict[str, pd.DataFrame]
    truth: Values


@spelled
@one_at_a_time
def simulate(
    model: Formula | Fit,
    columns: Columns,
    *,
    clients: int = 8,
    rows: int | Sequence[int] = 50,
    count: int = 1,
    seed: int = 0,
) -> list[Simulated]:
    """Draw federations from the prior of a formula, or from the posterior of a fit of it.

    A formula without a schema gets one from the columns drawn. Its default priors are in units of
    the response, whose sd is taken as 1 unless `columns` has the response.

    Args:
        model: a `hierfl.formula`, to draw global sites from their priors; or a fit of one, to draw
            them from its posterior. Either way, the clients are new.
        columns: for each column that the formula reads, values to draw from with replacement (the
            levels of a category, or a pilot's numbers); or a function of a NumPy generator and a
            number of rows that draws them.
        clients: number of clients.
        rows: number of rows of every client, or one number for each client.
        count: number of federations; all have the same columns.
        seed: of the draws.

    Raises:
        TypeError: `model` is neither; or `rows` are not integers.
        KeyError: `columns` lacks one that the formula reads.
        ValueError: the response is in words, censored or weighted; or there are not as many numbers
            of rows as clients.
    """
    formula = _formula_of(model)
    expect_count(count, "count")
    expect_integer(seed, "seed")
    frames = _columns(formula, columns, _sizes(clients, rows), seed)
    formula = formula.on(frames)
    data = formula.data(frames)
    program = read(formula, delta, data, seed=seed)
    (field,) = program.labels.values()
    batch = full_batch(data, torch.arange(data.num_clients), seed=seed)
    federations = []
    for number, values_of_sites in enumerate(_global_values(model, count, seed)):
        with poutine.condition(data=values_of_sites) if values_of_sites else nullcontext():
            values, labels = drawn(program, batch, count=1, seed=seed + 7919 * number)
        response = labels[field][0]
        drawn_frames = {}
        for own, (name, frame) in zip(response, frames.items(), strict=True):
            labeled = {formula.declared.parts.response: own[: len(frame)].numpy()}
            drawn_frames[name] = frame.assign(**labeled)
        truth = {name: value[0] for name, value in values.items()}
        federations.append(Simulated(drawn_frames, truth))
    return federations


def _formula_of(model: Any) -> Formula:
    made: Any = model.method.model if isinstance(model, Fit) else model
    expect_kind(made, Formula, "model", "give a hierfl.formula, or a fit of one")
    for reason in _why_not(made):
        raise ValueError(reason)
    return made


def _why_not(formula: Formula) -> Iterator[str]:
    """Yield why a response cannot be drawn, each with what to do."""
    if formula.declared.family.bounds is not None:
        yield "a response with trunc() cannot be drawn: leave trunc() out"
    for name in formula.declared.imputed:
        yield f"a drawn row has '{name}': simulate the formula with '{name}' in place of mi()"
    if formula.declared.family.kind in ("category", "ordered", "counts", "shares"):
        yield "a response of words or of several columns cannot be drawn: give its program"
    for addition in sorted(formula.declared.parts.additions.keys() - DRAWN):
        yield f"the response has {addition}(), and a drawn response has not: leave it out"


def _sizes(clients: int, rows: int | Sequence[int]) -> list[int]:
    expect_count(clients, "clients")
    sizes = [rows] * clients if isinstance(rows, int | np.integer | str) else list(rows)
    if len(sizes) != clients:
        raise ValueError(f"rows has {len(sizes)} numbers, and there are {clients} clients")
    return [expect_count(size, "rows") for size in sizes]


def _columns(
    formula: Formula, columns: Columns, sizes: Sequence[int], seed: int
) -> dict[str, pd.DataFrame]:
    """Draw the columns of each client; the response is a placeholder."""
    response = formula.declared.parts.response
    own: dict[str, Column] = {response: _placeholder(formula), **columns}
    read = {name for name in formula.declared.columns if name != formula.clients}
    if lacks := sorted(read - own.keys()):
        raise NoSuchName(f"columns lacks '{lacks[0]}', which the formula reads")
    frames = {}
    for k, size in enumerate(sizes):
        g = np.random.Generator(np.random.Philox(key=[seed & 0xFFFFFFFF, k]))
        drawn_ = {
            name: of(g, size) if callable(of) else g.choice(np.asarray(of), size)
            for name, of in own.items()
        }
        name = f"client {k + 1:0{len(str(len(sizes)))}}"
        frames[name] = pd.DataFrame(drawn_).assign(**{formula.clients: name})
    return frames


def _placeholder(formula: Formula) -> Column:
    """Return responses of the family's kind, by which a schema can be agreed on."""
    kind = formula.declared.family.kind
    if kind == "real":
        return lambda g, n: g.standard_normal(n)
    if kind in ("binary", "count"):
        return lambda g, n: np.arange(n) % 2
    return lambda g, n: g.uniform(0.25, 0.75, n)


def _global_values(model: Formula | Fit, count: int, seed: int) -> Iterator[Values]:
    """Yield what the global sites of each federation are; nothing: they are drawn from the prior."""
    if not isinstance(model, Fit):
        yield from ({} for _ in range(count))
        return
    shared = model.draws(count, seed=seed).shared
    names = [site.name for site in model.program.latents.global_block.sites]
    for number in range(count):
        yield {name: shared[name][number] for name in names}


# ------------------------------------------------------------------------------------ precision
@printed
@dataclass(frozen=True, eq=False)
class Precision:
    """How wide an interval is, by the size of a federation.

    Args:
        table: by `clients` and `rows`: the `width` of the interval, median over replications, with
            quartiles `low` and `high`; `covered`, the share of intervals that hold the true value;
            `excludes_zero`, the share that do not hold 0.
        parameter: its name.
        prob: of the interval.
    """

    table: pd.DataFrame
    parameter: str
    prob: float

    def __tables__(self) -> Shown:
        note = "Medians over replications; low and high are their quartiles."
        title = f"Width of the {self.prob:.0%} interval of {self.parameter}"
        return Shown(title, self.table.reset_index(), note)


@spelled
def precision(
    model: Formula | Fit,
    columns: Columns,
    parameter: str,
    *,
    clients: Sequence[int] = (4, 8, 16),
    rows: Sequence[int] = (20, 50),
    replications: int = 20,
    prob: float = 0.95,
    workers: int = 2,
    progress: bool | None = None,
    seed: int = 0,
) -> Precision:
    """Say how the width of an interval falls with more clients, and with more rows per client.

    Federations of each size are drawn (`simulate`) and fitted. The k-th federation of every size
    has the same true values, so that sizes can be compared.

    Args:
        model: as for `simulate`.
        columns: as for `simulate`.
        parameter: an entry of a global site, such as "sd_hospital" or "b[age]", as in
            `hierfl.diagnostics.sensitivity`.
        clients: numbers of clients.
        rows: numbers of rows of each client.
        replications: federations of each size.
        prob: of the interval.
        workers: processes, one core each (on Linux; elsewhere 1).
        progress: show a progress bar; None: where standard error is a terminal.
        seed: of the draws.

    Raises:
        KeyError: there is no such parameter; the message names the parameters.
        ValueError: as `simulate`; or `prob` is not between 0 and 1.
    """
    check_prob(prob)
    sizes = list(product(clients, rows))
    items = [
        _Item(size, _formula_of(model), federation, parameter, prob)
        for size in sizes
        for federation in simulate(
            model, columns, clients=size[0], rows=size[1], count=replications, seed=seed
        )
    ]
    intervals: list[tuple[float, bool, bool]] = []
    show = sys.stderr.isatty() if progress is None else progress
    with crew(_interval, expect_count(workers, "workers")) as run_all:
        console = Console(force_jupyter=False, stderr=True)
        fits = track(run_all(items), "fits", len(items), console=console, disable=not show)
        intervals.extend(fits)
    table = pd.DataFrame(intervals, columns=["width", "covered", "excludes_zero"])
    table["clients"], table["rows"] = np.array([item.size for item in items]).T
    grouped = table.groupby(["clients", "rows"])
    low, middle, high = (grouped["width"].quantile(q) for q in (0.25, 0.5, 0.75))
    shares = grouped[["covered", "excludes_zero"]].mean()
    widths = pd.DataFrame({"width": middle, "low": low, "high": high})
    return Precision(widths.join(shares), parameter, prob)


class _Item(NamedTuple):
    size: tuple[int, int]
    formula: Formula
    data: Simulated
    parameter: str
    prob: float


def _interval(item: _Item) -> tuple[float, bool, bool]:
    """Fit a federation: the width of an interval, and whether it holds the truth, and not 0."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of single fits: coverage says what they are worth
        fitted = run_fit(item.formula, item.data.frames, progress=False)
    site, place = _place(fitted, item.parameter)
    values = fitted.draws(DRAWS).shared[site].reshape(DRAWS, -1)[:, place].double()
    truth = float(item.data.truth[site].reshape(-1)[place])
    tails = torch.tensor([0.5 - item.prob / 2.0, 0.5 + item.prob / 2.0], dtype=torch.float64)
    low, high = values.quantile(tails).tolist()
    return high - low, low <= truth <= high, not low <= 0.0 <= high


def _place(fit: Fit, parameter: str) -> tuple[str, int]:
    names = {}
    for site in fit.program.latents.global_block.sites:
        shape: Tensor = fit.draws(1).shared[site.name]
        for k, entry in enumerate(entries_of(fit, site.name, shape.shape[1:])):
            names[f"{site.name}[{entry}]" if entry else site.name] = site.name, k
    if parameter not in names:
        what = f"there is no parameter '{parameter}'"
        raise NoSuchName(f"{what}: the parameters are {', '.join(names)}")
    return names[parameter]
