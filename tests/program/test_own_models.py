"""What Pyro users write in their own models: it works, or one sentence says the way that works."""

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import Tensor

import hierfl
from hierfl import ClientBatch, ClientData, ProgramError, full_batch
from hierfl.diagnostics.formula_tables import titled
from hierfl.diagnostics.local_draws import local_draws
from hierfl.nodes import in_process
from hierfl.program.handlers import log_joint, unchecked
from hierfl.program.read import read_model
from hierfl.runs.choice import choose
from tests.programs import learned

RNG = np.random.default_rng(0)
CLIENT = np.repeat(np.arange(6), 12)
X = RNG.normal(size=72)
Y = RNG.normal(size=6)[CLIENT] + 0.5 * X + 0.6 * RNG.normal(size=72)
SEEN = np.arange(72) % 4 != 0
Observe = Callable[[ClientBatch, Any], None]


def model_of(observe: Observe) -> Callable[[ClientBatch], None]:
    """Return a model with a level of each client; `observe` is given the row's distribution."""

    def model(batch: ClientBatch) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        s = pyro.sample("s", dist.HalfNormal(1.0))
        with batch.clients():
            a = pyro.sample("a", dist.Normal(mu, tau))
            with batch.data():
                observe(batch, dist.Normal(a + slope * batch.x, s))

    return model


def masked(batch: ClientBatch, fn: Any) -> None:
    pyro.sample("y", fn.mask(~batch.y.isnan()), obs=batch.y.nan_to_num())


def in_handler(batch: ClientBatch, fn: Any) -> None:
    with poutine.mask(mask=~batch.y.isnan()):
        pyro.sample("y", fn, obs=batch.y.nan_to_num())


def nan_masked(batch: ClientBatch, fn: Any) -> None:
    pyro.sample("y", dist.NanMaskedNormal(fn.loc, fn.scale), obs=batch.y)


def whole(batch: ClientBatch, fn: Any) -> None:
    pyro.sample("y", fn, obs=batch.y)


def gathered(observe: Observe, data: ClientData) -> hierfl.Fit:
    method = hierfl.methods.two_stage(model_of(observe), draws=300)
    return hierfl.fit(method, data, seed=0, progress=False)


@pytest.mark.slow("masked", "nan_masked")
@pytest.mark.filterwarnings("ignore:do not trust the posterior")
@pytest.mark.parametrize("observe", [masked, in_handler, nan_masked])
def test_rows_whose_response_is_nan_and_masked_are_as_if_they_were_not_there(
    observe: Observe,
) -> None:
    data = ClientData.from_arrays(CLIENT, x=X, y=np.where(SEEN, Y, np.nan))
    seen = ClientData.from_arrays(CLIENT[SEEN], x=X[SEEN], y=Y[SEEN])
    masked_fit = gathered(observe, data)
    # poutine.mask is recognized as Gaussian, .mask() is not: both compared with rows left out
    expected = gathered(masked if observe is nan_masked else observe, seen)
    for name, value in masked_fit.draws(200).shared.items():
        torch.testing.assert_close(value, expected.draws(200).shared[name], rtol=1e-4, atol=1e-5)
    scores = masked_fit.predict(data).scores()
    assert scores["rows"].tolist() == [9] * 6
    np.testing.assert_allclose(scores, expected.predict(seen).scores(), rtol=1e-4)
    assert bool(masked_fit.predict(data).mean.isfinite().all())
    assert masked_fit.replicate(data).shape == (200, 72)


def zeros_trick(batch: ClientBatch, fn: Any) -> None:
    pyro.sample("zero", dist.Poisson(9.0 - fn.log_prob(batch.y)), obs=torch.zeros_like(batch.y))


def ones_trick(batch: ClientBatch, fn: Any) -> None:
    pyro.sample("one", dist.Bernoulli((fn.log_prob(batch.y) - 9.0).exp()), obs=torch.tensor(1.0))


@pytest.mark.parametrize("trick", [zeros_trick, ones_trick])
def test_a_constant_is_observed_by_rows_whose_fields_are_in_its_parameters(trick: Observe) -> None:
    data = ClientData.from_arrays(CLIENT, x=X, y=Y)
    assert choose(model_of(trick), data).method.name == "two_stage"


