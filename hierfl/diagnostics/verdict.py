"""Whether to trust a fit: one verdict over its checks, and their evidence."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from hierfl.data.absent import RowsNotSaved
from hierfl.diagnostics.check import Check
from hierfl.diagnostics.checks import CONVERGED, Evidence, checks_of_run
from hierfl.diagnostics.checks_of_rounds import clients_of_rounds
from hierfl.diagnostics.convergence import Convergence, convergence, judged_by_history
from hierfl.diagnostics.entries import entries_of_clients
from hierfl.diagnostics.local_draws import local_draws
from hierfl.diagnostics.symmetries import NO_SYMMETRY, symmetries
from hierfl.posterior.corrected import own_k_hat
from hierfl.posterior.draws import Draws, posterior_draws
from hierfl.posterior.new_clients import expected_of_clients
from hierfl.posterior.shrinkage import in_prior_units
from hierfl.posterior.site_table import SiteTable
from hierfl.posterior.snapshot import Snapshot, lacks_rows
from hierfl.program.program import ProgramError
from hierfl.program.sites import Values

WORK = 1e8  # rows x unknowns above which the gradient at the end, then slow, is not estimated
NUMBERS = 20_000_000  # most scalars that draws may hold together: 160 MB
LEAST_DRAWS = 50  # fewer draws do not describe a posterior
NOT_FINITE = "draws are not finite"
FEW = 8  # entries of a site whose posterior covariance so many draws can tell
DRAWS = 400  # most draws by which rows' information is measured


class Verdict(NamedTuple):
    """Whether to trust a fit, None where that cannot be told; the same as a sentence; why, with the fix."""

    trustworthy: bool | None
    lead: str
    reasons: str

    @property
    def words(self) -> str:
        """All of it."""
        return f"{self.lead} {self.reasons}".rstrip()


def verdict(checks: Sequence[Check]) -> Verdict:
    """Judge a fit by its checks: one fatal warning is enough not to trust it; notes stand below."""
    warned = [check for check in checks if check.verdict == "warning"]
    fatal = [check for check in warned if check.severity == "fatal"]
    doubts = [c for c in checks if c.verdict != "good" and c.severity == "doubt"]
    good = [c for c in checks if c.question == CONVERGED and c.verdict == "good"]
    trustworthy: bool | None = True
    lead, reasons = "Trustworthy", good
    if fatal:
        trustworthy, lead, reasons = False, "Not trustworthy", fatal
    elif doubts:
        trustworthy, reasons = None, [*good, *doubts]
        lead = "Check before you trust it" if good else "Whether to trust this fit is not known"
    why = " ".join(check.answer for check in reasons)
    others = [check.answer for check in [*doubts, *warned] if check not in reasons]
    lines = [why, *(f"Note: {answer}" for answer in dict.fromkeys(others))]
    return Verdict(trustworthy, f"{lead}.", "\n".join(lines))


def of_history(fit: Snapshot) -> Verdict | None:
    """Return what the history alone tells, which costs nothing; None where it tells nothing."""
    checks = list(clients_of_rounds(fit))
    if judged_by_history(fit):
        checks += checks_of_run(fit, convergence(fit))
    elif not any(check.verdict == "warning" and check.severity == "fatal" for check in checks):
        return None
    return verdict(checks)


def draws_of_rows(fit: Snapshot, draws: int) -> int:
    """Return how many of the draws measure what clients' rows tell; 0 where too few can be held."""
    latents = fit.program.latents
    size = latents.global_block.size + len(fit.clients) * latents.local_block.size
    few = min(draws, DRAWS, NUMBERS // max(size, 1))
    return 0 if few < LEAST_DRAWS or lacks_rows(fit) else few


def evidence(fit: Snapshot, table: SiteTable, *, draws: int, seed: int = 0) -> Evidence:
    """Measure what the checks of a fit rest on; 400 draws suffice for what clients' rows tell."""
    derived, few = fit.program.derived, draws_of_rows(fit, draws)
    drawn, rows_say = None, None
    if few and not table.not_finite:
        drawn = table.first or posterior_draws(fit, draws=few, seed=seed)
        expected = expected_of(fit, drawn, seed)
        rows_say = None if expected is None else information(fit, drawn, expected)
    points = tuple(site for site in table.points if site not in derived)
    spread = any(site not in derived for site in table.spread)
    bad = table.not_finite
    return evidence_of(fit, drawn, points, rows_say, spread=spread, bad=bad, seed=seed)


def evidence_of(
    fit: Snapshot,
    drawn: Draws | None,
    points: tuple[str, ...] | None,
    rows_say: pd.DataFrame | None,
    *,
    spread: bool,
    bad: tuple[str, ...],
    seed: int,
) -> Evidence:
    """Judge the run, and complete the evidence; `bad` sites have draws that are not finite."""
    run = NOT_FINITE if bad else run_of(fit, seed)
    converged = isinstance(run, Convergence) and run.converged
    own = local_draws(fit, seed) if converged else None
    entries = entries_of_clients(fit, drawn) if converged and drawn and not bad else None
    k_hats = k_hats_of(fit, run, seed) if own is None else own.k_hats
    mirrored = symmetries(fit, drawn) if drawn and not bad and not lacks_rows(fit) else NO_SYMMETRY
    return Evidence(fit, run, points, spread, bad, rows_say, k_hats, mirrored, own, entries)


def run_of(fit: Snapshot, seed: int) -> Convergence | str:
    """Judge a run by `convergence`, without the gradient where that is slow; or say why not."""
    latents = fit.program.latents
    size = latents.global_block.size + latents.local_block.size
    many = size * fit.federation.data.num_rows > WORK or lacks_rows(fit)
    try:
        return convergence(fit, draws=0, seed=seed) if many else convergence(fit, seed=seed)
    except (ValueError, RowsNotSaved) as error:
        return str(error)


def expected_of(fit: Snapshot, drawn: Draws, seed: int) -> Values | None:
    """Return as many draws of the clients' global prior; None where there is none."""
    if not drawn.own:
        return None
    try:
        return expected_of_clients(fit, draws=drawn.count, seed=seed)
    except (NotImplementedError, ProgramError):
        return None  # FedMAP's prior is a penalty, not a distribution


def k_hats_of(fit: Snapshot, run: Convergence | str, seed: int) -> pd.Series | None:
    """Return k-hat of each client's guide; None where no draws were weighted."""
    return None if isinstance(run, str) or run.scalars.empty else own_k_hat(fit, seed=seed)


def same_for_all(fit: Snapshot) -> bool:
    """Return whether all clients have the same global prior, with no client field read."""
    return not fit.program.reads.model & set(fit.federation.data.client_fields)


def named_own(draws: Draws) -> list[str]:
    """Return the local sites, without a site `x_offset` from which the site `x` is made."""
    own = draws.own
    return [n for n in own if not (n.endswith("_offset") and n.removesuffix("_offset") in own)]


def information(fit: Snapshot, draws: Draws, expected: Mapping[str, Tensor]) -> pd.DataFrame | None:
    """Compare each client's posterior with the global prior: KL in `nats`, `narrower` variance.

    Both are of the sites less their prior's mean in its sds, at each draw of the global sites, and
    of a site of few entries along the axes of its posterior: no shift of a column changes them.
    Where the prior has no variance in closed form, they are of the sites themselves beside
    `expected`, S draws of the global prior.
    """
    pooled, clients = same_for_all(fit), len(fit.clients)
    nats, ratios = torch.zeros(clients, dtype=torch.float64), []
    units = in_prior_units(fit, draws)
    for name in named_own(draws):
        own = units.get(name)
        if own is not None and bool(own.isfinite().all()):
            mine = own.double().reshape(len(own), clients, -1)
            ratio, away = _variances(mine), mine.mean(0).square()
        else:
            compared = _beside(draws.own[name], expected[name], (0, 1) if pooled else 0)
            if compared is None:
                continue
            ratio, away = compared
        nats += 0.5 * (ratio - 1.0 - ratio.log() + away).sum(1)
        ratios.append(ratio)
    sizes = [ratio.shape[1] for ratio in ratios]
    if not sizes:
        return None
    # S draws add about 1 / S per scalar, also for the global prior unless pooled over clients; of
    # several along their axes (n + 3) / 4 times as much
    added = sum(n * (n + 3) / 4 if 1 < n <= FEW else n for n in sizes)
    nats -= added / draws.count * (1.0 if pooled else 2.0)
    columns = {
        "nats": nats.clamp(min=0.0).numpy(),
        "narrower": np.clip(1.0 - torch.cat(ratios, 1).mean(1).numpy(), 0.0, 1.0),
    }
    return pd.DataFrame(columns, index=pd.Index(fit.clients, name="client"))


def _variances(mine: Tensor) -> Tensor:
    """Return the variances of draws (S, N, n), (N, n), along their own axes where these are few."""
    if not 1 < mine.shape[2] <= FEW:
        return mine.var(0, correction=0).clamp(min=1e-12)
    away = mine - mine.mean(0)
    covariance = torch.einsum("snd,sne->nde", away, away) / len(mine)
    return torch.linalg.eigvalsh(covariance).clamp(min=1e-12)


def _beside(
    own: Tensor, expected: Tensor, over: int | tuple[int, int]
) -> tuple[Tensor, Tensor] | None:
    """Return clients' variances in those of the prior, and squared distances of means, (N, n)."""
    mine, prior = (v.double().reshape(len(v), v.shape[1], -1) for v in (own, expected))
    varies = (prior.var(0, correction=0) > 0.0).all(0)
    if not bool(varies.any()):
        return None
    mine, prior = mine[..., varies], prior[..., varies]
    wide = prior.var(over, correction=0)
    ratio = (mine.var(0, correction=0) / wide).clamp(min=1e-12)
    return ratio, (mine.mean(0) - prior.mean(over)).square() / wide
