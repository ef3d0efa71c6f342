"""What depends on the latent sites of a program's rows, and how many nodes their integrals need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor

from hierfl.data.batch import ClientBatch
from hierfl.program.handlers import untouched_store
from hierfl.program.program import ProgramError, refuse_first
from hierfl.program.row_runs import RowTerm, Structure, log_prob_of
from hierfl.program.row_sites import Integrating, RowSites
from hierfl.program.row_steps import steps_of
from hierfl.program.sites import Model, Values
from hierfl.program.supports import check_support
from hierfl.program.traces import (
    Center,
    Site,
    center,
    connected,
    has_mean,
    in_data,
    is_deterministic,
    is_enumerable,
    is_latent,
    samples,
)

# sites that share a row's, beyond which they are one term: each distribution takes an integral
MOST_TERMS = 4
# draws of a row's sites at which the program is compared with itself
TRIALS = 4
LINKED = (
    "so that rows are linked, and no integral of one row is theirs: sample one vector of the client, "
    "of T entries, in batch.clients() and outside batch.data(), curve = pyro.sample(name, "
    "fn.expand([T]).to_event(1)), and let each row pick its entry, (curve * "
    "torch.nn.functional.one_hot(batch.{field}, T)).sum(-1), of whole numbers {field} from 0; or, if "
    "it is Gaussian given the other sites, sum it out by batch.joint_normal (docs/recipes_series.md)"
)


class LabelGivenRow(ProgramError):
    """A discrete site that depends on a site of its row: it is summed out before that is integrated."""


class Fixed(Messenger):
    """Sets latent sites to given values, discrete ones to a label in turn, all others to their centers."""

    def __init__(self, values: Mapping[str, Tensor], label: int = 0) -> None:
        super().__init__()
        self.values, self.label, self.labels = values, label, 1  # most of a discrete site

    def _pyro_sample(self, msg: Site) -> None:
        if not is_latent(msg) or msg["done"]:
            return
        value = self.values.get(msg["name"])
        if value is None and is_enumerable(msg):
            support = msg["fn"].enumerate_support(expand=True)
            value = support[self.label % len(support)]
            self.labels = max(self.labels, len(support))
        elif value is None and in_data(msg):
            value = _first(msg["fn"])
        if value is not None:
            msg["value"], msg["done"] = value, True


def _first(fn: Any) -> Tensor:
    """Return the center of a distribution, or of a discrete one a draw."""
    return fn.sample() if getattr(fn.support, "is_discrete", False) else center(fn)


@contextmanager
def unchecked_runs() -> Iterator[None]:
    """Run a program without checks, and restore the param store and the generator."""
    with untouched_store(), torch.no_grad(), pyro.validation_enabled(False):
        torch.manual_seed(0)  # the generator is restored afterwards
        yield


@dataclass
class _Runs:
    """A program at the centers of its sites, and at other values of one of them."""

    model: Model
    batch: ClientBatch

    def __post_init__(self) -> None:
        self.nodes = self.at({})
        self.values: Values = {n: s["value"] for n, s in self.nodes.items() if is_latent(s)}
        self.rows = [n for n, s in self.nodes.items() if is_latent(s) and in_data(s)]

    def at(self, values: Mapping[str, Tensor]) -> dict[str, Site]:
        """Return the sample sites of the program, latent ones at given values."""
        with Center(), Fixed(values):
            trace = poutine.trace(self.model).get_trace(self.batch)
        return dict(samples(trace))

    def others(self, name: str, row: int | None = None) -> Iterator[dict[str, Site]]:
        """Yield sites at draws of one site from its prior, in all rows or in one of them."""
        value, fn = self.values[name], self.nodes[name]["fn"]
        for _ in range(TRIALS):
            other = fn.sample()
            if row is not None:
                inside = torch.arange(self.batch.num_rows) == row
                inside = inside.reshape(-1, *[1] * len(fn.event_shape))
                other = torch.where(inside, other, value)
            yield self.at({**self.values, name: other})

    def slopes(self, name: str) -> set[str]:
        """Return the sites whose recorded graph has a site in it."""
        value = self.values[name]
        if not value.is_floating_point():
            return set()
        marked = value.detach().clone().requires_grad_()
        with torch.enable_grad():
            nodes = self.at({**self.values, name: marked})
            return {n for n, s in nodes.items() if n != name and _measure(s, n).requires_grad}

    def reads(self, name: str) -> set[str]:
        """Return the sites that depend on a site: by the recorded graph, or by their values."""
        names = self.slopes(name)
        for nodes in self.others(name):
            names |= {n for n, s in nodes.items() if n != name and self.differ(n, s)}
        return names

    def differ(self, name: str, site: Site) -> bool:
        """Return whether a site differs from what it is at the centers."""
        return not torch.equal(_measure(site, name), _measure(self.nodes[name], name))

    def linked(self, name: str, reads: set[str]) -> str | None:
        """Return a site of other rows, or of the client, that depends on one row's site."""
        last = self.batch.num_rows - 1
        for other in reads:
            if not in_data(self.nodes[other]):
                return other
        for row in {0, last}:
            for nodes in self.others(name, row):
                for other in reads:
                    if is_deterministic(nodes[other]):
                        continue
                    away = _measure(nodes[other], other) != _measure(self.nodes[other], other)
                    away[..., row] = False
                    if bool(away.any()):
                        return other
        return None


def _measure(site: Site, name: str) -> Tensor:
    """Return the log density of a site's value, or the value of a computed one."""
    if is_deterministic(site):
        return torch.as_tensor(site["value"])
    return torch.as_tensor(log_prob_of(site["fn"], torch.as_tensor(site["value"])))