@pytest.mark.slow
@pytest.mark.parametrize("trick", [zeros_trick, ones_trick])
def test_an_observed_constant_gives_the_posterior_of_the_rows(
    trick: Observe, tmp_path: Path
) -> None:
    data = ClientData.from_arrays(CLIENT, x=X, y=Y)
    expected = gathered(whole, data).draws(200).shared
    over = hierfl.nodes.fit(
        hierfl.methods.two_stage(model_of(trick), draws=300), in_process(data, tmp_path), seed=0
    )
    for name, value in gathered(trick, data).draws(200).shared.items():
        torch.testing.assert_close(value.mean(0), expected[name].mean(0), rtol=0.0, atol=0.1)
        torch.testing.assert_close(over.draws(200).shared[name], value, rtol=1e-4, atol=1e-4)


def nan_vectors(a: Tensor, batch: ClientBatch) -> None:
    pyro.sample("y", dist.NanMaskedMultivariateNormal(a, torch.eye(2)), obs=batch.y)


def nan_entries(a: Tensor, batch: ClientBatch) -> None:
    pyro.sample("y", dist.NanMaskedNormal(a, torch.ones(2)).to_event(1), obs=batch.y)


def entries_by_hand(a: Tensor, batch: ClientBatch) -> None:
    log = dist.Normal(a, 1.0).log_prob(batch.y.nan_to_num())
    pyro.factor("y", torch.where(batch.y.isnan(), 0.0, log).sum(-1))


def test_responses_of_which_some_entries_are_nan_are_those_of_the_others() -> None:
    g = torch.Generator().manual_seed(0)
    y = torch.randn(72, 2, generator=g)
    y[torch.rand(72, 2, generator=g) < 0.2] = torch.nan
    data, means = ClientData.from_arrays(CLIENT, y=y), []
    for observe in (nan_vectors, nan_entries, entries_by_hand):

        def model(batch: ClientBatch, observe: Any = observe) -> None:
            mu = pyro.sample("mu", dist.Normal(torch.zeros(2), 2.0).to_event(1))
            with batch.clients():
                a = pyro.sample("a", dist.Normal(mu, 0.5).to_event(1))
                with batch.data():
                    observe(a, batch)

        fit = hierfl.fit(hierfl.methods.two_stage(model, draws=300), data, seed=0, progress=False)
        means.append(fit.draws(200).shared["mu"].mean(0))
        if observe is not entries_by_hand:
            assert np.isfinite(fit.predict(data).scores().to_numpy()).all()
    torch.testing.assert_close(means[0], means[2], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(means[1], means[2], rtol=1e-4, atol=1e-5)


def test_missing_responses_that_count_are_refused_with_the_mask() -> None:
    data = ClientData.from_arrays(CLIENT, x=X, y=np.where(SEEN, Y, np.nan))
    with pytest.raises(ValueError, match=r"mask these rows as well \(fn.mask\(~batch.y.isnan"):
        hierfl.fit(model_of(whole), data)


# ------------------------------------------------------------------ what vmap cannot carry
def condition(batch: ClientBatch) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    scale = 1.0 if mu > 0 else 2.0
    with batch.clients():
        a = pyro.sample("a", dist.Normal(mu, scale))
        with batch.data():
            pyro.sample("y", dist.Normal(a, 1.0), obs=batch.y)


def taken_out(batch: ClientBatch) -> None:
    mu = float(pyro.sample("mu", dist.Normal(0.0, 2.0)))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(mu, 1.0))
        with batch.data():
            pyro.sample("y", dist.Normal(a, 1.0), obs=batch.y)


def written(batch: ClientBatch) -> None:
    mu = torch.zeros(2)
    mu[0] = pyro.sample("mu", dist.Normal(0.0, 2.0))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(mu.sum(), 1.0))
        with batch.data():
            pyro.sample("y", dist.Normal(a, 1.0), obs=batch.y)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (condition, r"`scale = 1.0 if mu > 0 else 2.0`: .*torch.where\(condition, a, b\)"),
        (taken_out, r"in line \d+ of .*taken out of their tensor: .*float\(\)"),
        (written, r"`mu\[0\] = .*torch.cat, torch.stack"),
    ],
)
def test_a_line_that_vmap_cannot_carry_is_named_with_its_fix(model: Any, words: str) -> None:
    data = ClientData.from_arrays(CLIENT, x=X, y=Y)
    with pytest.raises(ProgramError, match=f"{words}.*or name a method"):
        hierfl.fit(model, data)


def ordered(batch: ClientBatch) -> None:
    first = pyro.sample("first", dist.Normal(0.0, 2.0))
    gap = pyro.sample("gap", dist.HalfNormal(torch.ones(2)).to_event(1))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with batch.clients():
        shift = pyro.sample("shift", dist.Normal(0.0, tau))
        with batch.data():
            cuts = torch.cat([first[..., None], first[..., None] + gap.cumsum(-1)], -1)
            pyro.sample("k", dist.OrderedLogistic(shift + batch.x, cuts), obs=batch.k)


