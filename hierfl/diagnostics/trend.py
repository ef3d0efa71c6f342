"""The trend of a run's ELBO or loss, and the gradient that is left."""

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch import Tensor
from torch.func import grad

from hierfl.core.trees import Tree
from hierfl.data.batch import ClientBatch
from hierfl.diagnostics.check import FAR, LEAST_ROUNDS, NATS, SHARE
from hierfl.engine.federation import step_sizes
from hierfl.posterior.client_loop import at_each_draw, each_client
from hierfl.posterior.snapshot import Snapshot
from hierfl.program.program import Params

COLUMNS = ["size", "error", "ratio", "still"]

State = Literal["unknown", "not finite", "rising", "falling", "hidden", "steep", "moving", "level"]


@dataclass(frozen=True, eq=False)
class Course:
    """How a run's ELBO or loss went, and whether it still goes anywhere; `words` begin a sentence.

    `state`: "unknown" (no trend to see), "not finite", "rising" (improves), "falling" (gets worse),
    "hidden" (by noise), "steep" (level, but single gradients point downhill), "moving" (level, but
    the mean gradient is above its noise) or "level".
    """

    state: State
    words: str
    fix: str
    rise: float = math.nan
    error: float = math.nan
    noise: float = math.nan
    gradient: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=COLUMNS))

    @property
    def trend(self) -> tuple[float, float, float, pd.DataFrame]:
        """Rise, error, noise and gradient."""
        return self.rise, self.error, self.noise, self.gradient


def course_of(fit: Snapshot, *, draws: int, seed: int) -> Course:
    """Read the trend from the history; `draws` of the guide estimate an ELBO's gradient, 0 leaves it out."""
    history = fit.history
    name = next((column for column in ("elbo", "loss") if column in history), None)
    if name is None:
        columns = ", ".join(history.columns) or "no column"
        words = (
            f"the history of '{fit.method.name}' has neither an ELBO nor a loss (it has {columns})"
        )
        fix = "" if fit.federation.server.stops_itself else "Run more rounds."
        return Course("unknown", words, fix)
    if len(history) < LEAST_ROUNDS:
        words = f"the run has {len(history)} rounds, and a trend needs at least {LEAST_ROUNDS}"
        return Course("unknown", words, "Run more rounds.")
    series = history[name].to_numpy(dtype=np.float64)
    series = series if name == "elbo" else -series
    gradient = (
        _gradient(fit, draws, seed) if name == "elbo" and draws else pd.DataFrame(columns=COLUMNS)
    )
    found = trend(series)
    state, words = _state(name, series, found, gradient, draws)
    return Course(state, words, _fix(state, rates=bool(step_sizes(fit.method))), *found, gradient)


def _state(
    name: str,
    series: NDArray[np.float64],
    found: tuple[float, float, float],
    gradient: pd.DataFrame,
    draws: int,
) -> tuple[State, str]:
    rise, error, noise_ = found
    half = series[len(series) // 2 :]
    what, unit = ("ELBO", "nats") if name == "elbo" else ("loss", "in its own units")
    matters = NATS if name == "elbo" else SHARE * abs(float(half.mean()))
    facts = (
        f"{rise:+.3g} ± {error:.2g} {unit} from the third quarter of the rounds to the last, "
        f"noise of one round {noise_:.2g}"
    )
    if not np.isfinite(half).all():
        return "not finite", f"the {what} is not finite"
    if rise > max(FAR * error, matters):
        return "rising", f"the {what} still improves ({facts})"
    if -rise > max(FAR * error, matters):
        return "falling", f"the {what} gets worse ({facts})"
    if FAR * error > max(matters, SHARE * abs(float(half.mean()))):
        return "hidden", f"noise hides the trend of the {what} ({facts})"
    moving = gradient[~gradient["still"].astype(bool)]["ratio"].astype(float)
    if len(moving) and moving.max() > math.sqrt(draws):
        return "steep", (
            f"the {what} hardly moves ({facts}), but the gradient of '{moving.idxmax()}' is "
            f"{moving.max():.0f} times its noise: even a single draw points downhill"
        )
    if len(moving):
        return "moving", (
            f"the {what} has leveled off ({facts}), but the gradient of '{moving.idxmax()}' is "
            f"still {moving.max():.1f} times its noise"
        )
    return "level", f"the {what} has leveled off ({facts})"


def _fix(state: State, *, rates: bool) -> str:
    lower = "Lower the step size." if rates else "Scale the rows, or tighten the priors."
    fixes: dict[State, str] = {
        "not finite": lower,
        "falling": lower,
        "rising": "Run more rounds.",
        "hidden": "Use more draws (`draws`) or more rounds.",
        "steep": "Use a larger step size, or more rounds." if rates else "Run more rounds.",
        "moving": "More rounds will move it further.",
    }
    return fixes.get(state, "")


def trend(series: NDArray[np.float64]) -> tuple[float, float, float]:
    """Return the rise from third to last quarter, its batch-means error (Flegal and Jones 2010), and noise."""
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
    """Return, by global param, the norm of the summed gradient and its standard error."""
    program = fit.program
    names = [spec.name for spec in program.params if not spec.is_local]

    def one(params: Params, own: ClientBatch, batch: ClientBatch) -> Tree:
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
