"""What one update discloses of its client's rows.

Run `python -m benchmarks.disclosure [--search] [method ...]`.

For each method and number of rows, an attacker sees the server's message and one client's update of
the first round, knows the method and the model, and tries to read the client's features off them.

Reading needs no computation. In a model that is linear in its features, the change of the slopes
over the change of the intercept is the features of a row, if there is only one; the leading
eigenvector of a precision or Hessian is the same. The table gives the distance of the nearest
reading from the nearest row: the largest error of a feature, in its standard deviations, as the
median over three clients. 0 is the row itself. Rows drawn at random are about 1.5 away.

With `--search` the attacker also knows the seed, the client's name and its labels. He looks by
least squares for rows whose update, computed as the client computes it, is the one that he saw, as
Zhu, Liu and Han 2019 (arXiv:1906.08935) do for gradients. The table then gives the share of rows
recovered to within 0.05. Zero means that this attack failed, not that no attack succeeds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from rich.console import Console
from rich.table import Table
from scipy.optimize import least_squares, linear_sum_assignment
from torch import Tensor, nn

from hierfl import guides, methods, models
from hierfl.core.trees import Tree, named_leaves, tree_leaves, tree_map
from hierfl.data.batch import ClientBatch
from hierfl.data.clients import ClientData
from hierfl.engine.chunks import client_round
from hierfl.engine.client_store import Table as States
from hierfl.engine.client_store import taken
from hierfl.engine.federation import Federation, federate
from hierfl.engine.rounds import begin
from hierfl.method import Clock, Method, Share
from hierfl.program.sites import Model

FEATURES = 4
ROWS = (1, 2, 5)
CLOSE = 0.05  # standard deviations of a feature
TARGET, OTHERS = "target", 3


def hierarchy(batch: ClientBatch) -> None:
    """Sample a hierarchical logistic regression on four features and an intercept."""
    size = FEATURES + 1
    mu = pyro.sample("mu", dist.Normal(torch.zeros(size), 2.0).to_event(1))
    tau = pyro.sample("tau", dist.HalfNormal(torch.ones(size)).to_event(1))
    with batch.clients():
        w = pyro.sample("w", dist.Normal(mu, tau).to_event(1))
        with batch.data():
            logits = (batch.x * w[..., :-1]).sum(-1) + w[..., -1]
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=batch.y)


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(FEATURES, 1)


def _shared() -> Model:
    return models.network(_network(), likelihood=models.likelihood.bernoulli())


def _personal(scale: Literal["learned"] | float = 1.0) -> Model:
    return models.bayesian_network(
        _network(),
        likelihood=models.likelihood.bernoulli(),
        prior_loc="learned",
        prior_scale=scale,
    )


def _mapped() -> Model:
    return models.learned_prior_network(_network(), likelihood=models.likelihood.bernoulli())


METHODS: dict[str, Callable[[], Method]] = {
    "fedavg, 1 step": lambda: methods.fedavg(_shared(), steps=1, batch_size=None),
    "fedavg": lambda: methods.fedavg(_shared()),
    "ditto": lambda: methods.ditto(_shared()),
    "local_only": lambda: methods.local_only(_shared()),
    "fedmap": lambda: methods.fedmap(_mapped()),
    "pfedme": lambda: methods.pfedme(_personal()),
    "pfedbred": lambda: methods.pfedbred(_personal()),
    "fedabml": lambda: methods.fedabml(_personal("learned")),
    "pfedbayes": lambda: methods.pfedbayes(_personal("learned")),
    "fedsvi(mean_field)": lambda: methods.fedsvi(hierarchy, guides.mean_field),
    "fedsvi(conditional)": lambda: methods.fedsvi(hierarchy, guides.conditional),
    "fedlaplace": lambda: methods.fedlaplace(hierarchy),
    "pvi": lambda: methods.pvi(hierarchy),
    "bfi": lambda: methods.bfi(hierarchy),
}


def federation(rows: int, seed: int) -> ClientData:
    """Return a client of so many rows, of independent standard normal features, beside three of 20 rows."""
    g = torch.Generator().manual_seed(seed)
    slopes = torch.randn(FEATURES, generator=g)
    clients = {}
    for name, count in ((TARGET, rows), *((f"other {k}", 20) for k in range(OTHERS))):
        x = torch.randn(count, FEATURES, generator=g)
        y = (torch.rand(count, generator=g) < torch.sigmoid(x @ slopes)).to(x.dtype)
        clients[name] = {"x": x, "y": y}
    return ClientData.from_clients(clients)


class Seen(NamedTuple):
    """What the attacker sees, and how the client made it.

    setting: the federation; the target is its first client.
    message: of the server, in the first round.
    states: of all clients, before that round.
    """

    setting: Federation
    message: Tree
    states: States


def first_round(method: Method, data: ClientData) -> Seen:
    """Return the first round of a method, up to the clients' part in it."""
    setting = federate(method, data)
    begun = begin(setting)
    message = setting.server.down(begun.server, Clock(0, 1, data.num_clients))
    return Seen(setting, message, begun.table)


