"""`formula`: a mixed model as one line of text, declared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hierfl.core.arguments import expect_kind, spelled
from hierfl.formulas.checked import check_declared, given
from hierfl.formulas.declaration import Missing, joined
from hierfl.formulas.formula import Formula
from hierfl.formulas.schema import Schema
from hierfl.formulas.structures import matrix_of
from hierfl.models.families import ResponseFamily


@spelled
def formula(
    text: str | Sequence[str],
    family: str | ResponseFamily = "gaussian",
    *,
    clients: str,
    priors: Mapping[str, Any] | None = None,
    missing: Missing = "refuse",
    schema: Schema | None = None,
    data2: Mapping[str, Any] | None = None,
) -> Formula:
    """Declare a mixed model as one line of text.

        model = hierfl.formula("died ~ age + (1 + age | hospital)", "bernoulli", clients="hospital")
        fit = hierfl.fit(model, frames)

    The syntax is that of brms and lme4. `(1 + age | hospital)` gives each hospital its own
    intercept and slope, which may be correlated; with `||` they are independent. Other groups are
    read off the data: `(1 | region)` above the clients is global, `(1 | hospital/ward)` within them
    is local, `(1 | year)` at several of them is global. Products `a * b`, `C(x)`, `offset(x)`,
    `mo(x)`, `cs(x)`, `mi(x)`, `scale(x)`, `center(x)`, `bs(x, df=5)`, `poly(x, 2)`, functions such as `log(x)`
    are terms. `s(x, k=10)` is a penalized spline, `s(x, by=sex)` one of each level, `s(x, hospital,
    bs="fs")` one of each group, and `gp(x, k=20)` a Gaussian process. `(1 | gr(hospital, cov=A))` are
    groups of a known covariance, and `car(M, gr=county)` neighbors. Additions to the response are
    `y | trials(n)`, `weights(w)`, `trunc(lb=0, ub=10)`, and of times `event(status)`,
    `cens(status, upper)`, `entry(start)`. `cbind(a, b, c)` is a response of several columns.

    Args:
        text: the formula. A list, such as ["y ~ x + (1 | h)", "sigma ~ x + (1 | h)"], or formulas
            with semicolons between them, also have the terms of parameters of the family: of
            `sigma`, `shape` and `phi` on the scale of the logarithm, of `zi` and `hu` on that of
            the log odds. "x | mi() ~ z" imputes x, the covariate of `mi(x)`, where rows lack it.
        family: of the response, or its name, as listed in docs/families.md. Default "gaussian".
        clients: the column that names the clients.
        priors: site -> distribution of Pyro or of PreliZ, or brms's words, "normal(0, 1)", which of
            a scale mean the part above 0. A site is "age", or one column "sex[male]"; "b" are all
            common coefficients, "sd" all standard deviations of groups, one of them
            "sd_hospital", "cor" the correlations (the concentration of an LKJ, or "lkj(2)"), "sds",
            "sdgp" and "lscale" the scales of smooth terms, or "sigma". Default: weakly informative ones, listed in
            `Formula.prior_summary`.
        missing: "refuse" rows with missing values, or "drop" them.
        schema: that clients have agreed on. Default None: `hierfl.fit` makes it from their counts
            and sums.
        data2: matrices that terms name, {"A": frame}, as in brms: a pandas frame whose index and
            columns name the groups. Of `gr(g, cov=A)` a covariance, of `car(M, gr=g)` 1 for
            neighbors and 0 for others. Over nodes the server alone needs it. Default: none.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: the formula cannot be read, or has an unsupported part; the message names it and
            the nearest supported one.
    """
    own = given(family=family, priors=priors, missing=missing)
    expect_kind(clients, str, "clients", "give the name of the column that names the clients")
    expect_kind(data2 or {}, Mapping, "data2", "give a dict of frames, {'A': frame}")
    if schema is not None and schema.clients != clients:
        raise ValueError(f"the schema is one of clients '{schema.clients}', and not of '{clients}'")
    own["data2"] = {name: matrix_of(name, matrix) for name, matrix in (data2 or {}).items()}
    made = Formula(joined(text), clients=clients, schema=schema, **own)
    check_declared(made.declared)
    return made
