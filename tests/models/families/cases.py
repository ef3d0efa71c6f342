"""Each family with parameters, a few responses, and its log density by scipy or written out."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import scipy.stats as st
import torch
from numpy.typing import NDArray
from scipy.special import expit, gamma, log_softmax, softmax
from torch import Tensor

from hierfl.models import families
from hierfl.models.families import ResponseFamily

Array = NDArray[np.float64]

ETA = np.array([[-1.3, 0.0, 0.4], [0.9, 1.7, -0.2]])
TRIALS = np.array([[5, 7, 1], [12, 3, 4]])
COUNTS = np.array([[0, 3, 1], [12, 2, 4]])
REALS = np.array([[-2.1, 0.3, 1.9], [0.2, 1.7, 6.0]])
TIMES = np.array([[0.2, 1.3, 2.9], [0.7, 1.0, 6.0]])
SHARES = np.array([[0.02, 0.3, 0.9], [0.5, 0.71, 0.33]])
AMOUNTS = np.array([[0.0, 1.3, 2.9], [0.7, 0.0, 6.0]])
ENDS = np.array([[0.0, 0.3, 1.0], [0.5, 0.71, 0.0]])
ANGLES = np.array([[-3.1, 0.3, 1.9], [0.2, -1.7, 3.0]])
PARTS = np.array([[[0, 3, 1], [2, 0, 0], [1, 1, 1]], [[5, 0, 2], [0, 0, 0], [9, 4, 12]]])
WHOLES = np.array([[[0.2, 0.5, 0.3], [0.1, 0.1, 0.8], [0.6, 0.3, 0.1]]] * 2, dtype=np.float64)
TWO = np.stack([ETA, -0.5 * ETA + 0.3], -1)
LEVELS = np.array([[0, 1, 2], [3, 1, 0]])
THRESHOLDS = np.array([-1.0, 0.2, 1.5])
STEPS = np.array([1.5, -1.0, 0.2])


@dataclass(frozen=True)
class Case:
    """A family at some parameters: responses, and the log density of each by reference.

    Args:
        family: to test.
        values: (2, 3) responses.
        by_hand: linear predictor -> (2, 3) log densities.
        parameters: name -> value.
        additions: name -> (2, 3) row fields.
        eta: linear predictor.
    """

    family: ResponseFamily
    values: NDArray[np.generic]
    by_hand: Callable[[Array], Array]
    parameters: dict[str, float | list[float]] = field(default_factory=dict)
    additions: dict[str, NDArray[np.generic]] = field(default_factory=dict)
    eta: Array = field(default_factory=lambda: ETA)

    def names(self, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """Return parameters and additions as tensors."""
        own = {k: torch.tensor(v, dtype=dtype) for k, v in self.parameters.items()}
        return own | {k: torch.tensor(v) for k, v in self.additions.items()}


def _cumulative(cdf: Callable[[Array], Array]) -> Callable[[Array], Array]:
    def by_hand(eta: Array) -> Array:
        at = np.concatenate([[-np.inf], THRESHOLDS, [np.inf]])
        p = cdf(at[LEVELS + 1] - eta) - cdf(at[LEVELS] - eta)
        return np.log(p)

    return by_hand


def _zero_inflated(eta: Array) -> Array:
    p = 0.3 * (COUNTS == 0) + 0.7 * st.poisson.pmf(COUNTS, np.exp(eta))
    return np.log(p)


def _hurdle(values: Array, log_density: Array, above: Array | float = 1.0) -> Array:
    """0 with probability 0.3, else a density that is above 0 with probability `above`."""
    return np.where(values == 0, np.log(0.3), np.log(0.7) + log_density - np.log(above))


def _negative_binomial(eta: Array) -> Any:
    return st.nbinom(1.7, 1.7 / (1.7 + np.exp(eta)))


def _ordered_beta(eta: Array) -> Array:
    """Kubinec 2023, equation 3: the ends by cumulative logits, and a beta between them."""
    zero, one = 1.0 - expit(eta + 1.2), expit(eta - 1.4)
    inside = np.clip(ENDS, 0.1, 0.9)
    density = st.beta.logpdf(inside, 3.5 * expit(eta), 3.5 * expit(-eta))
    between = np.log(1.0 - zero - one) + density
    return np.where(ENDS == 0, np.log(zero), np.where(ENDS == 1, np.log(one), between))


def _skew_normal(eta: Array) -> Array:
    delta = -3.0 / np.sqrt(1.0 + 9.0)
    width = 0.7 / np.sqrt(1.0 - 2.0 * delta**2 / np.pi)
    return st.skewnorm.logpdf(REALS, -3.0, eta - width * delta * np.sqrt(2.0 / np.pi), width)


def _von_mises(eta: Array) -> Array:
    return st.vonmises.logpdf(ANGLES, 4.2, 2.0 * np.arctan(eta))


def _parts(eta: Array) -> Array:
    """Return the probabilities of three parts, (2, 3, 3)."""
    return softmax(np.concatenate([np.zeros((2, 3, 1)), eta], -1), -1)


def _multinomial(eta: Array) -> Array:
    each = zip(PARTS.reshape(6, 3), _parts(eta).reshape(6, 3), strict=True)
    found = [st.multinomial.logpmf(y, y.sum(), p) for y, p in each]
    return np.array(found).reshape(2, 3)


def _dirichlet(eta: Array) -> Array:
    each = zip(WHOLES.reshape(6, 3), _parts(eta).reshape(6, 3), strict=True)
    return np.array([st.dirichlet.logpdf(y, 3.5 * p) for y, p in each]).reshape(2, 3)


def _sratio(cdf: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Buerkner and Vuorre 2019, equation 10: stop at a level, having gone on at those before it."""

    def by_hand(eta: Array) -> Array:
        stop = cdf(STEPS - eta[..., None])
        p = np.ones((2, 3, 4))
        for level in range(4):
            for before in range(level):
                p[..., level] *= 1.0 - stop[..., before]
            if level < 3:
                p[..., level] *= stop[..., level]
        return np.log(np.take_along_axis(p, LEVELS[..., None], -1)[..., 0])

    return by_hand


