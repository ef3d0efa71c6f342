"""The grammar of formulas, read by recursive descent.

    formulas    = formula {";" formula}
    formula     = [expression] "~" expression
    expression  = operand {sign operand}, which bind as `BINDING` says
    operand     = ("+" | "-") operand | name | number | text | name "(" [argument {"," argument}] ")"
                | "(" expression ")" | "{" expression "}"
    argument    = [name "="] expression

A column of any name stands in backquotes. `{x + 1}` is `I(x + 1)`. Hypotheses compare two expressions,
whose operands may be entries, `sex[male]`; priors are calls.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from hierfl.formulas.expressions import (
    BINDING,
    COMPARISONS,
    UNARY,
    WORDS,
    Call,
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
    | (?P<entry>\[(?:[^][]|\[[^][]*\])*\])
    | (?P<sign>\|\||\*\*|==|!=|<=|>=|[-+*/:|~;,()=<>{}.])
    | (?P<other>.)""",
    re.VERBOSE,
)
WRITE = "write 'response ~ terms'"
ONE_SIGN = "write one sign of =, > and <, as in 'sex[male] > 0'"
# What cannot be read -> what to write.
FORMULA = {
    "^": "write I(x ** 2) for a power, (a + b) ** 2 for products",
    "~": "write a list, one formula each, as ['y ~ x', 'sigma ~ x']",
    "`": "close the backtick, and put at least one letter inside",
    **dict.fromkeys("\"'", "close the quote"),
    ")": "remove the unmatched parenthesis",
    "other": "write a sum of columns, products a * b, and functions of columns; put a name with "
    "characters other than letters, digits and _ in backticks, as in `age (years)`",
}
HYPOTHESIS = {**FORMULA, "^": "write ** for a power", "~": ONE_SIGN, "other": ONE_SIGN}


class Misplaced(ValueError):
    """What cannot stand where it does: a token, an expression, a term or a formula."""

    def __init__(self, place: Any, message: str) -> None:
        super().__init__(message)
        self.at: int = place.at


def check(is_right: object, place: Any, message: str) -> None:
    """Refuse what stands at a place unless it is right."""
    if not is_right:
        raise Misplaced(place, message)


@contextmanager
def pointing(text: str) -> Iterator[None]:
    """Show the line of a formula that an error is about, with a caret below the place."""
    try:
        yield
    except Misplaced as error:
        start = text.rfind("\n", 0, error.at) + 1
        line, caret = text[start:].partition("\n")[0], f"{' ' * (error.at - start)}^"
        raise ValueError(f"{error}\n    {line}\n    {caret}") from None
    except RecursionError as error:
        raise ValueError("the formula has too many nested parentheses") from error


class Token(NamedTuple):
    """A piece of a text: `kind` is that of `TOKENS`, "end" of the last one."""

    kind: str
    text: str
    at: int


class Sides(NamedTuple):
    """A formula's two sides, "target ~ right", and its own text."""

    target: Expression | None
    right: Expression
    text: str
    at: int


