"""Every distribution of Pyro, observed, global and local, on every engine: it works, or is
refused by name.
"""

import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.mcmc.util import initialize_model
from torch import Tensor

import hierfl
from hierfl import ClientBatch, ClientData, ProgramError, full_batch, guides
from hierfl.core.trees import named_leaves
from hierfl.diagnostics.nuts import sampled_program
from hierfl.engine.rounds import begin, rounds
from hierfl.program.handlers import log_joint, unchecked
from hierfl.program.sites import Model
from tests.program.distributions import MAKE, VALUE, Make, every_name
from tests.programs import fit, settings
from tests.sampled import sampled

OF_CLIENT = torch.tensor([0, 0, 0, 1, 1])
RAW = re.compile(
    r"vmap: |functorch|NotImplementedError|RuntimeError|AssertionError|TypeError|Trace Shapes|"
    r"must also define|autograd\.Function|Tensor of shape|\.item\(\)"
)

BOTH, ALL = ("global", "local"), ("observed", "global", "local")
IN_PLATES = ("observed", "local")

# What is refused: words of the sentence -> in which roles -> distributions. Everything else must
# work.
REFUSED: list[tuple[str, tuple[str, ...], str]] = [
    (
        "is discrete",
        BOTH,
        "DirichletMultinomial GammaPoisson Geometric LogNormalNegativeBinomial Multinomial "
        "NegativeBinomial Poisson SpanningTree ZeroInflatedDistribution "
        "ZeroInflatedNegativeBinomial ZeroInflatedPoisson",
    ),
    (
        "is discrete",
        ("global",),
        "Bernoulli BetaBinomial Binomial Categorical ExtendedBetaBinomial ExtendedBinomial "
        "OneHotCategorical OneHotCategoricalStraightThrough OrderedLogistic",
    ),
    (
        "no map from real numbers onto its support",
        BOTH,
        "CoalescentTimes CoalescentTimesWithRate OneOneMatching OneTwoMatching ProjectedNormal "
        "VonMises3D",
    ),
    ("is a latent angle", BOTH, "SineBivariateVonMises SineSkewed VonMises"),
    (
        "cannot be repeated over its plates",
        IN_PLATES,
        "AVFMultivariateNormal GroupedNormalNormal LKJ LKJCorrCholesky OMTMultivariateNormal "
        "SoftAsymmetricLaplace",
    ),
    ("cannot be repeated over its plates", ("local",), "TruncatedPolyaGamma"),
    ("has no log density", ALL, "LinearHMM"),
    ("has no log density", ("global",), "GroupedNormalNormal"),
    ("has no log density", ("observed",), "GaussianScaleMixture"),
    ("has no support", BOTH, "GaussianScaleMixture"),
    ("has no support", ALL, "Rejector"),
    ("fixes its value: write it as pyro.deterministic", BOTH, "Delta"),
    ("at site 'w' (Empirical): check the scales there", BOTH, "Empirical"),
    ("which the map from real numbers onto its support does not reach", BOTH, "GeneralizedPareto"),
]
# NUTS takes gradients by torch.autograd, and draws its start from the prior.
REFUSED_BY_FITS: list[tuple[str, tuple[str, ...], str]] = [
    ("has no gradient by torch.func.grad", ("observed",), "CoalescentTimesWithRate"),
]
REFUSED_BY_NUTS = [
    ("cannot be drawn from", BOTH, "GammaGaussianHMM GaussianMRF ImproperUniform"),
    ("at site 'y' (VonMises3D): check the scales there", ("observed",), "VonMises3D"),
]


def wanted(name: str, role: str, cases: list[tuple[str, tuple[str, ...], str]]) -> str | None:
    """Return the words by which a distribution is refused in a role; None if it works."""
    return next(
        (
            words
            for words, roles, names in REFUSED + cases
            if role in roles and name in names.split()
        ),
        None,
    )


def test_the_table_is_of_every_distribution() -> None:
    assert set(every_name()) <= set(MAKE)  # an earlier torch has fewer


def rows_of(make: Make, value: Tensor | None) -> ClientData:
    """Return five rows of two clients whose labels are drawn from a distribution, or all of one
    value.
    """
    torch.manual_seed(0)
    x = torch.randn(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Wishart draws again what is singular
        values = [make(0.3 * e).sample() if value is None else value for e in x]
    return ClientData.from_arrays(OF_CLIENT, x=x, y=torch.stack(values))


def plain_rows() -> ClientData:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 5, generator=g)
    return ClientData.from_arrays(OF_CLIENT, x=x, y=y)


