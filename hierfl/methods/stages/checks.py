"""The stages of two_stage; what no honest server asks, and no honest client sends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hierfl.core.importance_sampling import K_HAT
from hierfl.core.trees import Tree
from hierfl.core.user_warnings import warn
from hierfl.data.batch import ClientBatch
from hierfl.method import Clock
from hierfl.methods.stages.state import ROUNDING, ServerState, is_definite
from hierfl.program.program import ProgramError
from hierfl.summaries.packed_rows import AWAY, NATS, RELATIVE, TRIES, PackedRows
from hierfl.summaries.reading import Reading

MOST_ROUNDS = 60  # it stops earlier; partial cohorts take longest
MOST_VALUES = 1000  # of a row
SHARPEST, FARTHEST = 1e14, 1e12  # a factor's curvature and slope, in units of the server's belief
WIDEST, WIDEST_BY_ROW = 1e3, 100.0  # nats between the ratios at two draws
STAGES = ("gathering factors", "weighting", "done")
# how little means may move, in posterior sds, and sds may change, for the factors to be final
STILL, STILL_SD = 0.1, 0.05
# Relative Monte Carlo error of an sd beyond which other draws are tried. One draw of 2,000 made up
# 59% of a variance (election88, an sd 1.6 times too large) at a k-hat of 0.44: weights were right.
OFF = 0.1
# nats from the likeliest draw to one at which a client's rows are impossible; of rows that are so at
# every draw, which says nothing of any
IMPOSSIBLE, NOWHERE = -1e6, -1e100
UNSURE = 0.7  # sd of the error of the log weights, in nats, above which they are not to be trusted


def is_positive(matrix: Tensor) -> bool:
    """Return whether a matrix (V, V) is symmetric and has no negative eigenvalue, up to rounding."""
    matrix, largest = matrix.double(), float(matrix.abs().max()) if matrix.numel() else 0.0
    if bool(((matrix - matrix.mT).abs() > ROUNDING * largest).any()):
        return False
    if not largest:
        return True
    values = torch.linalg.eigvalsh(0.5 * (matrix + matrix.mT))
    return bool(values[0] >= -ROUNDING * largest)


def refused_message(message: Tree, first: Tree, most: int, shared: int) -> str | None:
    """Return why a message of at most `most` draws (K = `shared`) is not the server's, or None."""
    names = set(message) - ({"draws"} if most else set())
    if names != set(first):
        return f"its names are {sorted(map(str, message))[:9]}, and {sorted(first)} are expected"
    if any(_form(message[name]) != _form(value) for name, value in first.items()):
        return "its tensors have other shapes or dtypes than the first message's"
    if "draws" in message:
        draws = message["draws"]
        right = isinstance(draws, Tensor) and draws.dtype == torch.float64 and draws.dim() == 2
        if not right or draws.shape[1] != shared or not 1 <= len(draws) <= most:
            return f"its draws are not ({most} or fewer, {shared}) in float64"
    if "covariance" in first and not is_definite(message["covariance"]):
        return "its covariance is not positive definite"
    return None


def _form(value: Any) -> Any:
    return (value.dtype, value.shape) if isinstance(value, Tensor) else None


def wrong_update(message: Tree, up: Mapping[str, Any], rows: int) -> str | None:
    """Return what no honest client sends: no Gaussian factor, or that its program was misread."""
    if "factor" not in up:
        ratios = up["log_ratios"].value.double()
        far = float(ratios.max() - ratios.median()) > WIDEST + WIDEST_BY_ROW * rows
        return "its log ratios differ by more than its rows allow" if far else None
    factor = up["factor"].value
    precision, shift = factor["precision"][0].double(), factor["shift"][0].double()
    if "noisy_square" in factor:  # sums with noise may have negative eigenvalues
        if not torch.equal(precision, precision.mT) or float(factor["num_rows"]) != rows:
            return "its sums are not symmetric, or of another number of rows"
    elif not is_positive(precision):
        return "the precision of its factor is not positive semi-definite"
    loc = message.get("loc", torch.zeros_like(shift)).double()
    root = torch.eye(len(shift), dtype=torch.float64)
    if "covariance" in message:
        root = torch.linalg.cholesky_ex(message["covariance"].double()).L
    slope = (root.mT @ (shift - precision @ loc)).norm()
    if float((root.mT @ precision @ root).norm()) > SHARPEST or float(slope) > FARTHEST:
        return "its factor is sharper than double precision can hold"
    if "square" in factor and not (
        -1e-6 <= float(factor["num_rows"]) <= MOST_VALUES * rows and float(factor["square"]) >= 0.0
    ):
        return "its number of rows or sum of squares is none"
    raised, misread = float(up["raised"].value), float(up["misread"].value)
    if raised not in range(len(shift) + 1) or misread not in (0.0, 1.0):
        return "its counts of raised eigenvalues and misread rows are none"
    if misread:
        return (
            "it says that its rows' likelihood depends on the sites in another way than was read "
            "off the program: use hierfl.methods.fedsvi(model, hierfl.guides.structured)"
        )
    return None


