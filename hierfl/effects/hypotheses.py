"""Hypotheses about parameters: "sex[male] = 2 * smoker[yes]", as draws of the difference of both sides."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import product
from typing import Any, Unpack

import torch
from torch import Tensor

from hierfl.core.arguments import spelled
from hierfl.core.process import one_at_a_time
from hierfl.effects.answer import Answer, labeled, share_above
from hierfl.effects.drawn import CoefficientDraws, Drawing, Fitted, drawn

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "abs": torch.abs,
    "plogis": torch.sigmoid,
}
SIGNS = ("=", ">", "<")
NUMBER = re.compile(r"\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?")
WORD = re.compile(r"[^\W\d]\w*")


@one_at_a_time
@spelled
def hypotheses(
    fit: Fitted,
    hypothesis: str | Sequence[str],
    **drawing: Unpack[Drawing],
) -> Answer:
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
    found = drawn(fit, "hypotheses", **drawing)
    several = isinstance(hypothesis, Iterable) and not isinstance(hypothesis, str)
    texts = list(hypothesis) if several else [hypothesis]
    known = parameters(found)
    differences, shares = [], []
    for text in texts:
        left, sign, right = _sides(text)
        sides = [_Reader(side, known, found.count).read() for side in (left, right)]
        differences.append(sides[0] - sides[1])
        if not differences[-1].isfinite().all():
            raise ValueError(
                f"the hypothesis '{text}' is not finite at some draws: check its signs"
            )
        above = float(share_above(differences[-1][:, None], 0.0)[0])
        shares.append(1.0 - above if sign == "<" else above)
    if not texts:
        raise ValueError("no hypothesis is given: write one, such as 'sex[male] = 0'")
    return Answer.of(
        "Hypotheses, left side minus right side",
        labeled(torch.stack(differences, 1), {"hypothesis": texts}, "difference"),
        found,
        p=shares,
        note="p is P(left > right); of a hypothesis with '<', P(left < right).",
    )


def parameters(found: CoefficientDraws) -> dict[str, Tensor]:
    """Return the draws of every parameter, (S,), by its name in a summary."""
    known: dict[str, Tensor] = {}
    dims = found.formula.dims
    for site, value in found.shared.items():
        _add(known, site, [labels for _, labels in dims.get(site, ())], value)
    for site, value in found.own.items():
        labels = [found.clients, *(labels for _, labels in dims.get(site, ()))]
        _add(known, site, labels, value)
    return known


def _add(
    known: dict[str, Tensor], site: str, labels: Sequence[Sequence[str]], value: Tensor
) -> None:
    shape = value.shape[1:]
    if [len(each) for each in labels] != list(shape):
        labels = [[str(i) for i in range(size)] for size in shape]
    flat = value.reshape(len(value), -1)
    for place, entry in enumerate(product(*labels)):
        known[f"{site}[{', '.join(entry)}]" if entry else site] = flat[:, place]


def _sides(text: Any) -> tuple[str, str, str]:
    """Return both sides of a hypothesis and its sign, outside of backticks and brackets."""
    if not isinstance(text, str):
        raise TypeError(f"a hypothesis is {text!r}: give a text, such as 'sex[male] = 0'")
    quoted, depth, at = False, 0, []
    for place, letter in enumerate(text):
        quoted ^= letter == "`"
        depth += 0 if quoted else {"[": 1, "]": -1}.get(letter, 0)
        if letter in SIGNS and not quoted and not depth:
            at.append(place)
    if len(at) != 1:
        raise ValueError(
            f"the hypothesis '{text}' has {len(at)} of the signs =, > and <: write one, as in "
            "'sex[male] = 0' or 'sex[male] > 0'"
        )
    return text[: at[0]], text[at[0]], text[at[0] + 1 :]


class _Reader:
    """Reads one side to its last sign: a sum of products of powers of names, numbers and functions."""

    def __init__(self, text: str, known: Mapping[str, Tensor], count: int) -> None:
        self.text, self.known, self.count, self.place = text, known, count, 0
        self.longest = sorted(known, key=len, reverse=True)

    def read(self) -> Tensor:
        """Return the value of the whole text at each draw, (S,)."""
        value = self._sum()
        if self._next():
            raise self._refused()
        return value

    def _next(self) -> str:
        while self.place < len(self.text) and self.text[self.place].isspace():
            self.place += 1
        return self.text[self.place : self.place + 1]

    def _takes(self, sign: str) -> bool:
        self._next()
        if not self.text.startswith(sign, self.place):
            return False
        self.place += len(sign)
        return True

    def _sum(self) -> Tensor:
        value = self._product()
        while (sign := self._next()) in ("+", "-") and sign:
            self.place += 1
            other = self._product()
            value = value + other if sign == "+" else value - other
        return value

    def _product(self) -> Tensor:
        value = self._signed()
        while (sign := self._next()) in ("*", "/") and sign:
            self.place += 1
            other = self._signed()
            value = value * other if sign == "*" else value / other
        return value

    def _signed(self) -> Tensor:
        if self._takes("-"):
            return -self._signed()
        base = self._atom()
        return base ** self._signed() if self._takes("**") or self._takes("^") else base

    def _atom(self) -> Tensor:
        if self._takes("("):
            return self._closed()
        if self._takes("`"):
            end = self.text.find("`", self.place)
            name = self.text[self.place : end]
            if end < 0 or name not in self.known:
                raise self._unknown(name if end >= 0 else self.text[self.place - 1 :])
            self.place = end + 1
            return self.known[name]
        for name in self.longest:
            after = self.text[self.place + len(name) : self.place + len(name) + 1]
            if self.text.startswith(name, self.place) and not re.match(r"[\w.\[]", after):
                if after == "(" and name in FUNCTIONS:
                    continue
                self.place += len(name)
                return self.known[name]
        if number := NUMBER.match(self.text, self.place):
            self.place = number.end()
            return torch.full((self.count,), float(number[0]), dtype=torch.float64)
        word = WORD.match(self.text, self.place)
        if word and word[0] in FUNCTIONS:
            self.place = word.end()
            if self._takes("("):
                return FUNCTIONS[word[0]](self._closed())
        if word:
            raise self._unknown(re.split(r"[-+*/=\s]", self.text[word.start() :])[0])
        raise self._refused()

    def _closed(self) -> Tensor:
        value = self._sum()
        if not self._takes(")"):
            raise self._refused()
        return value

    def _refused(self) -> ValueError:
        left = self.text[self.place :].strip() or "its end"
        return ValueError(
            f"'{self.text.strip()}' cannot be read from '{left}' on: write sums and products of "
            "parameters and numbers"
        )

    def _unknown(self, name: str) -> ValueError:
        longer = [one for one in self.known if one.startswith(name.removesuffix("]") + ", ")]
        near = longer or get_close_matches(name, self.known, n=1)
        meant = f"did you mean '{near[0]}'? " if near else ""
        some = ", ".join(list(self.known)[:12]) + (", ..." if len(self.known) > 12 else "")
        return ValueError(f"'{name}' is no parameter of the fit: {meant}the parameters are {some}")
