"""The privacy budget of noisy rounds: epsilon at a delta, by Google's dp-accounting.

Two sets of clients are neighbors if one client's rows are replaced by any others. A client whose
message has a norm of C at most then moves the sum by 2 C. Cohorts have a fixed size and are drawn
without replacement: Wang et al. 2019, arXiv:1808.00087, Theorem 27, as `dp_accounting` has it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hierfl.core.arguments import expect
from hierfl.core.extras import extras_for

MOVED = 2.0  # times the clip: how far one client can move the sum when its rows are replaced


def default_delta(clients: int) -> float:
    """Return N^-1.1, the delta of McMahan et al. 2018, arXiv:1710.06963, section 4."""
    return float(clients**-1.1)


def noise_for_epsilon(
    epsilon: float, *, clients: int, cohort: int, rounds: int, delta: float | None = None
) -> float:
    """Return the smallest noise at which some rounds keep within a budget, up to 1 in 1,000.

    Args:
        epsilon: the budget, above 0.
        clients: N, of the federation.
        cohort: clients in a round.
        rounds: how many there will be.
        delta: of the budget. Default None: N^-1.1.

    Returns:
        The option `noise_multiplier` of `differentially_private`.

    Raises:
        ValueError: an argument is out of range.
        ImportError: dp-accounting is not installed.
    """
    expect(
        epsilon=(epsilon, "(0, inf)"),
        cohort=(cohort, f"[1, {clients}]"),
        rounds=(rounds, "[1, inf)"),
    )
    at = check_delta(delta, clients)

    def within(noise: float) -> bool:
        return epsilon_of(rounds * cost_of_round(noise, clients, cohort), at) <= epsilon

    return _smallest(within)


def _smallest(enough: Callable[[float], bool]) -> float:
    """Return the smallest number that is enough, between 1e-3 and 1e9, up to 1 in 1,000."""
    low, high = 1e-3, 1e-3
    while not enough(high):
        low, high = high, 4.0 * high
        if high > 1e9:
            raise ValueError("no noise is enough: raise epsilon or delta")
    while high > 1.001 * low:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def check_delta(delta: float | None, clients: int) -> float:
    """Return delta, or its default; refuse one that a run publishing one client in N is within."""
    value = default_delta(clients) if delta is None else delta
    if not 0.0 < value < 1.0 / clients:
        if delta is None:
            raise ValueError(f"{clients} client: differential privacy needs 2 clients or more")
        raise ValueError(
            f"delta is {delta}: with {clients} clients it must be above 0 and below 1/{clients}, "
            "or a run that publishes a client now and then would be within it"
        )
    return value


@lru_cache(maxsize=64)
def cost_of_round(noise: float, clients: int, cohort: int) -> Tensor:
    """Return a round's Renyi divergences, (orders,) float64; `noise` is in units of the clip."""
    accounting, rdp = _library()
    event = accounting.GaussianDpEvent(noise / MOVED)
    if cohort < clients:
        event = accounting.SampledWithoutReplacementDpEvent(clients, cohort, event)
    accountant = rdp.RdpAccountant(
        neighboring_relation=accounting.NeighboringRelation.REPLACE_ONE
    ).compose(event)
    return torch.as_tensor(accountant.rdp, dtype=torch.float64)


@lru_cache(maxsize=1)
def orders() -> Tensor:
    """Return the orders of the divergences, (orders,) float64."""
    _, rdp = _library()
    return torch.as_tensor(rdp.RdpAccountant().orders, dtype=torch.float64)


def epsilon_of(spent: Tensor, delta: float) -> float:
    """Return epsilon at a delta from the sum of the divergences of all rounds, (orders,)."""
    _, rdp = _library()
    epsilon, _ = rdp.compute_epsilon(orders().numpy(), spent.numpy(), delta)
    return float(epsilon)


def _library() -> tuple[Any, Any]:
    with extras_for("the privacy budget"):
        import dp_accounting
        from dp_accounting import rdp
    return dp_accounting, rdp
