"""Priors in brms's words, "normal(0, 1)", and as objects of PreliZ, as distributions of Pyro."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pyro.distributions as dist
import torch

from hierfl.formulas.expressions import Call, Expression
from hierfl.formulas.grammar import Reader
from hierfl.models.priors import Prior

Builder = Callable[..., Any]
# Stan's word -> the number of its arguments, and the distribution.
WORDS: dict[str, tuple[int, Builder]] = {
    "normal": (2, dist.Normal),
    "student_t": (3, dist.StudentT),
    "cauchy": (2, dist.Cauchy),
    "double_exponential": (2, dist.Laplace),
    "logistic": (2, dist.Logistic),
    "exponential": (1, dist.Exponential),
    "gamma": (2, dist.Gamma),
    "inv_gamma": (2, dist.InverseGamma),
    "lognormal": (2, dist.LogNormal),
    "beta": (2, dist.Beta),
    "uniform": (2, dist.Uniform),
    "weibull": (2, lambda shape, scale: dist.Weibull(scale, shape)),
    "lkj": (1, float),
}
SYMMETRIC = ("normal", "student_t", "cauchy", "double_exponential", "logistic")
# PreliZ's class -> its parameters, and the distribution of them.
PRELIZ: dict[str, tuple[tuple[str, ...], Builder]] = {
    "Normal": (("mu", "sigma"), dist.Normal),
    "HalfNormal": (("sigma",), dist.HalfNormal),
    "StudentT": (("nu", "mu", "sigma"), dist.StudentT),
    "HalfStudentT": (
        ("nu", "sigma"),
        lambda nu, sigma: dist.FoldedDistribution(dist.StudentT(nu, 0.0, sigma)),
    ),
    "Cauchy": (("alpha", "beta"), dist.Cauchy),
    "HalfCauchy": (("beta",), dist.HalfCauchy),
    "Laplace": (("mu", "b"), dist.Laplace),
    "Logistic": (("mu", "s"), dist.Logistic),
    "Exponential": (("lam",), dist.Exponential),
    "Gamma": (("alpha", "beta"), dist.Gamma),
    "InverseGamma": (("alpha", "beta"), dist.InverseGamma),
    "LogNormal": (("mu", "sigma"), dist.LogNormal),
    "Beta": (("alpha", "beta"), dist.Beta),
    "Uniform": (("lower", "upper"), dist.Uniform),
    "Weibull": (("alpha", "beta"), lambda alpha, beta: dist.Weibull(beta, alpha)),
}


def as_given(name: str, prior: Any) -> Any:
    """Return a prior as it is kept: brms's words, checked, and PreliZ's objects as distributions."""
    if isinstance(prior, str):
        _parsed(name, prior)
    if type(prior).__module__.partition(".")[0] == "preliz":
        return _of_preliz(name, prior)
    return prior


def of_text(name: str, text: str, default: Prior) -> Any:
    """Return the distribution of brms's words; that of a scale about 0 is its upper half, as in brms."""
    word, values = _parsed(name, text)
    fn = WORDS[word][1](*values)
    if word not in SYMMETRIC or not _is_positive(default):
        return fn
    if values[-2] != 0.0:
        other = f"{word}({', '.join(f'{v:g}' for v in (*values[:-2], 0.0, values[-1]))})"
        fix = f"give one centered at 0, such as '{other}', or one of positive numbers, such as 'gamma(2, 0.1)'"
        what = f"the prior of '{name}' is '{text}', and brms uses the part above 0"
        raise ValueError(f"{what}: {fix}")
    return dist.FoldedDistribution(fn)


def _is_positive(default: Any) -> bool:
    """Return whether a site has the values of its default prior above 0 alone."""
    if not hasattr(default, "support") or default.event_shape:
        return False
    return not bool(default.support.check(torch.full(tuple(default.shape()), -1.0)).any())


def _parsed(name: str, text: str) -> tuple[str, tuple[float, ...]]:
    """Return the word and the numbers of a prior, read to its last sign."""
    call: Expression = Call("")
    with suppress(ValueError):
        call = Reader(text, "prior").expression()
    values = tuple(argument.value for argument in call.args if argument.value is not None)
    count, builder = WORDS.get(call.callee, (0, float))
    fault = f"and '{call.callee}' is not one of the words" if call.callee not in WORDS else ""
    if not fault and (call.options or not len(values) == len(call.args) == count):
        fault = f"and {call.callee} takes {count} numbers"
    if not fault:
        try:
            builder(*map(float, values))
        except (TypeError, ValueError) as error:
            fault = f"which is not a distribution: {error}"
    if fault:
        words = ", ".join(f"{word} ({count})" for word, (count, _) in WORDS.items())
        fix = f"write it as in brms, 'normal(0, 1)'; numbers of each word: {words}"
        raise ValueError(f"the prior of '{name}' is '{text}', {fault}: {fix}")
    return call.callee, tuple(map(float, values))


def _of_preliz(name: str, prior: Any) -> Any:
    """Return the distribution of an object of PreliZ."""
    kind = type(prior).__name__
    names, builder = PRELIZ.get(kind, ((), None))
    values = [getattr(prior, parameter, None) for parameter in names]
    if builder is None or None in values:
        fix = f"without {', '.join(names)}: give it numbers, or fit it to an expert's answers first"
        if builder is None:
            fix = f"which hierfl cannot read: give one of {', '.join(PRELIZ)}, or a distribution of Pyro"
        raise ValueError(f"the prior of '{name}' is PreliZ's {kind}, {fix}")
    return builder(*(float(str(value)) for value in values))
