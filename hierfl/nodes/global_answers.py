"""What the server of a run over nodes says of the global sites by itself: their table, and in a line what was run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from hierfl.core.arguments import expect_count
from hierfl.core.intervals import check_prob, least_draws, percent
from hierfl.core.tables import Shown
from hierfl.core.trees import nbytes
from hierfl.diagnostics.formula_tables import Tables, formula_tables, titled
from hierfl.diagnostics.summary import Summary
from hierfl.diagnostics.verdict import of_history
from hierfl.engine.left_out import times_left_out
from hierfl.formulas.formula import Formula
from hierfl.posterior.draws import posterior_draws
from hierfl.posterior.site_table import COLUMNS, entries_of, in_right_digits, numbers_of
from hierfl.posterior.snapshot import global_sites
from hierfl.runs.result import Fit

UNKNOWN = "Whether to trust this fit is not known: the method does not tell."


def brief_over(fit: Any) -> Shown:
    """Return what a fit over nodes prints."""
    times = times_left_out(fit.progress.history)
    skipped = f"a client skipped {times} time{'s' * (times > 1)}, " if times else ""
    title = (
        f"FitOverNodes({fit.method.name}, {len(fit.clients)} clients, {fit.progress.round} rounds, "
        f"{skipped}{nbytes(fit.message)} bytes sent to a client)"
    )
    lines = [f"Chosen: {fit.chosen}."] if fit.chosen else []
    hint = "fit.summary() shows the global sites; fit.local_summary() asks nodes for their own."
    return Shown(title, note="\n".join((*lines, _judged(fit.here)[0], hint)))


def _judged(fit: Fit) -> tuple[str, bool | None]:
    known = of_history(fit)
    if known is not None:
        return known.words, known.trustworthy
    return fit.progress.verdict or UNKNOWN, None


def summary_over(fit: Any, prob: float, draws: int, seed: int) -> Summary:
    """Return the table of the global sites, in brms's order of a formula."""
    least = least_draws(check_prob(prob))
    if expect_count(draws, "draws") < least:
        raise ValueError(f"draws is {draws}: a {percent(prob)} interval needs {least} or more")
    server = fit.here
    sites = global_sites(server.program)
    found = posterior_draws(server, draws=draws, seed=seed, keep=sites).shared if sites else {}
    frames = []
    for name, value in found.items():
        columns: dict[str, Any] = {
            "site": name,
            "entry": entries_of(server, name, value.shape[1:]),
            "client": "",
            **dict(zip(COLUMNS[3:7], numbers_of(value, prob).reshape(4, -1), strict=True)),
            **dict.fromkeys(COLUMNS[7:], np.nan),
        }
        frames.append(pd.DataFrame(columns, columns=list(COLUMNS)))
    frame = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=list(COLUMNS))
    title = (
        f"{fit.method.name}: {len(fit.clients)} clients, {fit.progress.round} rounds, {draws} draws"
    )
    model = fit.method.model
    tables: Tables = ()
    if isinstance(model, Formula):
        title = f"{titled(model)}\n{title}"
        tables = formula_tables(model, in_right_digits(frame), fit.clients, prob)
    words, trustworthy = _judged(server)
    remarks = [f"Chosen: {fit.chosen}."] if fit.chosen else []
    remarks.append("Clients' own sites are at their nodes: fit.local_summary() asks for them.")
    return Summary(title, frame, words, trustworthy, tuple(remarks), tables, (), prob)