def counts(batch: ClientBatch) -> None:
    mu = pyro.sample("mu", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with batch.clients():
        s = pyro.sample("s", dist.Normal(mu, tau).to_event(1))
        with batch.data():
            probs = torch.softmax(s, -1)
            pyro.sample("k", dist.Multinomial(total_count=10, probs=probs), obs=batch.k)


@pytest.mark.parametrize("model", [ordered, counts])
def test_ordered_levels_and_counts_are_fitted_as_other_rows_are(model: Any) -> None:
    values = (
        RNG.integers(0, 4, 72) if model is ordered else RNG.multinomial(10, [0.2, 0.3, 0.5], 72)
    )
    data = ClientData.from_arrays(CLIENT, x=X, k=values)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose(model, data).method.name == "two_stage"
        fitted = hierfl.fit(hierfl.methods.fedsvi(model), data, rounds=1, seed=0)
    assert fitted.program.mapped and len(fitted.predict(data, draws=5).scores()) == 6


# ------------------------------------------------------------------ plates
def own_plates(batch: ClientBatch) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    with pyro.plate("clients", 6, dim=-2):
        a = pyro.sample("a", dist.Normal(mu, 1.0))
        with pyro.plate("data", 12, dim=-1):
            pyro.sample("y", dist.Normal(a, 1.0), obs=batch.y)


def flat_plates(batch: ClientBatch) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    with pyro.plate("hospitals", 6):
        a = pyro.sample("a", dist.Normal(mu, 1.0))
    with pyro.plate("rows", 72):
        pyro.sample("y", dist.Normal(a[batch.k], 1.0), obs=batch.y)


def besides_clients(batch: ClientBatch) -> None:
    with pyro.plate("clients", batch.num_clients):
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with batch.clients(), batch.data():
        pyro.sample("y", dist.Normal(a[:, None], 1.0), obs=batch.y)


def beside(batch: ClientBatch) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    with batch.clients():
        with pyro.plate("arms", 3):
            a = pyro.sample("a", dist.Normal(mu, 1.0))
        with batch.data():
            pyro.sample("y", dist.Normal(a[..., :1], 1.0), obs=batch.y)


def subsampled(batch: ClientBatch) -> None:
    with batch.clients():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", batch.num_rows, subsample_size=3, dim=-1) as chosen:
            pyro.sample("y", dist.Normal(a, 1.0), obs=batch.y[:, chosen])


def one_by_one(batch: ClientBatch) -> None:
    for i in pyro.plate("clients", batch.num_clients):
        a = pyro.sample(f"a{i}", dist.Normal(0.0, 1.0))
        pyro.sample(f"y{i}", dist.Normal(a, 1.0).expand([5]).to_event(1), obs=batch.y[i])


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            own_plates,
            r"plate 'clients', of 6, is not the batch's own: open `with batch.clients\(\):` in place of",
        ),
        (flat_plates, r"'rows' has \d+.*whose plates .* are batch.clients\(\) and batch.data"),
        (beside, r"'a': plates beside clients .*dim=-3\), .*to_event\(1\): docs/recipes.md"),
        (besides_clients, r"next to batch.clients\(\): open only `with batch.clients\(\):`"),
        (subsampled, r"'rows' takes a subsample: open batch.data\(\).*batch_size="),
        (one_by_one, r"'clients', .*open `with batch.clients\(\):`"),
    ],
)
def test_plates_of_ones_own_are_refused_with_the_ones_to_open(model: Any, words: str) -> None:
    with pytest.raises(ProgramError, match=words):
        hierfl.fit(model, ClientData.from_arrays(CLIENT, k=CLIENT, y=Y))


def test_a_response_that_the_model_transforms_may_lie_outside_the_support() -> None:
    def percent(batch: ClientBatch, fn: Any) -> None:
        pyro.sample("y", dist.Beta(fn.loc.exp(), 1.0), obs=batch.y / 100.0)

    shares = 100.0 / (1.0 + np.exp(-Y))
    data = ClientData.from_arrays(CLIENT, x=X, y=shares)
    assert hierfl.read(model_of(percent), hierfl.guides.mean_field, data).supports == {}