class Misread(ProgramError):
    """Rows whose likelihood depends on the sites in another way than was read off the program."""


def check_read(share: Tensor) -> None:
    """Stop if some client's likelihood was misread."""
    if bool(share > 0.0):
        raise Misread(
            "the likelihood of some client's rows depends on the sites in another way than the "
            "program showed on a few rows, so that two_stage would be wrong: use "
            "hierfl.methods.fedsvi(model, hierfl.guides.structured)"
        )


def warn_of(state: ServerState, clock: Clock) -> None:
    """Warn if k-hat is high, the weights are inaccurate, clients failed, or rounds ran out."""
    k_hat, error = float(state.k_hat), float(state.inner_error)
    if state.is_done and k_hat >= K_HAT:
        warn(
            f"k-hat is {k_hat:.2f}, above {K_HAT}: the clients' Gaussian factors miss a part of "
            f"the posterior, and weights cannot correct for it ({float(state.effective):.0f} "
            f"effective draws; largest k-hat of one client {float(state.k_hat_client):.2f}). "
            "Do not trust tails and spreads: give local sites tighter priors, or use fedsvi "
            "with guides.structured",
        )
    if state.is_done and error > UNSURE:
        warn(
            f"the weights are uncertain by a factor of {math.exp(error):.1f}: some clients' "
            "likelihoods are so far from Gaussian that their integrals are inaccurate. Do not "
            "trust tails and spreads: give local sites tighter priors, or use fedsvi with "
            "guides.structured",
        )
    lost, unweighted_clients = (int((~of).sum()) for of in (state.seen, state.weighted))
    if state.is_done and unweighted_clients:
        warn(
            f"{unweighted_clients} clients failed when the draws were weighted (history['left_out'] names "
            f"them): the rows of {lost} do not count, and those of {unweighted_clients - lost} only as "
            "their Gaussian factors say; fix their rows and fit again",
        )
    if not state.is_done and clock.round + 1 >= clock.rounds:
        missing = unweighted_clients if state.weights else lost
        fix = "allow more rounds"
        if clock.rounds >= MOST_ROUNDS and not missing:
            fix = "more do not help: use fedsvi with guides.structured"
        silent = f" ({missing} clients have not answered yet)" if missing else ""
        warn(
            f"the rounds ended while {STAGES[int(state.stage)]}{silent}: the posterior is not final; {fix}"
        )


def points_to_test(reading: Reading) -> tuple[Tensor, Tensor]:
    """Return random points (T, K) and (T, D) of global and local sites, for all clients."""
    g, size = torch.Generator().manual_seed(0), len(reading.origin)
    z = reading.origin.double() + AWAY * torch.randn(TRIES, size, generator=g)
    return z, AWAY * torch.randn(TRIES, reading.own_size, generator=g)


def misread(rows: PackedRows, batch: ClientBatch, points: tuple[Tensor, Tensor]) -> Tensor:
    """Return 1 for a client whose rows have another log likelihood than was read, else 0, (C,)."""
    reading = rows.line.reading
    whole = Reading(reading.program, torch.arange(len(reading.origin)), reading.origin)
    flags = []
    for z, w in zip(*points, strict=True):
        expected = whole.log_likelihoods(w, z, batch)
        own = w
        if reading.effects is not None:
            shift, scale = reading.effects.at(z)
            own = shift + scale @ w
        read = rows.values(torch.cat([own, z[reading.shared]]).expand(rows.clients, 1, -1))[:, 0]
        differs = (read - expected).abs() > NATS + RELATIVE * expected.abs()
        flags.append(differs | (expected.isfinite() & ~read.isfinite()))
    return torch.stack(flags).any(0).to(expected.dtype)