def _linked(batch: ClientBatch) -> str:
    """Return what to write where rows are linked, with a field of integers of these rows."""
    whole = [n for n, v in batch.fields.items() if v.dtype == torch.int64 and v.dim() == 2]
    return LINKED.format(field=whole[0] if whole else "time")


def structure_of(model: Model, batch: ClientBatch) -> Structure | None:
    """Return what depends on the latent sites of a program's rows; None without such sites.

    Args:
        model: the program.
        batch: rows of some clients, more than two.

    Raises:
        ProgramError: a site of other rows, or of clients, depends on that of a row.
    """
    with unchecked_runs():
        runs = _Runs(model, batch)
        rows = [name for name in runs.rows if not is_enumerable(runs.nodes[name])]
        if not rows:
            return None
        reads = {name: runs.reads(name) for name in rows}
        for name, depending in reads.items():
            if (linked := runs.linked(name, depending)) is not None:
                raise ProgramError(
                    f"site '{linked}' depends on the site '{name}' of other rows, {_linked(batch)}"
                )
        return _grouped(runs, rows, reads)


def _grouped(runs: _Runs, rows: Sequence[str], reads: Mapping[str, set[str]]) -> Structure:
    """Group the sites of rows with what depends on them."""
    order = list(runs.nodes)
    computed = {name for of in reads.values() for name in of if is_deterministic(runs.nodes[name])}
    wholes = {name: {name, *reads[name]} - computed for name in rows}
    terms: dict[str, RowTerm] = {}
    joined: dict[str, frozenset[str]] = {}
    sites: set[str] = set()
    for _, group in connected(wholes):
        inside = sorted(group, key=order.index)
        before: tuple[str, ...] = ()
        own = [name for name in inside if name in rows]
        for name in inside:
            if name not in rows:
                refuse_first(_faults(runs, name, own))
                earlier = tuple(n for n in own if order.index(n) < order.index(name))
                terms[name] = RowTerm(name, earlier, before)
                before = (*before, name)
                sites |= {*earlier}
        if len(before) > MOST_TERMS and all(_is_counted_once(runs, name) for name in before):
            joined[before[-1]] = frozenset(before)
    for name in rows:
        if name in sites:
            check_support(runs.nodes[name], integrates=True)
        else:
            refuse_first(_faults_unread(runs, name))
    hidden = ({*rows} - sites) | computed
    by_mean = {name: has_mean(runs.nodes[name]["fn"]) for name in rows}
    read = tuple(n for n in rows if n in sites)
    structure = Structure(read, frozenset(hidden), terms, by_mean, joined)
    stepped = {name: _stepped(runs, structure, term, reads) for name, term in terms.items()}
    return replace(structure, terms=stepped)


def _is_counted_once(runs: _Runs, name: str) -> bool:
    """Return whether no `poutine.scale` counts a site otherwise than its plates do."""
    scale = torch.as_tensor(runs.nodes[name]["scale"])
    return bool((scale == runs.batch.row_scale).all())


def _stepped(
    runs: _Runs, structure: Structure, term: RowTerm, reads: Mapping[str, set[str]]
) -> RowTerm:
    """Return a term with its comparisons, if it has no slope in a site; these must be linear in it."""
    flat = [n for n in term.sites if term.name in reads[n] and term.name not in runs.slopes(n)]
    if not flat:
        return term
    alone = len(term.sites) == 1 and not term.before and not runs.nodes[flat[0]]["fn"].event_shape
    rows = RowSites(runs.model, runs.batch, structure)
    with Center(), Fixed({}), Integrating(rows):
        poutine.trace(runs.model).get_trace(runs.batch)
    steps = steps_of(rows, term, runs.values[flat[0]]) if alone else ()
    if not steps:
        raise ProgramError(
            f"site '{term.name}' depends on the site '{flat[0]}' of a row in steps: they are summed "
            "out where it has one number, no other observed site depends on it, and it is compared "
            "as it is, (e > cut); write the probabilities of the steps as the distribution of "
            f"'{term.name}' instead"
        )
    return term._replace(steps=steps)


def _faults_unread(runs: _Runs, name: str) -> Iterator[str]:
    """Say what is wrong with a site on which nothing depends, but that of `obs_mask=`."""
    stem = name.removesuffix("_unobserved")
    if stem == name or f"{stem}_observed" not in runs.nodes:
        fields = ", ".join(f"batch.{field}" for field in runs.batch.fields)
        yield (
            f"site '{name}' is latent in the data plate, and no observed site depends on it: observe "
            f"it, obs= one of {fields}, or leave it out (fit.predict and fit.replicate draw new rows)"
        )


def _faults(runs: _Runs, name: str, sites: Sequence[str]) -> Iterator[str]:
    """Say whether a term is latent, or in other plates than the sites that it depends on."""
    site = runs.nodes[name]
    if is_enumerable(site):
        raise LabelGivenRow(f"site '{name}' is discrete, and depends on the site '{sites[0]}'")
    if is_latent(site):
        yield (
            f"site '{name}' is latent, and depends on the site '{sites[0]}' of a row, "
            f"{_linked(runs.batch)}"
        )
    plates = {frame.name for frame in site["cond_indep_stack"]}
    for row in sites:
        if {frame.name for frame in runs.nodes[row]["cond_indep_stack"]} != plates:
            yield (
                f"site '{name}' depends on the site '{row}' of a row, which lies in other plates: "
                f"make it one site, with the values of the row as its event, .to_event(1)"
            )