def _acat(eta: Array) -> Array:
    """Buerkner and Vuorre 2019, equation 14: exp of the sum of steps, over that of all levels."""
    sums = [sum(eta - STEPS[j] for j in range(level)) + 0.0 * eta for level in range(4)]
    p = np.exp(np.stack(sums, -1))
    p = p / p.sum(-1, keepdims=True)
    return np.log(np.take_along_axis(p, LEVELS[..., None], -1)[..., 0])


def _inside(of: Callable[[Array], Any], values: Any, low: float, high: float) -> Any:
    """Log density of a frozen scipy distribution, over its probability between two bounds."""

    def by_hand(eta: Array) -> Array:
        fn = of(eta)
        is_count = hasattr(fn.dist, "pmf")
        density = fn.logpmf(values) if is_count else fn.logpdf(values)
        below = fn.cdf(low - 1.0) if is_count else fn.cdf(low)
        return np.asarray(density - np.log(fn.cdf(high) - below))

    return by_hand


def _categorical(eta: Array) -> Array:
    full = np.concatenate([np.zeros((2, 3, 1)), eta], -1)
    return np.take_along_axis(log_softmax(full, -1), np.minimum(LEVELS, 2)[..., None], -1)[..., 0]


def _piecewise(eta: Array) -> Array:
    """Return log h(t) - H(t), with H summed over a fine grid of exact pieces."""
    level = np.array([-0.5, 0.1, 0.4])
    piece = np.searchsorted([1.0, 2.5], TIMES, side="right")
    ends = np.clip(TIMES[..., None], [0.0, 1.0, 2.5], [1.0, 2.5, np.inf]) - [0.0, 1.0, 2.5]
    return eta + level[piece] - np.exp(eta) * (ends * np.exp(level)).sum(-1)


def _glm(link: Callable[[Array], Array]) -> Callable[[Array], Array]:
    return lambda eta: st.bernoulli.logpmf(COUNTS > 1, link(eta))


