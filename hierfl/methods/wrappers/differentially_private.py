"""Differential privacy per client, for methods whose server takes means of updates.

    client:  d_k = theta_k - theta;  sends d_k min(1, C / |d_k|), the norm over all that it sends
    server:  theta' = theta + (1/m) (sum over the cohort + noise C N(0, I)),  m the planned size of the cohort
             then the method's own update, with theta' as the mean

Of `pvi`, DP-PVI: d_k is the change of a client's factor, and the client keeps its factor as it sent
it, shortened; noise stays in q. Where it would bend q less than the prior does in some direction,
q's precision is the nearest that does not, which costs no privacy.

Source: McMahan et al. 2018, arXiv:1710.06963, Algorithm 1, with cohorts of a fixed size; DP-PVI:
Heikkila, Ashman, Swaroop, Turner and Honkela 2023, TMLR, openreview 55BcghgicI, perturbed updates
of the global model. Every client counts as one: weights by rows depend on the rows. The server is
trusted with the updates; what it sends, and what it ends with, has the budget that
`history["epsilon"]` states, by Google's dp-accounting. Two sets of clients are neighbors if one
client's rows are replaced by any others, which moves the sum by 2 C; cohorts are drawn without
replacement: Wang et al. 2019, arXiv:1808.00087, Theorem 27.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import lru_cache, reduce
from typing import Any

import torch
from torch import Tensor

from hierfl.core.arguments import expect
from hierfl.core.extras import extras_for
from hierfl.core.secret_noise import new_key, secret_normals, secret_seed
from hierfl.core.trees import Tree, add, as_tree, as_vector, scaled, sub, tree_leaves, tree_map
from hierfl.method import Client, Clock, Method, Server, Share, Up
from hierfl.methods.about import Wrapper
from hierfl.methods.posteriors.natural_factors import PARTS, NaturalFactor, with_noise
from hierfl.methods.wrappers.wrapping import (
    WrappedState,
    as_share,
    check_takes_means,
    is_logged,
    within,
    wrapped,
)
from hierfl.program.program import Program, ProgramError

COPY = "theta"  # the share that is a client's copy of what it was sent
NOISE, COHORT = 0, 1  # what a key is for
REFUSED = {
    "leaves out": "counts every client of a round, and averaging_some leaves some out by a draw "
    "that nodes know: draw clients with fit(..., cohort=...)",
    "rounded": "clips plain values, and clients of a quantized method send rounded ones: leave "
    "quantized out",
}  # trait of a method -> why it has no budget
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


@Wrapper(
    call="(method, clipping_norm=, noise_multiplier=)",
    adds=(
        "clients shorten their updates, and the server adds noise to the sum; the history "
        "states the [budget](differential_privacy.md)"
    ),
)
def differentially_private(
    method: Method,
    *,
    clipping_norm: float,
    noise_multiplier: float,
    delta: float | None = None,
    secret: int | None = None,
) -> Method:
    """Return the method with clipped updates and Gaussian noise on their sum.

    The history states the budget that is spent after each round: `epsilon` at `delta`, where one
    client's rows are replaced by any others. It covers what the server sends, its last params, and
    what is computed from them; not what a client keeps, nor the names and numbers of rows that
    nodes agree on. What clients would log, such as their loss, is not sent. An update that is not
    finite counts as 0.

    Args:
        method: any method whose server averages its clients' copies of the global params (fedavg,
            ditto, pfedme, ...); fedvi or fedsvi, whose clients send changes or gradients; or pvi,
            whose clients send changes of their factors (DP-PVI).
        clipping_norm: C, the largest norm of an update, in units of the params; above 0. An update
            that is longer is shortened.
        noise_multiplier: standard deviation of the noise on the sum, in units of C; above 0.
            `noise_for_epsilon` gives it for a budget.
        delta: of the budget, below 1 / N. Default None: N^-1.1, after McMahan et al.
        secret: noise and cohorts are functions of it, so that a study can be repeated. Anyone who knows it
            can remove the noise. Default None: they come from the operating system, and no run
            is like another.

    Raises:
        ValueError: `clipping_norm` or `noise_multiplier` is not above 0 and finite, or (at fit)
            `delta` is out of range.
        ImportError: (at fit) dp-accounting is not installed.
        ProgramError: (at fit) the server does more than average; or the weights of its mean depend
            on the clients' rows, as those of fedmap, or on a draw that nodes know, as those of
            averaging_some.
    """
    expect(
        clipping_norm=(clipping_norm, "(0, inf)"), noise_multiplier=(noise_multiplier, "(0, inf)")
    )

    def client(program: Program) -> Client:
        plain = method.client(program)

        def finish(work: Tree, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
            up, after = plain.finish(work, message, own, rows)
            sent = _sent(up, PARTS if "factors" in method.traits else ())
            moved = {
                name: sub(value, {key: message[key] for key in value}) if name == COPY else value
                for name, value in sent.items()
            }
            short = _shortened(moved, clipping_norm)
            if "factors" in method.traits:
                after = after._replace(factor=add(own.factor, NaturalFactor(**short)))
            return {"clipped": Share(short)}, after

        return replace(plain, finish=finish)

    def server(program: Program) -> Server:
        _check_takes_means(method, program)
        at = check_delta(delta, program.num_clients)
        plain = method.server(program)
        if "factors" in method.traits:
            plain = with_noise(plain, full="diagonal" not in method.traits)
        return _noisy(plain, program.num_clients, clipping_norm, noise_multiplier, at, secret)

    name = f"{method.name} with noise {noise_multiplier:g}"
    return wrapped(method, name, client=client, server=server)


def _check_takes_means(method: Method, program: Program) -> None:
    """Refuse a method whose server takes anything but plain means over clients."""
    for trait, why in REFUSED.items():
        if trait in method.traits:
            raise ProgramError(f"differentially_private {why}")
    if "factors" not in method.traits:
        check_takes_means("differentially_private", method, program, method.server(program))


def _sent(up: Up, always: Collection[str] = ()) -> dict[str, Tree]:
    why = "differentially_private needs means whose weights do not depend on rows"
    values = {name: as_share(sent, name, why).value for name, sent in up.items()}
    return {n: v for n, v in values.items() if n in always or not is_logged(v)}


def _shortened(moved: Tree, clip: float) -> Tree:
    """Return a tree of norm `clip` at most; 0 where it is not finite."""
    squares = (leaf.double().square().sum() for leaf in tree_leaves(moved))
    norm = reduce(torch.add, squares, torch.zeros((), dtype=torch.float64)).sqrt()
    by = torch.where(norm > clip, clip / norm, 1.0)
    return tree_map(lambda v: torch.where(norm.isfinite(), by.to(v.dtype) * v, 0.0), moved)


def _noisy(
    plain: Server, clients: int, clip: float, noise: float, delta: float, secret: int | None
) -> Server:
    """Return a server that adds noise to its clients' sum, and keeps the books."""

    def update(state: WrappedState, means: dict[str, Tree], clock: Clock) -> WrappedState:
        planned = clock.clients + len(clock.left_out)
        mean = scaled(means["clipped"], clock.clients / planned)
        mean = _with_noise(mean, clip * noise / planned, new_key(secret, NOISE, clock.round))
        message = plain.down(state.method, clock)
        noisy = {
            name: add({key: message[key] for key in value}, value) if name == COPY else value
            for name, value in mean.items()
        }
        spent = state.extra + cost_of_round(noise, clients, planned)
        return WrappedState(plain.update(state.method, noisy, clock), spent)

    def logged(state: WrappedState) -> dict[str, float]:
        budget = {"epsilon": epsilon_of(state.extra, delta), "delta": delta}
        return {**plain.logged(state.method), **budget}

    return Server(
        WrappedState(plain.state, torch.zeros_like(orders())),
        update,
        **{**within(plain), "logged": logged},
        cohort_seed=lambda clock: secret_seed(new_key(secret, COHORT, clock.round)),
    )


def _with_noise(mean: Tree, sd: float, key: bytes) -> Tree:
    flat = as_vector(mean)
    drawn = sd * secret_normals(key, flat.numel())
    return as_tree(flat + drawn.to(flat), mean)
