"""The stages of two_stage: gather factors, weight, done; their history and warnings."""

from __future__ import annotations

import math
import warnings

from hierfl.core.importance_sampling import K_HAT
from hierfl.core.trees import Tree

GATHER, WEIGHT, DONE = range(3)
STAGES = ("gathering factors", "weighting", "done")
LOGGED = ("moved", "changed", "r_hat", "k_hat", "effective", "k_hat_client", "inner_error")
UNSURE = 1.0  # sd of the error of the log weights, in nats, above which they are not to be trusted


def finished(state: Tree) -> bool:
    """Return whether all stages are done."""
    return int(state["stage"]) == DONE


def logged(state: Tree) -> dict[str, float]:
    """Return the next stage, moves of the posterior, R-hat, k-hat, ESS and widened factors."""
    numbers = {name: float(state[name]) for name in ("stage", *LOGGED)}
    widened = {"widened": float((state["powers"] < 1.0).sum())}
    return {n: v for n, v in {**numbers, **widened}.items() if math.isfinite(v)}


def warn(state: Tree, left: int) -> None:
    """Warn if k-hat is high, the weights are inaccurate, clients failed, or rounds ran out."""
    stage, k_hat = int(state["stage"]), float(state["k_hat"])
    if stage == DONE and k_hat >= K_HAT:
        warnings.warn(
            f"k-hat is {k_hat:.2f}, above {K_HAT}: the clients' Gaussian factors miss a part of "
            f"the posterior, and weights cannot correct for it ({float(state['effective']):.0f} "
            f"effective draws; largest k-hat of one client {float(state['k_hat_client']):.2f}). "
            "Do not trust tails and spreads: give local sites tighter priors, or take fedsvi "
            "with guides.structured",
            stacklevel=4,
        )
    error = float(state["inner_error"])
    if stage == DONE and error > UNSURE:
        warnings.warn(
            f"the weights are unsure by a factor of {math.exp(error):.1f}: some clients' "
            "likelihoods are so far from Gaussian that their integrals are inaccurate. Do not "
            "trust tails and spreads: give local sites tighter priors, or take fedsvi with "
            "guides.structured",
            stacklevel=4,
        )
    lost, unweighted_clients = (int((~state[name]).sum()) for name in ("seen", "weighted"))
    if stage == DONE and unweighted_clients:
        warnings.warn(
            f"{unweighted_clients} clients failed when the draws were weighted (history['left_out'] names "
            f"them): the rows of {lost} do not count, and those of {unweighted_clients - lost} only as "
            "their Gaussian factors say; fix their rows and fit again",
            stacklevel=4,
        )
    if stage != DONE and left == 0:
        missing = int((~state["weighted" if stage == WEIGHT else "seen"]).sum())
        warnings.warn(
            f"the rounds ended while {STAGES[stage]} ({missing} clients have not answered yet): "
            "the posterior is not final; allow more rounds",
            stacklevel=4,
        )