def summed(value: Tensor, fn: Any) -> Tensor:
    """Return the sum of a value over its event."""
    return value.flatten(-fn.event_dim).sum(-1) if fn.event_dim else value


def observed(make: Make) -> Model:
    def model(batch: ClientBatch) -> None:
        with batch.clients():
            w = pyro.sample("w", dist.Normal(0.0, 1.0))
            with batch.data():
                pyro.sample("y", make(w * batch.x), obs=batch.y)

    return model


def latent_global(make: Make) -> Model:
    def model(batch: ClientBatch) -> None:
        fn = make(torch.tensor(0.3))
        w = summed(pyro.sample("w", fn), fn)
        with batch.clients(), batch.data():
            pyro.sample("y", dist.Normal(w * batch.x, 1.0), obs=batch.y)

    return model


def latent_local(make: Make) -> Model:
    def model(batch: ClientBatch) -> None:
        with batch.clients():
            fn = make(torch.full((batch.num_clients, 1), 0.3))
            w = summed(pyro.sample("w", fn), fn)
            with batch.data():
                pyro.sample("y", dist.Normal(w * batch.x, 1.0), obs=batch.y)

    return model


ROLES: dict[str, Callable[[Make], Model]] = {
    "observed": observed,
    "global": latent_global,
    "local": latent_local,
}


CARRIED = (
    "DiscreteHMM GaussianHMM GaussianMRF Multinomial NanMaskedMultivariateNormal NanMaskedNormal "
    "OrderedLogistic"
)
# Sites that work run the same code: every eighth of them in each run of the tests, and all others.
CELLS = [(name, role) for name in every_name() for role in ROLES]
WORKING = [cell for cell in CELLS if not wanted(*cell, REFUSED_BY_FITS + REFUSED_BY_NUTS)]
QUICK = {*CELLS} - {*WORKING} | {*WORKING[::8]} | {(name, "observed") for name in CARRIED.split()}


@cache
def of(name: str, role: str) -> tuple[Model, ClientData]:
    make = MAKE[name]
    data = rows_of(make, VALUE.get(name)) if role == "observed" else plain_rows()
    return ROLES[role](make), data