BINARY = (COUNTS > 1).astype(float)
SMALL = np.minimum(COUNTS, TRIALS)
CASES = {
    "gaussian": Case(
        families.gaussian(), REALS, lambda e: st.norm.logpdf(REALS, e, 0.7), {"sigma": 0.7}
    ),
    "gaussian_log": Case(
        families.gaussian("log"),
        REALS,
        lambda e: st.norm.logpdf(REALS, np.exp(e), 0.7),
        {"sigma": 0.7},
    ),
    "gaussian_inverse": Case(
        families.gaussian("inverse"),
        REALS,
        lambda e: st.norm.logpdf(REALS, 1.0 / e, 0.7),
        {"sigma": 0.7},
        eta=np.abs(ETA) + 0.5,
    ),
    "student": Case(
        families.student(),
        REALS,
        lambda e: st.t.logpdf(REALS, 4.0, e, 0.7),
        {"sigma": 0.7, "nu": 4.0},
    ),
    "lognormal": Case(
        families.lognormal(),
        TIMES,
        lambda e: st.lognorm.logpdf(TIMES, 0.8, scale=np.exp(e)),
        {"sigma": 0.8},
    ),
    "gamma": Case(
        families.gamma(),
        TIMES,
        lambda e: st.gamma.logpdf(TIMES, 2.3, scale=np.exp(e) / 2.3),
        {"shape": 2.3},
    ),
    "bernoulli": Case(families.bernoulli(), BINARY, _glm(expit)),
    "bernoulli_probit": Case(families.bernoulli("probit"), BINARY, _glm(st.norm.cdf)),
    "bernoulli_cloglog": Case(
        families.bernoulli("cloglog"), BINARY, _glm(lambda e: 1.0 - np.exp(-np.exp(e)))
    ),
    "binomial": Case(
        families.binomial(),
        SMALL,
        lambda e: st.binom.logpmf(SMALL, TRIALS, expit(e)),
        additions={"trials": TRIALS},
    ),
    "binomial_probit": Case(
        families.binomial("probit"),
        SMALL,
        lambda e: st.binom.logpmf(SMALL, TRIALS, st.norm.cdf(e)),
        additions={"trials": TRIALS},
    ),
    "beta_binomial": Case(
        families.beta_binomial(),
        SMALL,
        lambda e: st.betabinom.logpmf(SMALL, TRIALS, 3.5 * expit(e), 3.5 * expit(-e)),
        {"phi": 3.5},
        {"trials": TRIALS},
    ),
    "poisson": Case(families.poisson(), COUNTS, lambda e: st.poisson.logpmf(COUNTS, np.exp(e))),
    "negative_binomial": Case(
        families.negative_binomial(),
        COUNTS,
        lambda e: st.nbinom.logpmf(COUNTS, 1.7, 1.7 / (1.7 + np.exp(e))),
        {"shape": 1.7},
    ),
    "zero_inflated_poisson": Case(
        families.zero_inflated_poisson(), COUNTS, _zero_inflated, {"zi": 0.3}
    ),
    "zero_inflated_negative_binomial": Case(
        families.zero_inflated_negative_binomial(),
        COUNTS,
        lambda e: np.log(0.3 * (COUNTS == 0) + 0.7 * _negative_binomial(e).pmf(COUNTS)),
        {"zi": 0.3, "shape": 1.7},
    ),
    "hurdle_poisson": Case(
        families.hurdle_poisson(),
        COUNTS,
        lambda e: _hurdle(
            COUNTS, st.poisson.logpmf(COUNTS, np.exp(e)), st.poisson.sf(0, np.exp(e))
        ),
        {"hu": 0.3},
    ),
    "hurdle_negative_binomial": Case(
        families.hurdle_negative_binomial(),
        COUNTS,
        lambda e: _hurdle(
            COUNTS, _negative_binomial(e).logpmf(COUNTS), _negative_binomial(e).sf(0)
        ),
        {"hu": 0.3, "shape": 1.7},
    ),
    "hurdle_gamma": Case(
        families.hurdle_gamma(),
        AMOUNTS,
        lambda e: _hurdle(
            AMOUNTS, st.gamma.logpdf(np.maximum(AMOUNTS, 0.1), 2.3, scale=np.exp(e) / 2.3)
        ),
        {"hu": 0.3, "shape": 2.3},
    ),
    "hurdle_lognormal": Case(
        families.hurdle_lognormal(),
        AMOUNTS,
        lambda e: _hurdle(
            AMOUNTS, st.lognorm.logpdf(np.maximum(AMOUNTS, 0.1), 0.8, scale=np.exp(e))
        ),
        {"hu": 0.3, "sigma": 0.8},
    ),
    "ordered_beta": Case(
        families.ordered_beta(), ENDS, _ordered_beta, {"phi": 3.5, "thresholds": [-1.2, 1.4]}
    ),
    "skew_normal": Case(families.skew_normal(), REALS, _skew_normal, {"sigma": 0.7, "alpha": -3.0}),
    "categorical": Case(families.categorical(), np.minimum(LEVELS, 2), _categorical, eta=TWO),
    "cumulative": Case(
        families.cumulative(), LEVELS, _cumulative(expit), {"thresholds": THRESHOLDS.tolist()}
    ),
    "cumulative_probit": Case(
        families.cumulative("probit"),
        LEVELS,
        _cumulative(st.norm.cdf),
        {"thresholds": THRESHOLDS.tolist()},
    ),
    "von_mises": Case(families.von_mises(), ANGLES, _von_mises, {"kappa": 4.2}),
    "multinomial": Case(
        families.multinomial(), PARTS, _multinomial, additions={"trials": PARTS.sum(-1)}, eta=TWO
    ),
    "dirichlet": Case(families.dirichlet(), WHOLES, _dirichlet, {"phi": 3.5}, eta=TWO),
    "sratio": Case(families.sratio(), LEVELS, _sratio(expit), {"thresholds": STEPS.tolist()}),
    "sratio_probit": Case(
        families.sratio("probit"), LEVELS, _sratio(st.norm.cdf), {"thresholds": STEPS.tolist()}
    ),
    "acat": Case(families.acat(), LEVELS, _acat, {"thresholds": STEPS.tolist()}),
    "beta": Case(
        families.beta(),
        SHARES,
        lambda e: st.beta.logpdf(SHARES, 3.5 * expit(e), 3.5 * expit(-e)),
        {"phi": 3.5},
    ),
    "exponential": Case(
        families.exponential(), TIMES, lambda e: st.expon.logpdf(TIMES, scale=np.exp(e))
    ),
    "weibull": Case(
        families.weibull(),
        TIMES,
        lambda e: st.weibull_min.logpdf(TIMES, 1.8, scale=np.exp(e) / gamma(1.0 + 1.0 / 1.8)),
        {"shape": 1.8},
    ),
    "piecewise_exponential": Case(
        families.piecewise_exponential((1.0, 2.5)),
        TIMES,
        _piecewise,
        {"log_hazard": [-0.5, 0.1, 0.4]},
    ),
}

