"""Sites whose supports depend on other sites, or on the client."""

import numpy as np
import pyro
import pyro.distributions as dist
import torch

from hierfl import ClientBatch, ClientData
from hierfl.program.handlers import log_joint
from hierfl.program.read import read_model

Y = np.random.default_rng(0).normal(6.0, 1.0, (4, 5))


def data() -> ClientData:
    names, limits = [f"c{k}" for k in range(4)], torch.tensor([1.0, 7.0, 9.0, 12.0])
    rows = torch.tensor(Y.ravel())
    client = np.repeat(np.arange(4), 5)
    return ClientData.from_arrays(client, names=names, client_fields={"limit": limits}, y=rows)


def below_another(batch: ClientBatch) -> None:
    top = pyro.sample("top", dist.Gamma(5.0, 1.0))
    low = pyro.sample("low", dist.Uniform(0.0, top))
    with batch.clients():
        u = pyro.sample("u", dist.Normal(0.0, 0.5))
        with batch.data():
            pyro.sample("y", dist.Normal(low + u, 1.0), obs=batch.y)


def below_a_limit(batch: ClientBatch) -> None:
    spread = pyro.sample("spread", dist.HalfNormal(1.0))
    with batch.clients():
        u = pyro.sample("u", dist.Uniform(0.0, batch.limit))
        with batch.data():
            pyro.sample("y", dist.Normal(u, spread), obs=batch.y)


def test_a_bound_that_is_another_site() -> None:
    program = read_model(below_another, data()).program
    assert program.derived == {"low": None}
    top, free = torch.tensor(7.0), torch.tensor(0.8)
    values = {"top": top, "low_free": free, "u": torch.zeros(1, 1)}
    _, of_global = log_joint(program.model, values, program.prototype, {})
    share = free.sigmoid()
    expected = dist.Gamma(5.0, 1.0).log_prob(top) + (share * (1.0 - share)).log()
    torch.testing.assert_close(of_global, expected)
    derived = program.derive(values, {}, program.prototype)
    torch.testing.assert_close(derived["low"], top * share)


def test_a_bound_that_is_of_the_client() -> None:
    program = read_model(below_a_limit, data()).program
    assert [s.name for s in program.latents.local_block.sites] == ["u_free"]
    assert "u" in program.derived


def test_a_fixed_bound_stays() -> None:
    def model(batch: ClientBatch) -> None:
        low = pyro.sample("low", dist.Uniform(torch.tensor(0.0), torch.tensor(9.0)))
        with batch.clients(), batch.data():
            pyro.sample("y", dist.Normal(low, 1.0), obs=batch.y)

    program = read_model(model, data()).program
    assert [s.name for s in program.latents.sites] == ["low"]