# ------------------------------------------------------------------ what is not pickled
def test_what_holds_functions_is_not_pickled_and_says_what_to_do() -> None:
    data = ClientData.from_arrays(CLIENT, x=X, y=Y)
    fitted = hierfl.fit(model_of(whole), data, seed=0)
    for value, way in (
        (fitted, r"a Fit cannot be pickled: write it with fit.save\(folder\).*hierfl.load"),
        (fitted.method, "a Method cannot be pickled: call its builder"),
        (fitted.program, "a Program cannot be pickled: read it where it is needed"),
    ):
        with pytest.raises(TypeError, match=way):
            pickle.dumps(value)
        assert copy.deepcopy(value) is value and copy.copy(value) is value
    assert pickle.loads(pickle.dumps(data)).num_rows == 72


@pytest.mark.slow
def test_a_fit_with_a_learned_param_says_that_it_is_a_point() -> None:
    data = ClientData.from_arrays(CLIENT, y=Y)
    quick = hierfl.Settings(compile=False)
    with pytest.warns(
        UserWarning,
        match=r"do not trust the posterior.*'m' is learned as a point.*give it a prior",
    ):
        fitted = hierfl.fit(learned, data, seed=0, settings=quick)
    assert str(fitted.progress.verdict)[:40] in repr(fitted)


# ------------------------------------------------------------------ what has no Gaussian factor, or vectors
def quantiles(batch: ClientBatch, fn: Any) -> None:
    pyro.sample("y", dist.AsymmetricLaplace(fn.loc, fn.scale, torch.tensor(0.3)), obs=batch.y)


def test_a_likelihood_without_curvature_is_not_given_to_two_stage() -> None:
    def by_factor(batch: ClientBatch, fn: Any) -> None:
        pyro.factor("y", -(batch.y - fn.loc).abs() / fn.scale - fn.scale.log())

    data = ClientData.from_arrays(CLIENT, x=X, y=Y)
    chosen = choose(model_of(by_factor), data)
    assert chosen.method.name == "fedsvi" and "no curvature" in chosen.why
    for observe in (robust, quantiles):
        assert choose(model_of(observe), data).method.name == "two_stage"


@pytest.mark.slow
def test_rows_with_kinks_are_fitted_and_drawn_by_slopes() -> None:
    """Quantiles fell to small steps, and draws of clients' numbers were 13 sds off."""
    fit = hierfl.fit(model_of(quantiles), ClientData.from_arrays(CLIENT, x=X, y=Y), seed=0)
    judged = local_draws(fit, seed=0)
    assert fit.summary().trustworthy is True
    assert judged is not None and judged.off() == ""


def test_an_entry_that_rows_read_by_rounding_alone_has_no_say_in_curvature() -> None:
    """The field of neighbors has entries of eigenvectors that should be 0: its Poisson rows fell to fedsvi."""
    basis = torch.tensor([1.0, 1e-16])

    def field(batch: ClientBatch) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with batch.clients(), batch.data():
            at = mu + (z[..., None, None, :] * basis).sum(-1)
            pyro.sample("y", dist.Poisson((at + batch.x).exp()), obs=batch.y.abs().round())

    data = ClientData.from_arrays(CLIENT, x=X, y=Y)
    assert choose(field, data).method.name == "two_stage"


def robust(batch: ClientBatch, fn: Any) -> None:
    pyro.sample("y", dist.StudentT(4.0, fn.loc, fn.scale), obs=batch.y)


def walk(batch: ClientBatch) -> None:
    pyro.sample("w", EVERY.GaussianRandomWalk(0.1, 5))


EVERY: Any = dist


def test_what_pyro_lacks_is_answered_by_the_recipe() -> None:
    data = ClientData.from_arrays(CLIENT, x=X, y=Y)
    with pytest.raises(ProgramError, match=r"no GaussianRandomWalk: .*joint_normal \('Series"):
        hierfl.fit(walk, data)


@pytest.mark.parametrize("rows", [{"h": [1], "y": [2.0]}, "rows.csv", torch.ones(3)])
def test_rows_of_another_kind_are_refused_with_the_frame_to_make(rows: Any) -> None:
    with pytest.raises(TypeError, match="give one pandas frame with the column 'h', or"):
        hierfl.fit(hierfl.formula("y ~ 1 + (1 | h)", clients="h"), rows)


def test_the_two_hidden_markov_models_of_the_recipe_are_one() -> None:
    """Pyro's, with padding masked, and the loop over rows; clients differ in their rows."""
    page = (Path(__file__).parents[2] / "docs" / "recipes_series.md").read_text()
    blocks = [b.partition("```")[0] for b in page.split("```python\n")[1:]]
    space: dict[str, Any] = {"torch": torch, "numpy": np, "pyro": pyro, "dist": dist}
    for block in blocks:
        if "def moves_of" in block or "def scanned" in block:
            exec(block[block.index("def ") :].partition("\n\n\nprint")[0], space)
    data = ClientData.from_arrays([0, 0, 0, 1, 1, 1, 1, 1], score=Y[:8])
    values = {"stay": torch.tensor([[0.3], [1.2]])}
    densities = [
        log_joint(space[n], values, full_batch(data), {}) for n in ("hidden_markov", "scanned")
    ]
    torch.testing.assert_close(densities[0][0], densities[1][0], rtol=1e-5, atol=1e-5)


