"""Row noise: how far one row moves what is sent, what the noise costs, and what is refused."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import stats
from torch import Tensor

import hierfl
from hierfl import ClientData, ProgramError
from hierfl.core.gaussians import Factor, rounded
from hierfl.core.secret_noise import normals_at
from hierfl.core.trees import named_leaves
from hierfl.methods import two_stage
from hierfl.nodes.run import fit_nodes
from hierfl.summaries.row_noise import RowNoise
from tests.nodes.one_process import machines
from tests.programs import federation, fit
from tests.summaries import test_noisy_sums as noisy_sums

DRAWS = 100


def model() -> Any:
    """Return a logistic hierarchy of two slopes."""
    return hierfl.models.regression(
        "bernoulli",
        y="ill",
        prior_scale=dist.HalfNormal(0.5),
        intercept_scale=dist.HalfNormal(1.0),
        centered=True,
    )


def rows(count: int = 30) -> ClientData:
    return federation((count, count + 5, count - 7))


def method(epsilon: float = 2.0, **options: Any) -> Any:
    at: dict[str, Any] = {"delta": 1e-4, "max_row_norm": 3.0, "secret": 1, **options}
    return two_stage(model(), draws=DRAWS, row_noise=RowNoise(epsilon=epsilon, **at))


def factors(data: ClientData, **options: Any) -> dict[str, Tensor]:
    return dict(vars(fit(method(**options), data).progress.server.factors))


def test_hardly_any_noise_gives_the_factors_of_two_stage() -> None:
    """Steps of a wide budget, on rows that are not clipped, end where variational steps do."""
    data = rows()
    exact = fit(two_stage(model(), draws=DRAWS), data).progress.server.factors
    found = factors(data, epsilon=1e5, max_row_norm=5.0, rounds=2, steps=10)
    for name in ("precision", "shift"):  # four sds of the noise that is left
        assert torch.allclose(found[name], getattr(exact, name), atol=0.6)


def test_the_sums_of_a_run_spend_the_budget() -> None:
    """All sums together are one Gaussian mechanism, whose delta has a closed form."""
    how = RowNoise(epsilon=1.0, delta=1e-5, max_row_norm=2.0, rounds=2, steps=3)
    mu = math.sqrt(2 * 2 * 3) / how.noise  # as one Gaussian mechanism
    at = stats.norm.cdf
    delta = at(mu / 2 - 1.0 / mu) - math.e * at(-mu / 2 - 1.0 / mu)
    assert delta == pytest.approx(1e-5, rel=1e-3)  # Balle and Wang 2018, Theorem 8


@pytest.mark.filterwarnings("ignore:column 0 of field")
def test_a_wilder_row_counts_as_one_at_the_clip() -> None:
    data = rows()
    x = data.fields["x"].clone()
    sent = []
    for size in (1e3, 1e6):
        x[0] = size * torch.tensor([1.0, -1.0])
        sent.append(factors(data.with_fields(x=x), epsilon=1e5, max_row_norm=1.0, rounds=1))
    for name, value in sent[0].items():
        if isinstance(value, Tensor):
            assert torch.allclose(
                value, sent[1][name], atol=1e-3 * (1.0 + float(value.abs().max()))
            )
    without = factors(data, epsilon=1e5, max_row_norm=1.0, rounds=1)
    assert float((without["shift"] - sent[0]["shift"]).norm()) > 1e-3


def test_noise_is_of_the_secret_the_client_and_the_step() -> None:
    key = torch.tensor([[1, 2], [1, 3]], dtype=torch.int32)
    drawn = normals_at(key, 1000, "ab")
    assert torch.equal(drawn, normals_at(key, 1000, "ab"))
    assert not torch.allclose(drawn[0], drawn[1])
    assert not torch.allclose(drawn, normals_at(key, 1000, "cd"))
    over = torch.vmap(lambda k: normals_at(k, 1000, "ab"))(key)
    assert torch.equal(over, drawn)
    assert stats.kstest(drawn.flatten().numpy(), "norm").pvalue > 1e-3


def test_it_ends_by_itself_states_its_budget_and_sends_no_ratios() -> None:
    fitted = fit(method(epsilon=3.0, rounds=2), rows())
    assert len(fitted.history) == 2
    assert set(fitted.history["epsilon"]) == {3.0} and set(fitted.history["delta"]) == {1e-4}
    assert "k_hat" not in fitted.history or fitted.history["k_hat"].isna().all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the noise hides")
@pytest.mark.parametrize("kind", ["rounds", "sums"])
def test_every_engine_and_nodes_give_the_same(kind: str, tmp_path: Path) -> None:
    data, how = rows(), method()
    if kind == "sums":
        data, how = noisy_sums.simulated(4, clients=3)[0], noisy_sums.method(2.0)
    data = data.select(sorted(data.names))
    here, sequential = fit(how, data), fit(how, data, engine="sequential")
    around = machines(how, data, tmp_path)
    over = fit_nodes(how, around.agreement, around.ask, starts=around.starts())
    for name, value in named_leaves(here.progress.server.factors).items():
        for other in (sequential, over):
            same = named_leaves(other.progress.server.factors)[name]
            assert torch.allclose(same, value, atol=1e-6 * (1.0 + float(value.abs().max())))


@pytest.mark.slow
def test_a_factor_of_noise_alone_is_no_factor() -> None:
    """Where the noise leaves no positive eigenvalue, the client is as one without rows."""
    none = Factor(torch.zeros(2, 2), torch.zeros(2), torch.zeros(()))
    assert torch.equal(rounded(none).precision, none.precision)
    for secret in range(2):
        fitted = fit(method(epsilon=0.05, secret=secret), federation((3, 2, 4)))
        assert all(
            v.isfinite().all()
            for v in vars(fitted.progress.server.factors).values()
            if isinstance(v, Tensor)
        )


def unknown_noise(batch: Any) -> None:
    spread = pyro.sample("spread", dist.HalfNormal(1.0))
    loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
    with batch.clients():
        level = pyro.sample("level", dist.Normal(loc, 1.0))
        with batch.data():
            pyro.sample("y", dist.StudentT(4.0, level, spread), obs=batch.y)


def test_what_has_other_unknowns_than_a_linear_predictor_is_refused() -> None:
    how = RowNoise(epsilon=1.0, delta=1e-4, max_row_norm=2.0)
    with pytest.raises(ProgramError, match="fix the other parameters of the likelihood"):
        fit(two_stage(unknown_noise, draws=DRAWS, row_noise=how), federation())


def test_a_smaller_cohort_is_refused() -> None:
    with pytest.raises(ValueError, match="a smaller cohort cannot replace"):
        fit(method(), rows(), cohort=2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"epsilon": 0.0}, "epsilon is 0.0"),
        ({"max_row_norm": -1.0}, "max_row_norm is -1.0"),
        ({"delta": 1.0}, "delta is 1.0"),
        ({"steps": 0}, "steps is 0"),
    ],
)
def test_numbers_out_of_range(options: dict[str, Any], says: str) -> None:
    how = RowNoise(epsilon=1.0, delta=1e-4, max_row_norm=2.0)
    with pytest.raises(ValueError, match=says):
        replace(how, **options)