def update_of(seen: Seen, rows: Tensor | None = None) -> dict[str, Any]:
    """Return the target's update, by the name of each share, for its own features or for others (B, 4)."""
    setting, target = seen.setting, torch.tensor([0])
    if rows is not None:  # the target comes first
        x = torch.cat([rows, setting.data.fields["x"][len(rows) :]])
        setting = replace(setting, data=setting.data.with_fields(x=x))
    phases, states = setting.client.phases, taken(seen.states, target)
    up, _ = client_round(setting, phases, seen.message, states, target, 0)
    return up


# ------------------------------------------------------------------------------------------------
# reading
def readings(seen: Seen) -> list[Tensor]:
    """Return the rows, (4,) each, that can be read off the target's update at once."""
    sent, told = {}, _by_last_key(seen.message)
    for name, share in update_of(seen).items():
        # log weights are apart
        weight = torch.as_tensor(share.weight)[0] if isinstance(share, Share) else 1.0
        sent.update(_by_last_key({name: tree_map(lambda v, by=weight: v[0] / by, share.value)}))
    moved = {
        name: value - told[name]
        for name, value in sent.items()
        if name in told and told[name].shape == value.shape
    }
    return [*_ratios(sent), *_ratios(sent | moved)]


def _ratios(numbers: dict[str, Tensor]) -> list[Tensor]:
    """Return slopes over intercept for each vector, and each matrix's leading eigenvector, among some numbers."""
    vectors = []
    for name, value in numbers.items():
        if name.endswith("weight"):
            bias = numbers[name.removesuffix("weight") + "bias"]
            vectors.append(torch.cat([value.flatten(), bias]))
        elif value.dim() == 1 and len(value) > FEATURES:
            vectors.append(value[: FEATURES + 1])
        elif value.dim() == 2 and value.shape[0] == value.shape[1] > FEATURES:
            block = value[: FEATURES + 1, : FEATURES + 1]
            vectors.append(torch.linalg.svd(block).U[:, 0])
    return [vector[:-1] / vector[-1] for vector in vectors]


def nearest_reading(method: Method, data: ClientData) -> float:
    """Return how far the nearest reading is from the nearest of the target's rows, in standard deviations.

    A method off whose update nothing can be read gives infinity.
    """
    rows = data.fields["x"][: int(data.counts[0])]
    found = [(rows - x).abs().amax(-1).amin() for x in readings(first_round(method, data))]
    return min((float(off) for off in found if off.isfinite()), default=np.inf)


def _by_last_key(tree: Tree) -> dict[str, Tensor]:
    return {
        path.rsplit("'", 2)[-2] if "'" in path else path: leaf.detach()
        for path, leaf in named_leaves(tree).items()
    }


# ------------------------------------------------------------------------------------------------
# search
def recovered(method: Method, data: ClientData, *, starts: int = 3, seed: int = 0) -> float:
    """Return the share of the target's rows that a search recovers to within `CLOSE`.

    Args:
        method: whose update is attacked.
        data: as from `federation`.
        starts: random starts of the search; it ends once the update is matched.
        seed: of the starts.
    """
    seen, count = first_round(method, data), int(data.counts[0])
    secret = data.fields["x"][:count].numpy()

    def update(x: np.ndarray) -> np.ndarray:
        up = update_of(seen, torch.as_tensor(x).reshape(count, FEATURES))
        return torch.cat([leaf.detach().flatten() for leaf in tree_leaves(up)]).numpy()

    goal = update(secret.ravel())
    size = np.abs(goal) + 1e-3 * np.abs(goal).max() + 1e-12
    random = np.random.default_rng(seed)
    best, nearest = np.inf, np.zeros(count * FEATURES)
    for _ in range(starts):
        start = random.normal(size=count * FEATURES)
        found = least_squares(lambda x: (update(x) - goal) / size, start, max_nfev=40)
        if found.cost < best:
            best, nearest = found.cost, found.x
        if best < 1e-16:
            break
    off = np.abs(nearest.reshape(count, 1, FEATURES) - secret[None]).max(-1)
    return float((off[linear_sum_assignment(off)] < CLOSE).mean())


def main(arguments: Sequence[str] | None = None) -> None:
    """Attack every method, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="*", metavar="method", help=", ".join(METHODS))
    parser.add_argument("--search", action="store_true", help="search for the rows: slow")
    chosen = parser.parse_args(arguments)
    torch.set_default_dtype(torch.float64)
    table = Table("method", *(f"{rows} rows" for rows in ROWS))
    for name in chosen.methods or METHODS:
        if chosen.search:
            found = [recovered(METHODS[name](), federation(n, 0)) for n in ROWS]
            cells = [f"{share:.0%}" for share in found]
        else:
            cells = [f"{_median_reading(name, n):.2g}" for n in ROWS]
        table.add_row(name, *cells)
        print(name, *cells, flush=True)
    Console().print(table)


def _median_reading(name: str, rows: int) -> float:
    return float(
        np.median([nearest_reading(METHODS[name](), federation(rows, s)) for s in range(3)])
    )


if __name__ == "__main__":
    main()
