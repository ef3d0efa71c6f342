"""Problems on which rounds are counted.

Those with a reference posterior, London's schools, a poll, and more.

London's schools and the poll are larger and have no published reference. Theirs is pooled NUTS, run
once and saved in the user's cache folder; so it is for the simulated problems of
`benchmarks.simulated_models` and `benchmarks.binary_models`.
"""

from __future__ import annotations

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

import hierfl
from benchmarks.binary_models import BINARY
from benchmarks.reference_models import EXACT, PROBLEMS, Problem, Way
from benchmarks.simulated_models import SIMULATED
from hierfl import ClientBatch, ClientData, guides

# ---------------------------------------------------------------------------------- ILEA schools
# Columns: two of three years, two percentages of the school, a sex, two reading bands, an origin.
PUPILS = [1, 2, 3, 4, 6, 7, 8, 14]


def ilea_data() -> ClientData:
    """Return every third school of school_ilea, with eight columns.

    All columns are centered over the pupils. The two percentages and the score are standardized.
    """
    raw = hierfl.datasets.school_ilea()
    raw = raw.select(list(range(0, raw.num_clients, 3)))
    x, y = raw.fields["x"].double()[:, PUPILS], raw.fields["y"].double()
    x[:, 2:4] = x[:, 2:4] / x[:, 2:4].std(0)
    x = x - x.mean(0)
    return ClientData.from_arrays(raw.row_client, names=raw.names, x=x, y=(y - y.mean()) / y.std())


def ilea(batch: ClientBatch) -> None:
    """Model 5,000 pupils of 47 schools.

    Y ~ Normal(a_j + x . slope, sigma), a_j ~ Normal(mu, tau).
    """
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    slope = pyro.sample("slope", dist.Normal(torch.zeros(len(PUPILS)), 1.0).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(mu, tau))
        with batch.data():
            pyro.sample("y", dist.Normal(a + batch.x @ slope, sigma), obs=batch.y)


# ------------------------------------------------------------------------------------------------
# election88
REGIONS = 4  # Midwest, South, West and DC; the Northeast is the baseline


def election_data() -> ClientData:
    """Return election88 as counts.

    One row for the voters of a state of one sex, race, age and schooling.

    `n` is the number of those voters and `y` how many of them chose Bush. All columns are centered
    over the voters, so that the intercept is that of the average voter.
    """
    raw = hierfl.datasets.election88()
    x = torch.cat(
        [raw.fields["x"], raw.fields["age"][:, None], raw.fields["edu"][:, None]], 1
    ).long()
    kinds = torch.cat([raw.row_client[:, None], x], 1).numpy()
    cells, which = np.unique(kinds, axis=0, return_inverse=True)
    n = np.bincount(which.reshape(-1)).astype(np.float64)
    y = np.bincount(which.reshape(-1), raw.fields["y"].numpy())
    own, state = raw.client_fields, cells[:, 0]
    region = (
        torch.nn.functional.one_hot(own["region"].reshape(-1), REGIONS + 1)[:, 1:].double().numpy()
    )
    columns = _coded(torch.as_tensor(cells[:, 1:])).numpy()
    return ClientData.from_arrays(
        state,
        names=raw.names,
        client_fields={
            "region": region - n @ region[state] / n.sum(),
            "v_prev": (10.0 * (own["v_prev"].reshape(-1) - 0.54)).numpy(),
        },
        x=columns - n @ columns / n.sum(),
        n=n,
        y=y,
    )


def _coded(kinds: Tensor) -> Tensor:
    """Return female, black, both, and 0/1 columns of age and schooling but their first, (cells, 9)."""
    female, black, age, schooling = kinds.unbind(1)
    age, schooling = (torch.nn.functional.one_hot(v, 4)[:, 1:] for v in (age, schooling))
    return torch.cat([torch.stack([female, black, female * black], 1), age, schooling], 1).double()


def election(batch: ClientBatch) -> None:
    """Model 11,566 voters: y ~ Binomial(n, logit^-1(a_s + x . slope)).

    a_s ~ Normal(mu + v_prev vote + region . area, tau) is the intercept of a state.
    """
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    vote = pyro.sample("vote", dist.Normal(0.0, 1.0))
    area = pyro.sample("area", dist.Normal(torch.zeros(REGIONS), 1.0).to_event(1))
    slope = pyro.sample("slope", dist.Normal(torch.zeros(9), 1.0).to_event(1))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(mu + vote * batch.v_prev + batch.region @ area, tau))
        with batch.data():
            pyro.sample("y", dist.Binomial(batch.n, logits=a + batch.x @ slope), obs=batch.y)


ILEA = Problem(
    name="ilea",
    source=None,
    data=ilea_data,
    effects=lambda draws: draws,
    sampled=ilea,
    ways={"conditional": Way(ilea, EXACT, 400, 0.05, 4, draws=2000)},
    dense=("mu", "slope"),
)
ELECTION = Problem(
    name="election88",
    source=None,
    data=election_data,
    effects=lambda draws: draws,
    sampled=election,
    ways={
        "conditional": Way(election, guides.conditional(newton_steps=3), 400, 0.05, 2, draws=2000)
    },
    dense=("mu", "vote", "area", "slope"),
)
LARGE = {problem.name: problem for problem in (ILEA, ELECTION)}
ALL = {**PROBLEMS, **LARGE, **BINARY, **SIMULATED}
