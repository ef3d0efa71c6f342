"""Every family's log density, mean and draws, against scipy or a written-out formula."""

from typing import Any

import numpy as np
import pyro
import pytest
import scipy.stats as st
import torch

from hierfl.models import families
from hierfl.models.families.names import FAMILIES
from tests.models.families.cases import CASES, COUNTS, ETA, TIMES, TRIALS, Case

NAMES = sorted(CASES)


def made(case: Case, dtype: torch.dtype = torch.float64) -> Any:
    return case.family.of(torch.tensor(case.eta, dtype=dtype), **case.names(dtype))


def test_every_family_has_a_case() -> None:
    plain = {case.family.name for case in CASES.values() if case.family.bounds is None}
    assert plain == {*FAMILIES, "piecewise_exponential"}


@pytest.mark.parametrize("name", NAMES)
def test_log_density(name: str) -> None:
    case = CASES[name]
    found = made(case).log_prob(torch.tensor(case.values))
    np.testing.assert_allclose(found.numpy(), case.by_hand(case.eta), rtol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_log_density_in_single_precision(name: str) -> None:
    case = CASES[name]
    value = torch.tensor(case.values)
    torch.set_default_dtype(torch.float32)
    if value.is_floating_point():
        value = value.float()
    found = made(case, torch.float32).log_prob(value)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), case.by_hand(case.eta), rtol=2e-4, atol=2e-5)


