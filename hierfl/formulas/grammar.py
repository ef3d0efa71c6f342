"""The grammar of formulas, read by recursive descent.

    formulas    = formula {";" formula}
    formula     = [expression] "~" expression
    expression  = operand {sign operand}, which bind as `BINDING` says
    operand     = ("+" | "-") operand | name | number | text | name "(" [argument {"," argument}] ")"
                | "(" expression ")" | "{" expression "}"
    argument    = [name "="] expression

A column of any name stands in backquotes. `{x + 1}` is `I(x + 1)`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from hierfl.formulas.expressions import (
    BINDING,
    COMPARISONS,
    UNARY,
    WORDS,
    Call,
    Dot,
    Expression,
    Literal,
    Name,
    Operator,
)

CLOSE = {"(": ")", "{": "}"}
TOKENS = re.compile(
    r"""(?P<blank>\s+)
    | (?P<quoted>`[^`]+`)
    | (?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)
    | (?P<name>[^\W\d][\w.]*)
    | (?P<text>"[^"]*"|'[^']*')
    | (?P<sign>\|\||\*\*|==|!=|<=|>=|[-+*/:|~;,()=<>{}.])
    | (?P<other>.)""",
    re.VERBOSE,
)
# What cannot be read -> what to write.
FIXES = {
    "^": "write I(x ** 2) for a power, (a + b) ** 2 for products",
    "~": "write a list, one formula each, as ['y ~ x', 'sigma ~ x']",
    "`": "close the backquote, and put at least one letter inside",
    '"': "close the quote",
    "'": "close the quote",
    ")": "remove the parenthesis without its partner",
}
WRITE = "write 'response ~ terms'"
FIX = "write a sum of columns, products a * b, and functions of columns"


class Token(NamedTuple):
    """A piece of a formula: `kind` is "quoted", "number", "name", "text", "sign", "other" or "end"."""

    kind: str
    text: str
    at: int


def tokens_of(text: str) -> Iterator[Token]:
    """Yield the tokens of a text, and one for its end."""
    for match in TOKENS.finditer(text):
        if match.lastgroup != "blank":
            yield Token(str(match.lastgroup), match[0], match.start())
    yield Token("end", "", len(text))


def refused(text: str, at: int, message: str) -> ValueError:
    """Return an error that shows the line of a formula, with a caret below a place."""
    start = text.rfind("\n", 0, at) + 1
    line = text[start:].partition("\n")[0]
    return ValueError(f"{message}\n    {line}\n    {' ' * (at - start)}^")


class Sides(NamedTuple):
    """A formula's two sides, "target ~ right", and its own text."""

    target: Expression | None
    right: Expression
    text: str
    at: int