class Reader:
    """Reads the tokens of a text, `what` it is, from the first to the last; of an update, dots are operands."""

    def __init__(self, text: str, what: str = "formula") -> None:
        kinds = (match for match in TOKENS.finditer(text) if match.lastgroup != "blank")
        self.tokens = [Token(str(match.lastgroup), match[0], match.start()) for match in kinds]
        self.tokens.append(Token("end", "", len(text)))
        self.text, self.what, self.place = text, what, 0

    @property
    def token(self) -> Token:
        """The next token."""
        return self.tokens[self.place]

    def formulas(self) -> Iterator[Sides]:
        """Yield the formulas of the text, which stand between semicolons."""
        what = f"the formula is empty: {WRITE}, as in 'y ~ x'"
        check(self.text.strip(), Token("end", "", 0), what)
        while True:
            start = self.token.at
            target = None if self.token.text in ("~", ";") else self._expression()
            check(self.token.text not in ("", ";"), self.token, f"the formula has no '~': {WRITE}")
            self._take("~")
            right, end = self._expression(), self._take(";", "")
            yield Sides(target, right, self.text[start : end.at].strip(), start)
            if not end.text:
                return

    def comparison(self, *signs: str) -> tuple[Expression, str, Expression]:
        """Return two expressions, and the one of some signs that stands between them."""
        first = self._expression(BINDING["<"])
        what = f"the {self.what} has none of the signs {' '.join(signs)}: {ONE_SIGN}"
        check(self.token.text, self.token, what)
        sign = self._take(*signs)
        return first, sign.text, self.expression(BINDING["<"])

    def expression(self, least: int = 0) -> Expression:
        """Return the expression that goes on to the end of the text, of signs above `least`."""
        expression = self._expression(least)
        self._take("")
        return expression

    # -------------------------------------------------------- expressions
    def _expression(self, least: int = 0) -> Expression:
        """Read operands joined by signs that bind more closely than `least`."""
        expression = self._operand()
        while self.token.kind == "sign" and (own := BINDING.get(self.token.text, 0)) > least:
            sign = self._take()
            right = self._expression(own - 1 if sign.text == "**" else own)
            if sign.text in COMPARISONS and expression.sign in COMPARISONS:
                fix = "write a product of two comparisons, (0 < x) * (x < 1)"
                what = f"'{expression} {sign.text} {right}' compares twice"
                check(expression.wrapped, sign, f"{what}: {fix}")
            expression = Operator(sign.text, (expression, right), at=sign.at)
        return expression

    def _operand(self) -> Expression:
        """Read one operand, with a sign or without; of a hypothesis a parameter such as x:sex[male]."""
        operand = self._plain_operand()
        while self.what == "hypothesis" and (self.token.kind == "entry" or self.token.text == ":"):
            suffix = self._take().text
            suffix += self._plain_operand().label if suffix == ":" else ""
            operand = Name(f"{operand.label}{suffix}", at=operand.at)
        return operand

    def _plain_operand(self) -> Expression:
        """Read a column, a literal, a call, or what stands in parentheses, with a sign or without."""
        token = self._take()
        kind, text, at = token
        if kind == "quoted":
            return Name(text[1:-1], at=at)
        if kind in ("number", "text") or text in WORDS or (text == "." and self.what == "update"):
            return Literal(text, at=at)
        if kind == "name":
            return self._call(token) if self.token.text == "(" else Name(text, at=at)
        if text in ("+", "-"):
            operand = self._expression(UNARY)
            return operand if text == "+" else Operator("-", (operand,), at=at)
        if text not in CLOSE:
            raise self._unexpected(token)
        inner = self._expression()
        self._close(token)
        if text == "{":
            return Call("I", (inner,), at=at)
        return replace(inner, wrapped=bool(inner.sign))

    def _call(self, callee: Token) -> Call:
        """Read the arguments of a call, of which those by name come last."""
        opening, args, options = self._take("("), list[Expression](), dict[str, Expression]()
        while self.token.text != ")" or args or options:
            name = self.token
            if name.kind == "name" and self.tokens[self.place + 1].text == "=":
                self.place += 2
                check(name.text not in options, name, f"'{name.text}' is given twice: remove one")
                options[name.text] = self._expression()
            else:
                check(not options, name, "an unnamed argument follows a named one")
                args.append(self._expression())
            if self.token.text != ",":
                break
            self._take()
        self._close(opening)
        return Call(callee.text, tuple(args), tuple(options.items()), at=callee.at)

    # -------------------------------------------------------- tokens
    def _take(self, *texts: str) -> Token:
        """Return the next token, one of some texts, and go on to the one after it."""
        token = self.token
        if texts and token.text not in texts:
            raise self._unexpected(token)
        self.place += token.kind != "end"
        return token

    def _close(self, opening: Token) -> None:
        what = f"the {self.what} has an unmatched parenthesis: close it"
        check(self.token.kind != "end", opening, what)
        self._take(CLOSE[opening.text])

    def _unexpected(self, token: Token) -> Misplaced:
        """Return the error of a token that cannot stand in its place."""
        before = self.tokens[self.tokens.index(token) - 1].text if token.at else ""
        if "|" in (token.text[:1], before[:1]):
            return Misplaced(token, "a bar lacks one side: write (1 | hospital)")
        if token.kind == "end":
            what = f"the {self.what} cannot be read, since it ends with '{before}'"
            return Misplaced(token, f"{what}: remove it, or write a term after it")
        fixes = HYPOTHESIS if self.what == "hypothesis" else FORMULA
        fix = fixes.get(token.text, fixes["other"])
        return Misplaced(token, f"the {self.what} cannot be read from '{token.text}' on: {fix}")