@pytest.mark.slow("negative_binomial_above")
@pytest.mark.parametrize("name", NAMES)
def test_draws_have_the_mean_and_the_variance(name: str) -> None:
    case = CASES[name]
    fn = made(case)
    count = 2_000 if name == "negative_binomial_above" else 20_000  # drawn again where too low
    drawn = fn.sample((count,)).double()
    if case.family.kind in ("category", "ordered"):
        levels = torch.arange(fn.probs.shape[-1])
        share = (drawn[..., None] == levels).double().mean(0)
        torch.testing.assert_close(share, fn.probs, atol=0.02, rtol=0.0)
        return
    if name == "von_mises":  # by the angle from the mean direction
        apart = torch.remainder(drawn - fn.mean + np.pi, 2.0 * np.pi) - np.pi
        drawn = fn.mean + apart
    error = (fn.variance / count).sqrt()
    assert bool(((drawn.mean(0) - fn.mean).abs() <= 4.5 * error).all())
    assert bool(
        (drawn.var(0) / fn.variance - 1.0).abs().nan_to_num().max()
        < (0.6 if name == "student" else 0.25)
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_links_are_those_of_the_means(name: str) -> None:
    """The mean of a row is the inverse link of its linear predictor, by the family's own field `link`."""
    case = CASES[name]
    eta = torch.tensor(case.eta)
    apart = ("cumulative", "hurdle", "sratio", "acat", "multinomial", "dirichlet")
    plain = not name.startswith(apart) or name == "hurdle_gamma"
    plain &= case.family.bounds is None
    if name in ("lognormal", "categorical", "piecewise_exponential", "ordered_beta") or not plain:
        return  # eta is no transformed mean
    mean = case.family.of(eta, **case.names()).mean
    if name.startswith("zero_inflated") or name == "hurdle_gamma":
        mean = mean / 0.7
    mean = mean / torch.tensor(TRIALS) if "binomial" in name and "negative" not in name else mean
    inverse = {
        "identity": eta,
        "log": eta.exp(),
        "inverse": 1.0 / eta,
        "logit": eta.sigmoid(),
        "probit": torch.special.ndtr(eta),
        "cloglog": 1.0 - (-eta.exp()).exp(),
        "tan_half": 2.0 * eta.atan(),
    }
    torch.testing.assert_close(mean, inverse[case.family.link])


@pytest.mark.parametrize("name", NAMES)
def test_expand_masks_and_scales_keep_the_density(name: str) -> None:
    case = CASES[name]
    fn, value = made(case), torch.tensor(case.values)
    wide = fn.expand((4, 2, 3))
    torch.testing.assert_close(wide.log_prob(value), fn.log_prob(value).expand(4, 2, 3))
    assert wide.sample().shape == (4, 2, 3, *fn.event_shape)
    mask: Any = torch.tensor([[True, False, True], [False, True, True]])

    def program() -> None:
        both = pyro.plate("clients", 2, dim=-2), pyro.plate("data", 3, dim=-1)
        with both[0], both[1], pyro.poutine.mask(mask=mask), pyro.poutine.scale(scale=2.0):
            pyro.sample("y", fn, obs=value)

    trace = pyro.poutine.trace(program).get_trace()
    wanted = 2.0 * fn.log_prob(value)[mask].sum()
    torch.testing.assert_close(trace.log_prob_sum(), wanted)


def test_pyro_checks_the_values_of_our_own_distributions() -> None:
    fn = families.piecewise_exponential((1.0,)).of(
        torch.zeros(2, 3), log_hazard=torch.zeros(2), cens=torch.zeros(2, 3)
    )
    with pytest.raises(ValueError, match="within the support"):
        fn.log_prob(torch.tensor(-TIMES))


def test_counts_above_a_hurdle_have_their_probabilities() -> None:
    """Of rare counts too, of which a draw above 0 is one in 20 or one in 200."""
    torch.manual_seed(0)
    for rate, shape in ((0.05, None), (3.0, None), (0.05, 0.4), (0.005, 30.0), (4.0, 1.7)):
        known = {"hu": torch.tensor(0.0)} | (
            {} if shape is None else {"shape": torch.tensor(shape)}
        )
        name = "hurdle_poisson" if shape is None else "hurdle_negative_binomial"
        fn: Any = families.named(name).of(torch.tensor(rate).log(), **known)
        counts = np.bincount(fn.sample((20_000,)).long().numpy(), minlength=2)
        assert counts[0] == 0
        at = np.arange(1, len(counts))
        p = np.exp(fn.log_prob(torch.tensor(at)).numpy())
        error = np.sqrt(p * (1 - p) / 20_000)
        assert (abs(counts[1:] / 20_000 - p) < 4.5 * error + 1e-4).all()


def test_a_family_without_its_parameter_or_addition_is_refused() -> None:
    with pytest.raises(NameError, match="sigma"):
        families.gaussian().of(torch.tensor(ETA))
    with pytest.raises(ValueError, match="family 'binomial' needs the row field 'trials'"):
        families.binomial().of(torch.tensor(ETA))
    with pytest.raises(ValueError, match="family 'poisson' takes no row fields, not 'trials'"):
        families.poisson().check(COUNTS, {"trials": TRIALS})


FAR = [
    (families.truncated(families.gaussian(), low=0.0), -30.0, 0.1),
    (families.truncated(families.gaussian(), high=0.0), 30.0, -0.1),
    (families.truncated(families.gaussian(), 5.0, 5.5), -20.0, 5.2),
    (families.truncated(families.exponential(), high=1.0), 8.0, 0.5),
    (families.truncated(families.poisson(), low=5), -3.0, 6.0),
    (families.truncated(families.negative_binomial(), low=5), -3.0, 6.0),
]


@pytest.mark.parametrize(("family", "eta", "value"), FAR)
def test_bounds_far_from_the_mean(family: Any, eta: float, value: float) -> None:
    """In single precision as in double, with finite derivatives; draws lie between the bounds."""
    known = {"sigma": 1.0, "shape": 1.7}
    own = {name: known[name] for name in family.parameters(families.Response(1.0, 1.0))}
    found = []
    for dtype in (torch.float64, torch.float32):
        at = torch.tensor(eta, dtype=dtype, requires_grad=True)
        names = {k: torch.tensor(v, dtype=dtype) for k, v in own.items()}
        fn: Any = family.of(at, **names)
        density = fn.log_prob(torch.tensor(value, dtype=dtype))
        (slope,) = torch.autograd.grad(density, at, create_graph=True)
        (bend,) = torch.autograd.grad(slope, at)
        assert bool(slope.isfinite()) and bool(bend.isfinite())
        found.append(density.item())
    assert found[1] == pytest.approx(found[0], rel=2e-4, abs=1e-5)
    with torch.no_grad():
        drawn = fn.sample((500,))
    low, high = family.bounds
    assert low <= drawn.min() and drawn.max() <= high
    assert fn.mean.item() == pytest.approx(drawn.mean().item(), abs=5.0 * drawn.std().item() / 20.0)


def test_the_tails_of_truncated_numbers_are_those_of_scipy() -> None:
    fn: Any = families.truncated(families.gaussian(), low=0.0).of(
        torch.tensor(-30.0).double(), sigma=torch.tensor(1.0).double()
    )
    known = st.truncnorm(30.0, np.inf, loc=-30.0)
    assert fn.log_prob(torch.tensor(0.1).double()).item() == pytest.approx(known.logpdf(0.1))
    assert fn.mean.item() == pytest.approx(known.mean(), rel=1e-6)
    assert fn.variance.item() == pytest.approx(known.var(), rel=1e-4)


COUNTED = [
    (families.truncated(families.negative_binomial(), low=18), 0.3),
    (families.truncated(families.negative_binomial(), low=18), 40.0),
    (families.truncated(families.negative_binomial(), low=100), 1e5),
    (families.truncated(families.poisson(), low=18), 0.0),
]


@pytest.mark.parametrize(("family", "shape"), COUNTED)
def test_the_probability_above_a_bound_is_the_sum_of_all_counts_above(
    family: Any, shape: float
) -> None:
    mean = np.geomspace(1e-3, 20.0 * family.bounds[0], 12)
    own = {"shape": torch.tensor(shape)} if shape else {}
    eta = torch.tensor(np.log(mean)).requires_grad_()
    found = family.of(eta, **own).log_mass
    count = np.arange(family.bounds[0], 100_000.0)[:, None]
    known = st.nbinom(shape, shape / (shape + mean)) if shape else st.poisson(mean)
    each = known.logpmf(count)
    log_mass = np.logaddexp.reduce(each, 0)
    np.testing.assert_allclose(found.detach().numpy(), log_mass, rtol=1e-8, atol=1e-8)
    (slope,) = torch.autograd.grad(found.sum(), eta)
    away = (count - mean) * shape / (shape + mean) if shape else count - mean
    expected = (np.exp(each - log_mass) * away).sum(0)
    np.testing.assert_allclose(slope.numpy(), expected, rtol=1e-6, atol=1e-8)
