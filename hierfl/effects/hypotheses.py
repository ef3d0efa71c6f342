"""Hypotheses about parameters: "sex[male] = 2 * smoker[yes]", as draws of the difference of both sides."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import product
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from hierfl.core.arguments import expect_kind, spelled
from hierfl.core.process import one_at_a_time
from hierfl.effects.drawn import CoefficientDraws, Drawing, Fitted, drawn
from hierfl.effects.estimates import Estimates, labeled, share_above

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "abs": torch.abs,
    "plogis": torch.sigmoid,
}
SIGNS = ("=", ">", "<")
OPERATORS: dict[type[ast.operator], Callable[[Tensor, Tensor], Tensor]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


@one_at_a_time
@spelled
def hypotheses(
    fit: Fitted, hypothesis: str | Sequence[str], **drawing: Unpack[Drawing]
) -> Estimates:
    """Compare two sides of an equation of parameters, at each draw.

        fit.hypotheses("sex[male] = 0")
        fit.hypotheses(["scale(age) > sex[male]", "exp(Intercept) < 2", "sd_hospital > 0.5"])

    No rows are read. Names are those of `fit.summary()`: `age`, `sex[male]`, `sd_hospital`, and of
    a client's own coefficients `hospital[va]`, or `hospital[va, sex]` where it has several. A name
    in backticks is taken as it stands. Between them stand +, -, *, /, ** and parentheses, numbers,
    and the functions exp, log, sqrt, abs and plogis.

    Args:
        fit: of a `hierfl.formula`.
        hypothesis: "left = right", "left > right" or "left < right"; or a list of them. The sign
            chooses the side that `p` is the probability of.
        **drawing: `prob`, `draws` and `seed`.

    Returns:
        One row per hypothesis: `hypothesis`, the left side minus the right one, and `p`, the
        posterior probability that the left side is larger, or of a hypothesis with "<" smaller.

    Raises:
        TypeError: the fit is of another model; or a hypothesis is no text.
        ValueError: a hypothesis cannot be read to its end, or names what is no parameter; or a
            difference is not finite.
    """
    draws = drawn(fit, "hypotheses", **drawing)
    several = isinstance(hypothesis, Iterable) and not isinstance(hypothesis, str)
    texts = list(hypothesis) if several else [hypothesis]
    values = parameters(draws)
    differences, shares = [], []
    for text in texts:
        first, sign, second = _sides(text)
        before, after = (_value(side, values, draws.count) for side in (first, second))
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
        note="p is P(left > right); of a hypothesis with '<', P(left < right).",
    )


def parameters(draws: CoefficientDraws) -> dict[str, Tensor]:
    """Return the draws of every parameter, (S,), by its name in a summary."""
    values: dict[str, Tensor] = {}
    dims = draws.formula.dims
    for site, value in draws.shared.items():
        _add(values, site, [labels for _, labels in dims.get(site, ())], value)
    for site, value in draws.own.items():
        labels = [draws.clients, *(labels for _, labels in dims.get(site, ()))]
        _add(values, site, labels, value)
    return values


def _add(
    values: dict[str, Tensor], site: str, labels: Sequence[Sequence[str]], value: Tensor
) -> None:
    shape = value.shape[1:]
    if [len(names) for names in labels] != list(shape):
        labels = [[str(i) for i in range(size)] for size in shape]
    flat = value.reshape(len(value), -1)
    for place, entry in enumerate(product(*labels)):
        values[f"{site}[{', '.join(entry)}]" if entry else site] = flat[:, place]


def _sides(text: Any) -> tuple[str, str, str]:
    """Return both sides of a hypothesis and its sign, outside of backticks and brackets."""
    expect_kind(text, str, "a hypothesis", "give a text, such as 'sex[male] = 0'")
    quoted, depth, at = False, 0, []
    for place, letter in enumerate(text):
        quoted ^= letter == "`"
        depth += 0 if quoted else {"[": 1, "]": -1}.get(letter, 0)
        if letter in SIGNS and not quoted and not depth:
            at.append(place)
    if len(at) != 1:
        what = f"the hypothesis '{text}' has {len(at)} of the signs =, > and <"
        raise ValueError(f"{what}: write one, as in 'sex[male] > 0'")
    return text[: at[0]], text[at[0]], text[at[0] + 1 :]


def _value(text: str, values: Mapping[str, Tensor], count: int) -> Tensor:
    """Return one side at each draw, (S,): sums of products of powers of names, numbers, functions."""
    there = sorted((name for name in values if name in text), key=len, reverse=True)
    names = "|".join(re.escape(name) for name in there)
    places: dict[str, str] = {}

    def place(match: re.Match[str]) -> str:
        name = match[1] or match[0]
        if name not in values:
            raise _unknown(name, values)
        word = f"p{'_' * len(text)}{len(places)}"  # longer than the text, so not in it
        places[word] = name
        return f" {word} "

    # a function's name before a parenthesis is the function, unless it is in backticks
    function = rf"(?:{'|'.join(FUNCTIONS)})\("
    pattern = rf"`([^`]*)`|(?<![\w.\[])(?!{function})(?:{names or '(?!)'})(?![\w.\[])"
    words = re.sub(pattern, place, text).replace("^", "**").split()
    try:
        tree = ast.parse(" ".join(words), mode="eval").body
    except SyntaxError:
        raise _refused(text) from None
    return _Side(text, values, count, places).value(tree)


class _Side(NamedTuple):
    """A side of a hypothesis: the draws (S,) of each name, S, and the name that each word of `places` stands for."""

    text: str
    values: Mapping[str, Tensor]
    size: int
    places: Mapping[str, str]

    def value(self, node: ast.expr) -> Tensor:
        """Return the value of a part at each draw, (S,)."""
        match node:
            case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
                return torch.full((self.size,), float(number), dtype=torch.float64)
            case ast.Name(id=word) if word in self.places:
                return self.values[self.places[word]]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.value(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return OPERATORS[type(op)](self.value(left), self.value(right))
            case ast.Call(func=ast.Name(id=word), args=[argument], keywords=[]) if (
                word in FUNCTIONS
            ):
                return FUNCTIONS[word](self.value(argument))
            case ast.Call(func=ast.Name(id=word)) if word not in FUNCTIONS:
                raise _unknown(word, self.values)
            case ast.Name() | ast.Subscript():
                name = ast.unparse(node)
                for word in self.places:
                    name = name.replace(word, self.places[word])
                raise _unknown(name, self.values)
        raise _refused(self.text)


def _refused(text: str) -> ValueError:
    return ValueError(f"'{text.strip()}' cannot be read: write sums of products of parameters")


def _unknown(name: str, parameters: Mapping[str, Tensor]) -> ValueError:
    longer = [entry for entry in parameters if entry.startswith(name.removesuffix("]") + ", ")]
    near = longer or get_close_matches(name, parameters, n=1)
    meant = f"did you mean '{near[0]}'? " if near else ""
    some = ", ".join(list(parameters)[:12]) + (", ..." if len(parameters) > 12 else "")
    return ValueError(f"'{name}' is no parameter of the fit: {meant}the parameters are {some}")