class Reader:
    """Reads the tokens of a text from the first to the last; in an update, `dots` stand for what there was."""

    def __init__(self, text: str, *, dots: bool = False) -> None:
        """Start at the first token."""
        self.text, self.dots = text, dots
        self.tokens, self.place = list(tokens_of(text)), 0

    @property
    def token(self) -> Token:
        """The next token."""
        return self.tokens[self.place]

    def error(self, at: int, message: str) -> ValueError:
        """Return an error that points at a place of the text."""
        return refused(self.text, at, message)

    def formulas(self) -> Iterator[Sides]:
        """Yield the formulas of the text, which stand between semicolons."""
        if not self.text.strip():
            raise self.error(0, f"the formula is empty: {WRITE}, as in 'y ~ x'")
        while True:
            start = self.token.at
            target = None if self.token.text in ("~", ";") else self._expression()
            if self._is_end:
                raise self.error(self.token.at, f"the formula has no sign '~': {WRITE}")
            tilde = self._take("~")
            if self._is_end:
                what = "the formula has nothing on one side of '~'"
                raise self.error(tilde.at, f"{what}: {WRITE}, '1' for no terms")
            right = self._expression()
            end = self.token
            yield Sides(target, right, self.text[start : end.at].strip(), start)
            if end.kind == "end":
                return
            self._take(";")

    # -------------------------------------------------------- expressions
    def _expression(self, least: int = 0) -> Expression:
        """Read operands joined by signs that bind more closely than `least`."""
        expression = self._operand()
        while self.token.kind == "sign" and (own := BINDING.get(self.token.text, 0)) > least:
            sign = self._next()
            right = self._expression(own - 1 if sign.text == "**" else own)
            if sign.text in COMPARISONS and any(map(_compares, (expression, right))):
                what = f"'{expression} {sign.text} {right}' compares twice"
                fix = "write a product of two comparisons, (0 < x) * (x < 1)"
                raise self.error(sign.at, f"{what}: {fix}")
            expression = Operator(sign.text, (expression, right), at=sign.at)
        return expression

    def _operand(self) -> Expression:
        """Read a column, a literal, a call, or what stands in parentheses, with a sign or without."""
        token = self._next()
        match token.kind:
            case "number" | "text":
                return Literal(token.text, at=token.at)
            case "quoted":
                return Name(token.text[1:-1], at=token.at)
            case "name" if token.text in WORDS:
                return Literal(token.text, at=token.at)
            case "name":
                is_call = self.token.text == "("
                return self._call(token) if is_call else Name(token.text, at=token.at)
        if token.text == "+":
            return self._expression(UNARY)
        if token.text == "-":
            return Operator("-", (self._expression(UNARY),), at=token.at)
        if token.text in CLOSE:
            inner = self._expression()
            self._close(token)
            if token.text == "{":
                return Call("I", (inner,), at=token.at)
            return replace(inner, wrapped=bool(inner.sign))
        if token.text == "." and self.dots:
            return Dot(".", at=token.at)
        raise self._unexpected(token)

    def _call(self, callee: Token) -> Call:
        """Read the arguments of a call, of which those by name come last."""
        opening, args, options = self._take("("), list[Expression](), list[tuple[str, Expression]]()
        while self.token.text != ")" or args or options:
            name = self.token
            if name.kind == "name" and self.tokens[self.place + 1].text == "=":
                self.place += 2
                if name.text in dict(options):
                    raise self.error(name.at, f"'{name.text}' is given twice: remove one")
                options.append((name.text, self._expression()))
            elif options:
                raise self.error(name.at, "an argument without a name stands behind one by name")
            else:
                args.append(self._expression())
            if self.token.text != ",":
                break
            self._next()
        self._close(opening)
        return Call(callee.text, tuple(args), tuple(options), at=callee.at)

    # -------------------------------------------------------- tokens
    @property
    def _is_end(self) -> bool:
        return self.token.kind == "end" or self.token.text == ";"

    def _next(self) -> Token:
        token = self.token
        self.place += token.kind != "end"
        return token

    def _take(self, text: str) -> Token:
        if self.token.text != text:
            raise self._unexpected(self.token)
        return self._next()

    def _close(self, opening: Token) -> None:
        if self.token.kind == "end":
            what = "the formula has a parenthesis without its partner"
            raise self.error(opening.at, f"{what}: add it")
        self._take(CLOSE[opening.text])

    def _unexpected(self, token: Token) -> ValueError:
        """Return the error of a token that cannot stand in its place."""
        before = self.tokens[self.tokens.index(token) - 1].text if token.at else ""
        if "|" in (token.text[:1], before[:1]):
            message = "a bar lacks a side: write (1 | hospital)"
        elif token.kind == "end":
            message = f"the formula cannot be read, since it ends with '{before}'"
            message += ": remove it, or write a term after it"
        else:
            fix = FIXES.get(token.text, FIX)
            message = f"the formula cannot be read from '{token.text}' on: {fix}"
        return self.error(token.at, message)


def _compares(expression: Expression) -> bool:
    return expression.sign in COMPARISONS and not expression.wrapped
