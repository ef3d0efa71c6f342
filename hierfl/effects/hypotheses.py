"""Hypotheses about parameters: "sex[male] = 2 * smoker[yes]", as draws of the difference of both sides."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import product
from typing import Any, Unpack

import torch
from torch import Tensor

from hierfl.core.arguments import did_you_mean, expect_kind, spelled
from hierfl.core.process import one_at_a_time
from hierfl.data.absent import HAND_IN, NOT_SAVED, RowsNotSaved
from hierfl.effects.drawn import CoefficientDraws, Drawing, Fitted, drawn
from hierfl.effects.estimates import Estimates, labeled, share_above
from hierfl.formulas.expressions import ARITHMETIC, Expression, Literal
from hierfl.formulas.grammar import Reader, check, pointing

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "abs": torch.abs,
    "plogis": torch.sigmoid,
}
SIGNS = ("=", ">", "<")


@one_at_a_time
@spelled
def hypotheses(
    fit: Fitted, hypothesis: str | Sequence[str], **drawing: Unpack[Drawing]
) -> Estimates:
    """Compare two sides of an equation of parameters, at each draw.

        fit.hypotheses("sex[male] = 0")
        fit.hypotheses(["scale(age) > sex[male]", "exp(Intercept) < 2", "sd_hospital > 0.5"])

    No rows are read. Names are those of `fit.summary()`: `age`, `sex[male]`, `sd_hospital`, and for
    a client's own coefficients `hospital[va]`, or `hospital[va, sex]` if it has several. A name in
    backticks is taken literally. You can use numbers, +, -, *, /, ** and parentheses, and the
    functions exp, log, sqrt, abs and plogis.

    Args:
        fit: of a `hierfl.formula`.
        hypothesis: "left = right", "left > right" or "left < right"; or a list of them. The sign
            says which probability `p` is.
        **drawing: `prob`, `draws` and `seed`.

    Returns:
        One row per hypothesis: `hypothesis`, the left side minus the right one, and `p`, the
        posterior probability that the left side is larger, or smaller for a hypothesis with "<".

    Raises:
        TypeError: the fit is of another model; or a hypothesis is not a string.
        ValueError: a hypothesis cannot be read, or names an unknown parameter; or a difference is
            not finite.
        RowsNotSaved: a client's own coefficient depends on rows that were not saved.
    """
    draws = drawn(fit, "hypotheses", **drawing)
    terms = (term for layout in draws.formula.layouts for term in layout.at("clients"))
    hidden = {term.site for term in terms} - {*draws.own}
    several = isinstance(hypothesis, Iterable) and not isinstance(hypothesis, str)
    texts: list[Any] = list(hypothesis) if several else [hypothesis]
    values = parameters(draws)
    differences, shares = [], []
    for text in texts:
        expect_kind(text, str, "a hypothesis", "give a text, such as 'sex[male] = 0'")
        with pointing(text):
            first, sign, second = Reader(text, "hypothesis").comparison(*SIGNS)
            before, after = (_value(side, values, hidden, draws.count) for side in (first, second))
        differences.append(before - after)
        if not differences[-1].isfinite().all():
            raise ValueError(f"the hypothesis '{text}' is not finite at some draws")
        above = float(share_above(differences[-1][:, None], 0.0)[0])
        shares.append(1.0 - above if sign == "<" else above)
    if not texts:
        raise ValueError("no hypothesis is given: write one, such as 'sex[male] = 0'")
    return Estimates.of(
        "Hypotheses, left side minus right side",
        labeled(torch.stack(differences, 1), {"hypothesis": texts}, "difference"),
        draws,
        p=shares,
        note="p is P(left > right); for a hypothesis with '<', P(left < right).",
    )


def parameters(draws: CoefficientDraws) -> dict[str, Tensor]:
    """Return the draws of every parameter, (S,), by its name in a summary."""
    values: dict[str, Tensor] = {}
    for site, value in {**draws.shared, **draws.own}.items():
        labels: list[Sequence[str]] = [draws.clients] if site in draws.own else []
        labels += [names for _, names in draws.formula.dims.get(site, ())]
        shape = value.shape[1:]
        if [len(names) for names in labels] != list(shape):
            labels = [[str(i) for i in range(size)] for size in shape]
        flat = value.reshape(len(value), -1)
        for place, entry in enumerate(product(*labels)):
            values[f"{site}[{', '.join(entry)}]" if entry else site] = flat[:, place]
    return values


def _value(
    expression: Expression, values: Mapping[str, Tensor], hidden: Collection[str], count: int
) -> Tensor:
    """Return one side at each draw, (S,): sums of products of powers of parameters, numbers, functions."""
    name, number, function = expression.label, expression.value, FUNCTIONS.get(expression.callee)
    if name in values and function is None:
        return values[name]
    if isinstance(expression, Literal) and isinstance(number, int | float) and number is not True:
        return torch.full((count,), float(number), dtype=torch.float64)
    if function is not None and len(expression.args) == 1:
        return function(_value(expression.args[0], values, hidden, count))
    if name.partition("[")[0] in hidden:
        raise RowsNotSaved(f"{NOT_SAVED} ('{name}' depends on them): {HAND_IN}")
    check(expression.sign in ARITHMETIC, expression, _unknown(name, values))
    operands = [_value(argument, values, hidden, count) for argument in expression.args]
    result: Tensor = -operands[0] if expression.is_minus else ARITHMETIC[expression.sign](*operands)
    return result


def _unknown(name: str, parameters: Mapping[str, Tensor]) -> str:
    longer = [entry for entry in parameters if entry.startswith(name.removesuffix("]") + ", ")]
    some = ", ".join(list(parameters)[:12]) + (", ..." if len(parameters) > 12 else "")
    word, words = (longer[0], longer[:1]) if longer else (name, list(parameters))
    fix = did_you_mean(word, words, f"the parameters are {some}")
    return f"'{name}' is not a parameter of the fit: {fix}"