def said(run: Callable[[], object]) -> str | None:
    """Return the sentence by which a run is refused; None if it works. What is raw fails here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "site 'y'|site 'w'")  # one client at a time
        try:
            run()
        except (ProgramError, ValueError) as error:
            message = str(error)
            assert not RAW.search(message), message
            assert re.search(r"'[wy]'", message), message
            return message
    return None


def both_engines(name: str, role: str) -> hierfl.Fit:
    """Take a step on two engines, which must agree, with finite densities and gradients."""
    model, data = of(name, role)
    first = fit(hierfl.methods.fedsvi(model, guides.mean_field), data, rounds=1)
    one_by_one = replace(first.federation, settings=settings(engine="sequential"))
    *_, there = rounds(one_by_one, begin(one_by_one), 1)  # of the program that was read
    runs = [first, replace(first, federation=one_by_one, progress=there)]
    elbo = [float(run.history["elbo"].iloc[0]) for run in runs]
    assert np.isfinite(elbo[0])
    assert elbo[0] == pytest.approx(elbo[1], rel=1e-8)
    for path, value in named_leaves(runs[0].message).items():
        assert bool(value.isfinite().all()), path
        torch.testing.assert_close(value, named_leaves(runs[1].message)[path], rtol=1e-6, atol=1e-8)
    return runs[0]


def nuts_potential(name: str, role: str) -> None:
    """Build the potential of NUTS, compare it with the log joint, and take its gradient."""
    model, data = of(name, role)
    program = sampled_program(model, data)
    batch = full_batch(data, torch.arange(2))
    pyro.set_rng_seed(0)
    at, potential, transforms, _ = initialize_model(lambda: model(batch))
    at = {k: v.detach().requires_grad_() for k, v in at.items()}
    if not at:  # the only latent site is summed out
        return
    energy = potential(at)
    slopes = torch.autograd.grad(energy, list(at.values()))
    assert all(bool(slope.isfinite().all()) for slope in slopes)
    values = {k: t.inv(at[k]) for k, t in transforms.items()}
    own, shared = log_joint(program.model, values, batch, {})
    jacobian = sum(
        (t.log_abs_det_jacobian(values[k], at[k]).sum() for k, t in transforms.items()),
        torch.zeros(()),
    )
    torch.testing.assert_close(-energy, own.sum() + shared - jacobian, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings(
    "ignore:There is a performance drop", "ignore:class LKJCorrCholesky", "ignore:Singular sample"
)
@pytest.mark.parametrize(("name", "role"), sampled(CELLS, QUICK))
def test_it_works_or_is_refused_by_name(name: str, role: str) -> None:
    fits: list[hierfl.Fit] = []
    error = said(lambda: fits.append(both_engines(name, role)))
    assert agrees(error, wanted(name, role, REFUSED_BY_FITS)), error
    error = said(lambda: nuts_potential(name, role))
    assert agrees(error, wanted(name, role, REFUSED_BY_NUTS)), error
    if fits and role == "observed":
        asked_of_labels(name, fits[0])
    elif fits:
        unknown = wanted(name, role, REFUSED_BY_NUTS)
        assert agrees(said(lambda: fits[0].prior(3)), unknown and "cannot be drawn from its prior")


def agrees(error: str | None, words: str | None) -> bool:
    """Return whether a program was refused in the words that are expected, or was expected to
    work.
    """
    return error is None if words is None else words in str(error)


def asked_of_labels(name: str, fitted: hierfl.Fit) -> None:
    """Predict, draw labels, and take log-likelihoods: each works, or names the site."""
    data = of(name, "observed")[1]
    error = said(lambda: fitted.predict(data, draws=3).scores())
    assert error is None or "has no mean and variance in closed form" in error
    error = said(lambda: fitted.posterior_predictive(3))
    assert error is None or ((name in VALUE or name == "SpanningTree") and "no sampler" in error)
    rows = fitted.posterior(3, log_likelihood=True)["log_likelihood"]["y"]
    assert rows.shape == (1, 3, 5)
    assert np.isfinite(np.asarray(rows)).all()


# ------------------------------------------------------------------ what the sentences promise
def test_a_prediction_of_students_t_is_that_of_its_closed_form() -> None:
    """Its degrees of freedom are sampled, so that they differ between draws."""

    def model(batch: ClientBatch) -> None:
        nu = pyro.sample("nu", dist.Gamma(20.0, 2.0))
        with batch.clients():
            w = pyro.sample("w", dist.Normal(0.0, 1.0))
            with batch.data():
                pyro.sample("y", dist.StudentT(nu, w, 0.5), obs=batch.y)

    data = plain_rows()
    for engine in ("vectorized", "sequential"):
        fitted = fit(hierfl.methods.fedsvi(model, guides.mean_field), data, rounds=1, engine=engine)
        draws, prediction = fitted.draws(20), fitted.predict(data, draws=20)
        nu, w = draws.shared["nu"], draws.own["w"][:, OF_CLIENT]
        spread = (0.25 * nu / (nu - 2.0)).mean() + w.var(0, correction=0)
        assert prediction.sd is not None
        assert torch.allclose(prediction.mean, w.mean(0))
        assert torch.allclose(prediction.sd, spread.sqrt())


def test_a_program_that_vmap_does_not_know_runs_one_client_at_a_time() -> None:
    model, data = of("Stable", "observed")
    with pytest.warns(UserWarning, match=r"site 'y' \(Stable\) of the model.*one at a time"):
        program = hierfl.read(model, guides.mean_field, data)
    assert not program.mapped


@pytest.mark.parametrize("name", CARRIED.split())
def test_what_pyro_writes_into_tensors_is_carried_with_the_same_density(name: str) -> None:
    """Also of missing values and of counts without a probability, and its gradient."""
    rows = rows_of(MAKE[name], VALUE.get(name))
    e, y = rows.fields["x"].double(), rows.fields["y"].double()
    if name.startswith("Nan"):
        y.view(len(y), -1)[0, 0] = torch.nan

    def density(e: Tensor, y: Tensor) -> Tensor:
        return MAKE[name](e).log_prob(y)

    at = e.clone().requires_grad_()
    expected = density(at, y)
    (slope,) = torch.autograd.grad(expected.sum(), at)
    with unchecked():
        mapped = torch.vmap(density)(torch.stack([e, e]), torch.stack([y, y]))
        slopes = torch.func.grad(lambda e: density(e, y).sum())(e)
    torch.testing.assert_close(mapped, torch.stack([expected, expected]).detach())
    torch.testing.assert_close(slopes, slope)


def test_a_count_without_a_probability_adds_nothing() -> None:
    logits, counts = torch.tensor([0.0, -torch.inf, 0.0]), torch.tensor([2.0, 0.0, 1.0])
    expected = dist.Multinomial(3, logits=logits).log_prob(counts)
    with unchecked():
        log = dist.Multinomial(3, logits=logits).log_prob(counts)
    torch.testing.assert_close(log, expected)
