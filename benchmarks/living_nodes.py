"""`Fit.without` and `Fit.updated` over nodes beside the same calls on one machine.

`python -m benchmarks.living --nodes [NAME ...]` runs it. Nodes are in this process, one a client, and
have the rows as frames. Where nodes of the others would have to be asked, what is said stands in
the table, and the others are not compared.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from torch import Tensor

import hierfl
from benchmarks.formula_problems import PROBLEMS

DRAWS = 1000  # of each client's own sites
POLICY = 'may_leave = ["draws"]\n'
COLUMNS = (
    *("problem", "what", "client", "bytes", "bytes over nodes", "nodes asked"),
    *("worst mean, global, sd", "sds, global", "worst mean, local, sd", "sds, local"),
)


class Apart(NamedTuple):
    """How far numbers over nodes are from those of one machine."""

    mean: float  # the largest difference of means, in posterior sds
    low: float  # the least and the largest ratio of sds
    high: float


@dataclass(frozen=True)
class Both:
    """One problem on one machine and over nodes, with the same seed.

    Args:
        name: of the problem (`benchmarks.formula_problems`).
        folder: of the nodes.
        seed: of the fits.
    """

    name: str
    folder: Path
    seed: int = 0

    @cached_property
    def model(self) -> hierfl.Formula:
        """The formula, with its schema."""
        return PROBLEMS[self.name].model(PROBLEMS[self.name].frame())

    @cached_property
    def frames(self) -> Mapping[str, pd.DataFrame]:
        """The clients' rows."""
        column = PROBLEMS[self.name].clients
        frame = PROBLEMS[self.name].frame().dropna(subset=[column])
        return {str(client).removesuffix(".0"): rows for client, rows in frame.groupby(column)}

    @cached_property
    def clients(self) -> tuple[str, str]:
        """The client with the most rows, and the median one."""
        names = sorted(self.frames, key=lambda name: len(self.frames[name]), reverse=True)
        return names[0], names[len(names) // 2]

    def some(self, out: str | None = None) -> dict[str, pd.DataFrame]:
        """Return the frames of all clients but one."""
        return {name: rows for name, rows in self.frames.items() if name != out}

    def fits(self, out: str | None = None) -> tuple[hierfl.Fit, hierfl.nodes.FitOverNodes]:
        """Return the fit of all clients but one on one machine, and that over nodes."""
        rows = self.some(out)
        data = self.model.data(pd.concat(rows.values()))
        here = hierfl.fit(self.model, data, seed=self.seed, progress=False)
        nodes = hierfl.nodes.in_process(rows, self.folder)
        return here, hierfl.nodes.fit(self.model, nodes, seed=self.seed)

    def changed(self, what: str) -> tuple[hierfl.Fit, hierfl.nodes.FitOverNodes, pd.DataFrame]:
        """Return both fits after a client leaves or joins, and the new rows of the history over nodes."""
        client = self.clients["largest" not in what]
        here, over = self.fits(client if "joins" in what else None)
        before = len(over.history)
        if "joins" in what:
            new = {client: self.frames[client]}
            one = here.updated(self.model.data(new[client]))
            found = over.updated(hierfl.nodes.in_process(new, self.folder))
        else:
            one, found = here.without(client), replace(over, ask=_nobody).without(client)
            found = replace(found, ask=over.ask)
        return one, found, found.history.iloc[before:]

    def line(self, what: str) -> list[str]:
        """Measure one change."""
        client = self.clients["largest" not in what]
        try:
            one, over, new = self.changed(what)
        except hierfl.AnotherRound as error:
            return [self.name, what, client, f"refused: {error}"]
        for name in over.clients:
            folder = hierfl.nodes.same_process.folder_of(self.folder, name)
            folder.joinpath("policy.toml").write_text(POLICY)
        both = [apart_globally(one, over), apart_locally(one, over)]
        sizes = [sum_of(of) for of in (one.history.iloc[-len(new) :], new)]
        asked = int(new.loc[new["bytes_up"] > 0, "clients"].max()) if sizes[1] else 0
        parts = [[f"{a.mean:.4f}", f"{a.low:.3f} to {a.high:.3f}"] for a in both]
        return [self.name, what, client, *map(str, sizes), str(asked), *parts[0], *parts[1]]


def sum_of(history: pd.DataFrame) -> int:
    """Return the bytes of rounds, both ways."""
    return int(history[["bytes_up", "bytes_down"]].to_numpy().sum())


def apart_globally(one: hierfl.Fit, over: hierfl.nodes.FitOverNodes) -> Apart:
    """Compare the server's draws of the global sites."""
    here, there = (fit.message["params"]["_shared.points"].double() for fit in (one, over))
    return apart(here, there)


def apart_locally(one: hierfl.Fit, over: hierfl.nodes.FitOverNodes) -> Apart:
    """Compare the nodes' draws of the clients' own sites."""
    answers = over.local_draws(DRAWS)
    own = one.draws(DRAWS).own
    each = []
    for name, sites in answers.given.items():
        k = one.clients.index(name)
        pairs = [(own[site][:, k], sites[site]) for site in own]
        each += [apart(*(v.double().reshape(DRAWS, -1) for v in pair)) for pair in pairs]
    if len(answers.given) < len(one.clients):
        raise RuntimeError(f"nodes have not answered: {answers.withheld}")
    means, lows, highs = zip(*each, strict=True)
    return Apart(max(means), min(lows), max(highs))


def apart(here: Tensor, there: Tensor) -> Apart:
    """Compare draws (S, K) with others."""
    moving = here.std(0) > 0.0
    here, there = here[:, moving], there[:, moving]
    sd = here.std(0)
    ratios = there.std(0) / sd
    off = ((here.mean(0) - there.mean(0)) / sd).abs().max()
    return Apart(float(off), float(ratios.min()), float(ratios.max()))


def lines(name: str, changes: tuple[str, ...], seed: int) -> Iterator[list[str]]:
    """Measure one problem."""
    for what in changes:
        with tempfile.TemporaryDirectory() as folder:
            yield Both(name, Path(folder), seed).line(what)


def _nobody(contents: Mapping[str, bytes]) -> Any:
    raise AssertionError(f"asked {sorted(contents)}")
