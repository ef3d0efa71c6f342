"""Has a fit arrived? The trend of its ELBO against the noise of its estimates, and what is left of its gradient, in plain words."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch import Tensor
from torch.func import grad

from hierfl.core.trees import Tree
from hierfl.data.batch import ClientBatch
from hierfl.posterior.client_loop import at_each_draw, each_client
from hierfl.posterior.snapshot import Snapshot
from hierfl.program.program import Params

LEAST_ROUNDS = 40  # rounds that a trend is read off: 20 in the half that is looked at
SHARE = 0.01  # of the mean, that matters in a loss of unknown units, or that noise may hide of any
NATS = 1.0  # a rise of the ELBO that still matters, whatever its noise: as much as a factor e in the evidence
FAR = 3.0  # standard errors


@dataclass(frozen=True, eq=False)
class Convergence:
    """Whether a run has arrived.

    Args:
        converged: nothing that can be seen is left to be gained.
        verdict: why, in a sentence or two.
        rise: of the ELBO, or fall of the loss, from the third quarter of the rounds to the last, in its own units.
        error: standard error of the rise; rounds that are alike are not counted as so many.
        noise: standard deviation of one round's estimate about the trend.
        gradient: a row a global param: `size` of the mean gradient of the negative ELBO at the end, over the standard `error` of
            that mean (about 1 where only noise is left; NaN where there is none, as under a point), and `still`, whether it is within
            3 of them; empty where the run's history has no ELBO.
    """

    converged: bool
    verdict: str
    rise: float
    error: float
    noise: float
    gradient: pd.DataFrame


def convergence(fit: Snapshot, *, draws: int = 64, seed: int = 0) -> Convergence:
    """Judge a run by its history and, for an ELBO, by independent estimates of the gradient at its end.

    Args:
        fit: after 40 rounds or more.
        draws: of the guide, each an estimate of the gradient; 0: the history alone is judged.
        seed: of the draws.

    Raises:
        ValueError: too few rounds, a history with neither an ELBO nor a loss, or draws that are 1 or negative.
    """
    if draws < 0 or draws == 1:
        raise ValueError(
            f"draws is {draws}: the noise of a gradient takes 2 or more, or 0 for none of it"
        )
    history = fit.history
    if len(history) < LEAST_ROUNDS:
        raise ValueError(
            f"the run has {len(history)} rounds: no trend is read off fewer than {LEAST_ROUNDS}"
        )
    name = next((column for column in ("elbo", "loss") if column in history), None)
    if name is None:
        raise ValueError(
            f"the history of '{fit.method.name}' has neither an ELBO nor a loss, but {', '.join(history.columns)}: nothing to judge by"
        )
    series = history[name].to_numpy(dtype=np.float64)
    series = series if name == "elbo" else -series
    rise, error, noise_ = trend(series)
    gradient = (
        _gradient(fit, draws, seed)
        if name == "elbo" and draws
        else pd.DataFrame(columns=["size", "error", "ratio", "still"])
    )
    good, verdict = _verdict(name, series, (rise, error, noise_), gradient, draws)
    return Convergence(good, verdict, rise, error, noise_, gradient)


def _verdict(
    name: str,
    series: NDArray[np.float64],
    of_trend: tuple[float, float, float],
    gradient: pd.DataFrame,
    draws: int,
) -> tuple[bool, str]:
    """Whether a run has converged, and why."""
    rise, error, noise_ = of_trend
    half = series[len(series) // 2 :]
    what, unit = ("ELBO", "nats") if name == "elbo" else ("loss", "of its own units")
    matters = NATS if name == "elbo" else SHARE * abs(float(half.mean()))
    facts = f"{rise:+.3g} ± {error:.2g} {unit} from the third quarter of the rounds to the last, one round's noise {noise_:.2g}"
    if not np.isfinite(half).all():
        return False, f"Not converged: the {what} is not finite. Lower the step size."
    if rise > max(FAR * error, matters):
        return False, f"Not converged: the {what} still improves ({facts}). Take more rounds."
    if -rise > max(FAR * error, matters):
        return False, f"Not converged: the {what} gets worse ({facts}). Lower the step size."
    if FAR * error > max(matters, SHARE * abs(float(half.mean()))):
        return (
            False,
            f"Not to be told: the noise hides what the {what} does ({facts}). Take more draws (num_particles) or more rounds.",
        )
    moving = gradient[~gradient["still"].astype(bool)]["ratio"].astype(float)
    if len(moving) and moving.max() > math.sqrt(draws):
        return False, (
            f"Not converged: the {what} hardly moves ({facts}), but the gradient of '{moving.idxmax()}' is {moving.max():.0f} times its "
            f"noise, so that a single draw of it shows the way. Take a larger step size, or more rounds."
        )
    if len(moving):
        return True, (
            f"Nearly converged: the {what} has levelled off ({facts}), but the gradient of '{moving.idxmax()}' is still "
            f"{moving.max():.1f} times its noise. More rounds move it further."
        )
    return True, f"Converged: the {what} has levelled off ({facts})."


def trend(series: NDArray[np.float64]) -> tuple[float, float, float]:
    """Rise from the third quarter to the last, its standard error, and the noise of one value about a straight line.

    The standard error is by the means of batches of about the square root of a quarter's values (Flegal and Jones 2010, Annals of
    Statistics 38): values of rounds that are near may be alike.
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
    """By global param: the size of the mean gradient over draws against the standard error of the mean, all clients summed."""
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
