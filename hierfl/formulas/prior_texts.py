"""Priors in brms's words, "normal(0, 1)", and as objects of PreliZ, as distributions of Pyro."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pyro.distributions as dist
import torch

from hierfl.formulas.expressions import Call, Expression
from hierfl.formulas.grammar import Reader
from hierfl.models.priors import Prior

Builder = Callable[..., Any]
# Stan's word -> what PreliZ calls its numbers, the distribution, and PreliZ's class.
WORDS: dict[str, tuple[tuple[str, ...], Builder, str]] = {
    "normal": (("mu", "sigma"), dist.Normal, "Normal"),
    "student_t": (("nu", "mu", "sigma"), dist.StudentT, "StudentT"),
    "cauchy": (("alpha", "beta"), dist.Cauchy, "Cauchy"),
    "double_exponential": (("mu", "b"), dist.Laplace, "Laplace"),
    "logistic": (("mu", "s"), dist.Logistic, "Logistic"),
    "exponential": (("lam",), dist.Exponential, "Exponential"),
    "gamma": (("alpha", "beta"), dist.Gamma, "Gamma"),
    "inv_gamma": (("alpha", "beta"), dist.InverseGamma, "InverseGamma"),
    "lognormal": (("mu", "sigma"), dist.LogNormal, "LogNormal"),
    "beta": (("alpha", "beta"), dist.Beta, "Beta"),
    "uniform": (("lower", "upper"), dist.Uniform, "Uniform"),
    "weibull": (("alpha", "beta"), lambda shape, scale: dist.Weibull(scale, shape), "Weibull"),
    "lkj": (("eta",), float, ""),
}
SYMMETRIC = ("normal", "student_t", "cauchy", "double_exponential", "logistic")
# PreliZ's class -> its parameters, and the distribution of them.
PRELIZ = {kind: (names, builder) for names, builder, kind in WORDS.values() if kind} | {
    "HalfNormal": (("sigma",), dist.HalfNormal),
    "HalfStudentT": (
        ("nu", "sigma"),
        lambda nu, sigma: dist.FoldedDistribution(dist.StudentT(nu, 0.0, sigma)),
    ),
    "HalfCauchy": (("beta",), dist.HalfCauchy),
}


def as_given(name: str, prior: Any) -> Any:
    """Return a prior as it is kept: brms's words, checked, and PreliZ's objects as distributions."""
    if isinstance(prior, str):
        _parsed(name, prior)
    if type(prior).__module__.partition(".")[0] != "preliz":
        return prior
    kind = type(prior).__name__
    names, builder = PRELIZ.get(kind, ((), None))
    values = [getattr(prior, parameter, None) for parameter in names]
    if builder is None or None in values:
        fix = f"without {', '.join(names)}: give it numbers, or fit it to an expert's answers first"
        if builder is None:
            fix = f"which hierfl cannot read: give one of {', '.join(PRELIZ)}, or a distribution of Pyro"
        raise ValueError(f"the prior of '{name}' is PreliZ's {kind}, {fix}")
    return builder(*(float(str(value)) for value in values))


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
    names, builder, _ = WORDS.get(call.callee, ((), float, ""))
    fault = f"and '{call.callee}' is not one of the words" if call.callee not in WORDS else ""
    if not fault and (call.options or not len(values) == len(call.args) == len(names)):
        fault = f"and {call.callee} takes {len(names)} numbers"
    if not fault:
        try:
            builder(*map(float, values))
        except (TypeError, ValueError) as error:
            fault = f"which is not a distribution: {error}"
    if fault:
        words = ", ".join(f"{word} ({len(names)})" for word, (names, *_) in WORDS.items())
        fix = f"write it as in brms, 'normal(0, 1)'; numbers of each word: {words}"
        raise ValueError(f"the prior of '{name}' is '{text}', {fault}: {fix}")
    return call.callee, tuple(map(float, values))
