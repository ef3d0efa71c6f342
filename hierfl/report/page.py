"""The page: measures a fit, writes sections and checks into one HTML file that needs no network."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
from jinja2 import Environment, StrictUndefined

from hierfl.core.arguments import expect_path
from hierfl.core.disk import replace_text
from hierfl.core.tables import Shown, printed
from hierfl.data.clients import ClientData
from hierfl.diagnostics.check import Check
from hierfl.diagnostics.checks import checks_of_fit
from hierfl.diagnostics.checks_of_predictions import checks_of_predictions
from hierfl.diagnostics.verdict import verdict
from hierfl.posterior.snapshot import Snapshot
from hierfl.report.measure import measure
from hierfl.report.pictures import Section
from hierfl.report.sections import sections

if TYPE_CHECKING:
    from hierfl.formulas.formula import Frames

MARK = b'<meta name="generator" content="hierfl'  # near the top of every report


def counted(checks: Sequence[Check]) -> str:
    """Count checks by verdict: "13 checks: 1 warning, 11 good, 1 not checked"."""
    of = Counter(check.verdict for check in checks)
    warned = f"{of['warning']} warning{'s' * (of['warning'] != 1)}"
    return f"{len(checks)} checks: {warned}, {of['good']} good, {of['not asked']} not checked"


@printed
@dataclass(frozen=True, eq=False)
class Report:
    """A report that was written.

    Args:
        path: of the HTML file.
        checks: every check, with its answer.
        trustworthy: whether the fit is, as `fit.summary()` says; None where it cannot be told.
    """

    path: Path
    checks: tuple[Check, ...]
    trustworthy: bool | None

    def __tables__(self) -> Shown:
        rows = [(c.question, c.verdict.replace("asked", "checked")) for c in self.checks]
        frame = pd.DataFrame(rows, columns=["question", "verdict"])
        title = f"Report in {self.path}. {counted(self.checks)}."
        return Shown(title, frame, "\n".join(self.warnings))

    @property
    def warnings(self) -> list[str]:
        """The answers of the checks whose verdict is "warning"."""
        return [check.answer for check in self.checks if check.verdict == "warning"]


def report(
    fit: Snapshot,
    path: str | Path = "report.html",
    *,
    held_out: "ClientData | Frames | None" = None,
    foreign: "ClientData | Frames | None" = None,
    local_only: Snapshot | None = None,
    site: str | None = None,
    title: str | None = None,
    draws: int = 400,
    seed: int = 0,
) -> Report:
    """Write one self-contained HTML page: what was run, posteriors, calibration and warnings.

    Args:
        fit: what is reported.
        path: of the file; an earlier report there is replaced.
        held_out: labeled rows of fitted clients to score; None: training rows, with a warning.
        foreign: out-of-distribution rows of the clients: are predictions less certain?
        local_only: a fit of the same local sites, in which clients share nothing, to compare.
        site: the observed site that is scored, as in `predict`.
        title: of the page.
        draws: S, of the posterior.
        seed: of the draws.

    Returns:
        The path, every question that was asked, and the warnings.

    Raises:
        KeyError: rows of a client that was not fitted.
        ValueError: a field is missing, held-out rows have no labels, or several sites are
            observed and `site` is None.
        FileExistsError: the file already exists, and is not a report of hierfl.
    """
    where = expect_path(path, "path", "report.html")
    _check_place(where)
    measured = measure(
        fit,
        held_out=None if held_out is None else fit._rows(held_out),
        foreign=None if foreign is None else fit._rows(foreign),
        local_only=local_only,
        site=site,
        draws=draws,
        seed=seed,
    )
    of_fit = checks_of_fit(measured.evidence)
    checks, judged = (*of_fit, *checks_of_predictions(measured.scored)), verdict(of_fit)
    names = fit.federation.data.num_clients
    text = page(
        title or f"{fit.method.name}: {names} clients",
        f"{fit.method.name}, {names} clients, {fit.federation.data.num_rows} training rows, "
        f"{len(fit.history)} round{'s' * (len(fit.history) != 1)}",
        judged.lead,
        sections(measured),
        checks,
    )
    replace_text(where, text)
    return Report(where, checks, judged.trustworthy)


def _check_place(where: Path) -> None:
    """Refuse a path where something other than a report stands, before anything is measured."""
    if where.exists() and not (where.is_file() and MARK in where.read_bytes()[:4000]):
        raise FileExistsError(
            f"'{where}' already exists, and is not a report of hierfl: name another path, or move that file"
        )


def page(
    title: str, subtitle: str, lead: str, content: list[Section], checks: Sequence[Check]
) -> str:
    """Return the page as HTML."""
    source = files("hierfl.report").joinpath("page.html").read_text(encoding="utf-8")
    now = datetime.now().astimezone()
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string(source).render(
        title=title,
        subtitle=subtitle,
        lead=lead,
        sections=content,
        checks=checks,
        warnings=[check for check in checks if check.verdict == "warning"],
        counted=counted(checks),
        version=version("hierfl"),
        footer=f"Written by hierfl {version('hierfl')} on {now:%Y-%m-%d %H:%M %Z}.",
    )
