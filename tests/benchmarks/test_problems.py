"""The problems of `benchmarks.rounds`: their programs run, and are those that NumPyro samples."""

from typing import Any

import numpy as np
import pyro
import pytest
import torch
from pyro import poutine
from torch.distributions import biject_to

import hierfl
from benchmarks import pooled_nuts
from benchmarks.binary_models import BINARY, demo, demo_non_centered, schools_centered
from benchmarks.reference_models import Draws, Problem, radon_centered
from benchmarks.rounds import best_of
from benchmarks.rounds_models import ALL
from benchmarks.simulated_models import SIMULATED
from hierfl import ClientBatch, full_batch
from hierfl.program.sites import Model

NEW = {**BINARY, **SIMULATED}
has_numpyro = pytest.mark.skipif(
    not pooled_nuts.has_numpyro(), reason="NumPyro is not installed, and HIERFL_NUMPYRO names none"
)
# Sites of the reference, as `benchmarks.numpyro_programs` keeps them: the two must not drift apart.
SITES = {
    "demo": {"alpha", "beta", "s", "t", "intercept", "slope"},
    "demo_non_centered": {"alpha", "beta", "s", "t", "intercept", "slope"},
    "eight_schools_centered": {"mu", "tau", "theta"},
    "rare_labels": {"mu", "tau", "w"},
    "very_rare_labels": {"mu", "tau", "w"},
    "flipped": {"mu", "tau", "w"},
    "separable": {"mu", "tau", "w"},
    "poisson": {"mu", "tau", "slope", "a"},
    "negative_binomial": {"mu", "tau", "slope", "shape", "a"},
    "student_t": {"mu", "tau", "slope", "sigma", "freedom", "a"},
    "lkj": {"mu", "tau", "correlation", "sigma", "w"},
    "horseshoe": {"mu", "tau", "sigma", "log_spread", "log_own", "log_slab", "beta", "a"},
}
# The others are written the same way, or non-centered.
CENTERED: dict[str, Model] = {
    "radon": radon_centered,
    **{name: best_of(problem).model for name, problem in ALL.items()},
}
WRITTEN_APART = ("eight_schools", "demo_non_centered")


def batch_of(problem: Problem) -> ClientBatch:
    data = problem.data()
    return full_batch(data, torch.arange(data.num_clients), seed=0)


def values(model: Model, batch: ClientBatch, seed: int) -> dict[str, torch.Tensor]:
    """Values of every site, near the middle of its prior."""
    pyro.set_rng_seed(seed)
    nodes: Any = poutine.trace(model).get_trace(batch).nodes
    out = {}
    for name, node in nodes.items():
        if node["type"] == "sample" and not node["is_observed"] and "plate" not in name:
            if type(node["fn"]).__name__ == "_Subsample":
                continue
            to = biject_to(node["fn"].support)
            out[name] = to(0.3 * to.inv(node["value"]).clamp(-3.0, 3.0))
    return out


def log_density(model: Model, batch: ClientBatch, at: dict[str, torch.Tensor]) -> float:
    trace = poutine.trace(poutine.condition(model, data=at)).get_trace(batch)
    return float(trace.log_prob_sum())


def by_client(at: dict[str, torch.Tensor], clients: int) -> dict[str, Any]:
    """The same values without the rows' dimension of local sites."""
    return {
        name: (v.squeeze(1) if v.shape[:2] == (clients, 1) else v).numpy() for name, v in at.items()
    }


def prior_draws(problem: Problem, model: Model, count: int = 3) -> Draws:
    batch, found = batch_of(problem), []
    for seed in range(count):
        found.append(by_client(values(model, batch, seed), batch.num_clients))
    return {name: torch.stack([torch.as_tensor(one[name]) for one in found]) for name in found[0]}


@pytest.mark.parametrize("name", NEW)
def test_every_program_runs_and_has_the_sites_of_its_reference(name: str) -> None:
    problem = NEW[name]
    draws = problem.effects(prior_draws(problem, best_of(problem).model))
    assert SITES[name] <= draws.keys()
    assert all(draws[site].isfinite().all() for site in SITES[name])
    hierfl.read(best_of(problem).model, hierfl.guides.mean_field, problem.data(), seed=0)


def test_both_ways_to_write_a_problem_are_one_posterior() -> None:
    """The joint density of the effects differs from that of the offsets by the Jacobian alone."""
    problem = BINARY["demo"]
    batch = batch_of(problem)
    apart = values(demo_non_centered, batch, 0)
    at = dict(apart)
    at["intercept"] = apart["alpha"] + apart["s"] * at.pop("e")
    at["slope"] = apart["beta"] + apart["t"] * at.pop("f")
    jacobian = 4 * (apart["s"].log() + apart["t"].log().sum())
    one, other = log_density(demo_non_centered, batch, apart), log_density(demo, batch, at)
    assert one - float(jacobian) == pytest.approx(other, abs=1e-8)
    draws = {name: v.reshape(1, *v.shape) for name, v in by_client(apart, 4).items()}
    made = problem.effects({name: torch.as_tensor(v) for name, v in draws.items()})
    assert torch.allclose(made["slope"][0], at["slope"][:, 0])
    assert torch.allclose(made["intercept"][0], at["intercept"][:, 0])


def test_the_hard_federations_are_as_they_are_described() -> None:
    for name, low, high in (("rare_labels", 0.05, 0.07), ("very_rare_labels", 0.02, 0.04)):
        data = ALL[name].data()
        positive = torch.zeros(data.num_clients).index_add(0, data.row_client, data.fields["y"])
        assert data.counts.tolist() == [76] * 29 and int((positive == 0).sum()) >= 5
        assert low < float(data.fields["y"].mean()) < high
    data = ALL["separable"].data().select([0])
    assert torch.equal(data.fields["y"] == 1.0, data.fields["x"][:, 1] > 0.0)


def test_schools_centered_is_the_reference_model() -> None:
    batch = batch_of(ALL["eight_schools_centered"])
    at = values(schools_centered, batch, 0)
    expected = (
        torch.distributions.Normal(0.0, 5.0).log_prob(at["mu"])
        + torch.distributions.HalfCauchy(5.0).log_prob(at["tau"])
        + torch.distributions.Normal(at["mu"], at["tau"]).log_prob(at["theta"]).sum()
    )
    rows = hierfl.datasets.eight_schools()
    sigma = rows.client_fields.get("sigma", rows.fields.get("sigma"))
    assert sigma is not None
    own = torch.distributions.Normal(at["theta"].reshape(-1), sigma.reshape(-1).double())
    expected = expected + own.log_prob(rows.fields["y"].double()).sum()
    assert log_density(schools_centered, batch, at) == pytest.approx(float(expected))


# ---------------------------------------------------------------------------------- NumPyro
@has_numpyro
@pytest.mark.parametrize("name", [n for n in ALL if n not in WRITTEN_APART])
def test_numpyro_samples_the_same_density(name: str) -> None:
    problem, model = ALL[name], CENTERED[name]
    batch = batch_of(problem)
    points = [values(model, batch, seed) for seed in range(2)]
    ours = [log_density(model, batch, at) for at in points]
    both = [by_client(at, batch.num_clients) for at in points]
    theirs = pooled_nuts.log_densities(
        problem, {s: np.stack([b[s] for b in both]) for s in both[0]}
    )
    assert theirs == pytest.approx(ours, rel=1e-6)