def test_one_hot_codes_are_carried() -> None:
    codes = torch.tensor([[0, 2], [1, 1]])
    with unchecked():
        mapped = torch.vmap(lambda k: torch.nn.functional.one_hot(k, 3))(codes)
    assert torch.equal(mapped, torch.nn.functional.one_hot(codes, 3))


# ------------------------------------------------------------------ sites without a slope
@pytest.mark.parametrize("is_local", [False, True])
def test_a_site_that_is_only_compared_is_refused_by_name(is_local: bool) -> None:
    data = ClientData.from_arrays(CLIENT, x=X, y=Y)

    def model_by(mean_of: Callable[..., Tensor]) -> Callable[[ClientBatch], None]:
        def model(batch: ClientBatch) -> None:
            jump = pyro.sample("jump", dist.Normal(0.0, 1.0))
            center = pyro.sample("day" if not is_local else "center", dist.Normal(0.0, 1.0))
            with batch.clients():
                day = pyro.sample("day", dist.Normal(center, 1.0)) if is_local else center
                with batch.data():
                    pyro.sample("y", dist.Normal(mean_of(batch.x - day, jump), 1.0), obs=batch.y)

        return model

    read_model(model_by(lambda away, jump: jump * torch.sigmoid(away / 0.1)), data)
    read_model(model_by(lambda away, jump: torch.where(away > 0.0, jump * away, 0.0)), data)
    with pytest.raises(ProgramError, match=r"site 'day' is only compared.*write a smooth switch"):
        read_model(model_by(lambda away, jump: torch.where(away > 0.0, jump, 0.0)), data)


# ------------------------------------------------------------------ special functions
SPECIAL = (
    "digamma entr erf erfc erfcx gammaln i0e log_ndtr ndtr ndtri xlogy gammaincc logit".split()
)
TWO = {"xlogy", "gammaincc"}  # of two arguments


@pytest.mark.parametrize("name", SPECIAL)
def test_special_functions_are_mapped_without_a_loop(name: str) -> None:
    x = torch.tensor([0.2, 0.9], dtype=torch.float64)
    own = getattr(torch.special, name)
    with unchecked():
        carried = getattr(torch.special, name)

    def second(function: Any, x: Tensor) -> Tensor:
        of = (lambda x: function(torch.ones_like(x), x)) if name in TWO else function
        return torch.func.grad(torch.func.grad(of))(x)

    mapped = torch.vmap(lambda x: second(carried, x))(x)  # a loop warns
    torch.testing.assert_close(mapped, torch.stack([second(own, v) for v in x]))


def test_log_ndtr_has_second_derivatives_in_both_tails() -> None:
    x = torch.tensor([-30.0, 0.0, 30.0])
    with unchecked():
        second = torch.vmap(torch.func.grad(torch.func.grad(torch.special.log_ndtr)))(x)
    torch.testing.assert_close(
        second, torch.tensor([-0.9989, -2.0 / torch.pi, 0.0]), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("name", ["StickBreakingTransform", "CorrCholeskyTransform"])
def test_broken_sticks_have_second_derivatives_under_vmap(name: str) -> None:
    x = torch.tensor([0.5, -2.0, 3.0, 0.7, 0.1, -1.1], dtype=torch.float64)
    transform = getattr(torch.distributions, name)()

    def weighted(x: Tensor) -> Tensor:
        value = transform(x).flatten()
        return (value * torch.arange(float(len(value)))).sum()

    expected = weighted(x), torch.autograd.functional.hessian(weighted, x)
    with unchecked(), warnings.catch_warnings():
        warnings.filterwarnings("error", "There is a performance drop")  # of vmap, one by one
        hessian = torch.vmap(torch.func.jacrev(torch.func.grad(weighted)))(x[None])[0]
        torch.testing.assert_close((weighted(x), hessian), expected)


def test_a_summary_says_which_of_two_words_is_1() -> None:
    rows = pd.DataFrame({"h": CLIENT.astype(str), "x": X, "ill": np.where(Y > 0, "yes", "no")})
    formula = hierfl.formula("ill ~ x + (1 | h)", "bernoulli", clients="h").on(rows)
    assert titled(formula).endswith("bernoulli with link logit; 1 is yes")