POSITIVE = np.maximum(COUNTS, 1)
INSIDE = np.clip(REALS, -0.5, 1.4)
TRUNCATED = {
    "gaussian_between": Case(
        families.truncated(families.gaussian(), -0.5, 1.4),
        INSIDE,
        _inside(lambda e: st.norm(e, 0.7), INSIDE, -0.5, 1.4),
        {"sigma": 0.7},
    ),
    "gaussian_log_above": Case(
        families.truncated(families.gaussian("log"), low=-0.5),
        INSIDE,
        _inside(lambda e: st.norm(np.exp(e), 0.7), INSIDE, -0.5, np.inf),
        {"sigma": 0.7},
    ),
    "gaussian_below": Case(
        families.truncated(families.gaussian(), high=1.4),
        INSIDE,
        _inside(lambda e: st.norm(e, 0.7), INSIDE, -np.inf, 1.4),
        {"sigma": 0.7},
    ),
    "lognormal_between": Case(
        families.truncated(families.lognormal(), 0.2, 6.0),
        TIMES,
        _inside(lambda e: st.lognorm(0.8, scale=np.exp(e)), TIMES, 0.2, 6.0),
        {"sigma": 0.8},
    ),
    "exponential_below": Case(
        families.truncated(families.exponential(), high=7.0),
        TIMES,
        _inside(lambda e: st.expon(scale=np.exp(e)), TIMES, 0.0, 7.0),
    ),
    "weibull_above": Case(
        families.truncated(families.weibull(), low=0.15),
        TIMES,
        _inside(
            lambda e: st.weibull_min(1.8, scale=np.exp(e) / gamma(1.0 + 1.0 / 1.8)),
            TIMES,
            0.15,
            np.inf,
        ),
        {"shape": 1.8},
    ),
    "poisson_above": Case(
        families.truncated(families.poisson(), low=1),
        POSITIVE,
        _inside(lambda e: st.poisson(np.exp(e)), POSITIVE, 1.0, np.inf),
    ),
    "poisson_between": Case(
        families.truncated(families.poisson(), 1, 12),
        POSITIVE,
        _inside(lambda e: st.poisson(np.exp(e)), POSITIVE, 1.0, 12.0),
    ),
    "negative_binomial_above": Case(
        families.truncated(families.negative_binomial(), low=3),
        POSITIVE + 2,
        _inside(_negative_binomial, POSITIVE + 2, 3.0, np.inf),
        {"shape": 1.7},
    ),
    "negative_binomial_below": Case(
        families.truncated(families.negative_binomial(), high=12),
        COUNTS,
        _inside(_negative_binomial, COUNTS, 0.0, 12.0),
        {"shape": 1.7},
    ),
}
CASES |= TRUNCATED
