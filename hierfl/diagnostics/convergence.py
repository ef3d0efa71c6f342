"""Has a run converged? The trend of its ELBO against the noise of the estimates, and the gradient that is left."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch import Tensor
from torch.func import grad

from hierfl.core.one_at_a_time import one_at_a_time
from hierfl.core.trees import Tree
from hierfl.data.batch import ClientBatch
from hierfl.method import step_sizes
from hierfl.posterior.client_loop import at_each_draw, each_client
from hierfl.posterior.snapshot import Snapshot
from hierfl.program.program import Params

LEAST_ROUNDS = 40  # to estimate a trend; the second half of them is used
SHARE = 0.01  # the relative change that matters in a loss of unknown units, or that noise may hide
NATS = 1.0  # the rise of an ELBO that matters: a factor e in the evidence
FAR = 3.0  # standard errors that count as significant


@dataclass(frozen=True, eq=False)
class Convergence:
    """Whether a run has converged.

    Args:
        converged: no further gain is detectable.
        verdict: why, in a sentence or two.
        rise: of the ELBO, or fall of the loss, from the third quarter of the rounds to the last, in its own
            units.
        error: standard error of the rise, allowing for correlation between rounds.
        noise: standard deviation of one round's estimate about the trend.
        gradient: one row a global param: `size`, the norm of the mean gradient of the negative ELBO at the
            end; `error`, the standard error of that mean; `ratio` of the two, about 1 where only noise is
            left, NaN for point estimates, which have no noise; `still`, whether the ratio is below 3. Empty
            where the history has no ELBO.
    """

    converged: bool
    verdict: str
    rise: float
    error: float
    noise: float
    gradient: pd.DataFrame


@one_at_a_time
def convergence(fit: Snapshot, *, draws: int = 64, seed: int = 0) -> Convergence:
    """Judge a run by its history and, for an ELBO, by independent estimates of the gradient at its end.

    Args:
        fit: after at least 40 rounds.
        draws: of the guide, each one an estimate of the gradient; 0: judge by the history alone.
        seed: of the draws.

    Raises:
        ValueError: the run has fewer than 40 rounds, its history has neither an ELBO nor a loss, or `draws`
            is 1 or negative.
    """
    if draws < 0 or draws == 1:
        raise ValueError(
            f"draws is {draws}: it must be 2 or more to estimate the noise of a gradient, "
            f"or 0 to leave the gradient out"
        )
    history = fit.history
    if len(history) < LEAST_ROUNDS:
        raise ValueError(
            f"the run has {len(history)} rounds: a trend needs at least {LEAST_ROUNDS}"
        )
    name = next((column for column in ("elbo", "loss") if column in history), None)
    if name is None:
        raise ValueError(
            f"the history of '{fit.method.name}' has neither an ELBO nor a loss to judge by; "
            f"it has {', '.join(history.columns)}"
        )
    series = history[name].to_numpy(dtype=np.float64)
    series = series if name == "elbo" else -series
    rise, error, noise_ = trend(series)
    gradient = (
        _gradient(fit, draws, seed)
        if name == "elbo" and draws
        else pd.DataFrame(columns=["size", "error", "ratio", "still"])
    )
    rates = bool(step_sizes(fit.method))
    good, verdict = _verdict(name, series, (rise, error, noise_), gradient, draws, rates=rates)
    return Convergence(good, verdict, rise, error, noise_, gradient)


def _verdict(
    name: str,
    series: NDArray[np.float64],
    of_trend: tuple[float, float, float],
    gradient: pd.DataFrame,
    draws: int,
    *,
    rates: bool,
) -> tuple[bool, str]:
    """Return whether a run has converged, and why; `rates`: the method has step sizes."""
    lower = "Lower the step size." if rates else "Scale the rows, or tighten the priors."
    larger = "Take a larger step size, or more rounds." if rates else "Take more rounds."
    rise, error, noise_ = of_trend
    half = series[len(series) // 2 :]
    what, unit = ("ELBO", "nats") if name == "elbo" else ("loss", "in its own units")
    matters = NATS if name == "elbo" else SHARE * abs(float(half.mean()))
    facts = (
        f"{rise:+.3g} ± {error:.2g} {unit} from the third quarter of the rounds to the last, "
        f"noise of one round {noise_:.2g}"
    )
    if not np.isfinite(half).all():
        return False, f"Not converged: the {what} is not finite. {lower}"
    if rise > max(FAR * error, matters):
        return False, f"Not converged: the {what} still improves ({facts}). Take more rounds."
    if -rise > max(FAR * error, matters):
        return False, f"Not converged: the {what} gets worse ({facts}). {lower}"
    if FAR * error > max(matters, SHARE * abs(float(half.mean()))):
        return (
            False,
            f"Undecided: noise hides the trend of the {what} ({facts}). "
            f"Take more draws (num_particles) or more rounds.",
        )
    moving = gradient[~gradient["still"].astype(bool)]["ratio"].astype(float)
    if len(moving) and moving.max() > math.sqrt(draws):
        return False, (
            f"Not converged: the {what} hardly moves ({facts}), but the gradient of "
            f"'{moving.idxmax()}' is {moving.max():.0f} times its noise: even a single draw points "
            f"downhill. {larger}"
        )
    if len(moving):
        return True, (
            f"Nearly converged: the {what} has levelled off ({facts}), but the gradient of "
            f"'{moving.idxmax()}' is still {moving.max():.1f} times its noise. "
            f"More rounds will move it further."
        )
    return True, f"Converged: the {what} has levelled off ({facts})."


def trend(series: NDArray[np.float64]) -> tuple[float, float, float]:
    """Return the rise from the third quarter to the last, its standard error, and the noise about a straight line.

    Neighbouring rounds may be correlated, so the standard error comes from means of batches whose size is
    about the square root of a quarter's length (Flegal and Jones 2010, Annals of Statistics 38).
    """
    half = series[len(series) // 2 :]
    quarters = np.array_split(half, 2)
    at = np.arange(len(half)) - (len(half) - 1) / 2.0
    line = half.mean() + at * (at @ (half - half.mean())) / (at @ at)
    rest = np.array_split(half - line, 2)
    square = 0.0
    for values in rest:
        size = max(1, math.isqrt(len(values)))
        means = values[: len(values) // size * size].reshape(-1, size).mean(1)
        square += float(means.var(ddof=1)) / len(means)
    return (
        float(quarters[1].mean() - quarters[0].mean()),
        math.sqrt(square),
        float((half - line).std(ddof=2)),
    )


def _gradient(fit: Snapshot, draws: int, seed: int) -> pd.DataFrame:
    """Return, by global param, the norm of the gradient summed over clients beside its standard error over draws."""
    program = fit.program
    names = [spec.name for spec in program.params if not spec.is_local]

    def one(params: Params, own: ClientBatch, asked: ClientBatch) -> Tree:
        rest = {name: value for name, value in params.items() if name not in names}

        def slope(d: Tensor) -> Params:
            def loss(shared: Params) -> Tensor:
                terms = program.terms({**rest, **shared}, own.redrawn(d))
                return terms.loss(program.share).sum()

            found: Params = grad(loss)({name: params[name] for name in names})
            return found

        return at_each_draw(slope, draws, program)

    total: Params = {}
    for chunk in each_client(fit, one, seed=seed, salt="convergence"):
        part = {name: value.detach().sum(0) for name, value in chunk.found.items()}
        total = {name: total[name] + v for name, v in part.items()} if total else part
    rows_of = {}
    for name, value in total.items():
        flat = value.reshape(draws, -1).double()
        size = float(flat.mean(0).norm())
        error = float((flat.var(0).sum() / draws).sqrt())
        rows_of[name] = {
            "size": size,
            "error": error,
            "ratio": size / error if error > 1e-12 * size else math.nan,
        }
    frame = pd.DataFrame.from_dict(rows_of, orient="index", columns=["size", "error", "ratio"])
    frame["still"] = ~(frame["ratio"] >= FAR)
    return frame
