"""The syntax of terms: read to the last sign or refused, since `formulae` drops what it cannot read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from formulae.expr import Assign, Binary, Call, Grouping, Literal, QuotedName, Unary, Variable
from formulae.parser import Parser
from formulae.resolver import Resolver
from formulae.scanner import Scanner
from formulae.terms.terms import Model

NAMES = ("IDENTIFIER", "BQNAME")  # kinds of tokens that name a column
WORDS = {*NAMES, "NUMBER", "STRING", "PYTHON_LITERAL"}

IMPLICIT = "1 + "  # formulae's scanner adds it
PRODUCTS = ("STAR", "SLASH", "COLON", "STAR_STAR")
COMPARISONS = ("EQUAL_EQUAL", "BANG_EQUAL", "LESS_EQUAL", "LESS", "GREATER_EQUAL", "GREATER")


def grouping_name(by: Sequence[str]) -> str:
    """Return the name of the groups of some columns; two sets of columns never have the same."""
    return ":".join(f"`{name}`" if ":" in name else name for name in by)


@dataclass(frozen=True)
class Group:
    """A term with a bar: `(1 + age | hospital:ward)` is by ("hospital", "ward"); correlated: `|`, not `||`.

    `kind`: "gr", "escar" or "esicar" of groups with the matrix `cov`; "": they are independent.
    """

    terms: str
    by: tuple[str, ...]
    correlated: bool
    kind: str = ""
    cov: str = ""

    @property
    def name(self) -> str:
        """The groups' name, "hospital", "hospital:ward" or "gr(hospital)"."""
        if self.kind:
            return f"{'gr' if self.kind == 'gr' else 'car'}({grouping_name(self.by)})"
        return grouping_name(self.by)

    @property
    def text(self) -> str:
        """The term as it stands in a formula."""
        if self.kind:
            return f"{self.name[:-1]}, cov={self.cov})"
        return f"({self.terms} {'|' if self.correlated else '||'} {self.name})"


def read_terms(text: str) -> Any:
    """Return the `formulae` model of terms; refuse a text that would not mean what it says."""
    try:
        parser = Parser(Scanner(text).scan())
        tree, left = parser.parse(), parser.peek().lexeme
    except Exception as error:  # formulae raises many kinds, some of them bare Exceptions
        raise ValueError(
            f"the terms '{text}' cannot be read ({error}): {_advice(error)}"
        ) from error
    if not parser.at_end():
        raise ValueError(
            f"the terms '{text}' cannot be read from '{left}' on: write a sum of columns, products "
            "a * b, and functions of columns"
        )
    _check_sum(tree)
    offsets = [_text(p) for p in _summands(tree) if isinstance(p, Call) and _is_offset(p)]
    if twice := [offset for offset in offsets if offsets.count(offset) > 1]:
        raise ValueError(f"'{twice[0]}' stands in the formula twice, and counts once: remove one")
    for call in _calls(tree):
        _check_arithmetic(call)
    try:
        found = _model(tree)
    except Exception as error:
        raise ValueError(
            f"the terms '{text}' cannot be read ({error}): {_advice(error)}"
        ) from error
    return _apart(found)


def factor_smooth(tokens: Sequence[Any]) -> tuple[str, str] | None:
    """Return "s(x, k=5)" and "g" of mgcv's `s(x, g, bs="fs", k=5)`; None of another term."""
    kinds, words = [t.kind for t in tokens], [t.lexeme.strip("\"'") for t in tokens]
    if kinds[:5:2] != ["IDENTIFIER", "IDENTIFIER", "IDENTIFIER"] or words[:2] != ["s", "("]:
        return None
    options = "".join(t.lexeme for t in tokens[5:-1]).split(",")
    if kinds[3] != "COMMA" or not {'bs="fs"', "bs='fs'"} & {*options}:
        return None
    left = [option for option in options if option and not option.startswith("bs=")]
    column, group = (tokens[place].lexeme for place in (2, 4))
    return f"s({', '.join([column, *left])})", group


def _model(tree: Any) -> Any:
    found = Resolver(tree).resolve()
    return found if isinstance(found, Model) else Model(found)


def _apart(found: Any) -> Any:
    """Give each term parts of its own, which formulae codes in place, and let `b:a` be `a:b`."""
    terms: dict[Any, Any] = {}
    for term in found.common_terms:
        parts = getattr(term, "components", None)
        key = None if parts is None else frozenset((type(p), p.name) for p in parts)
        terms.setdefault(key, term)
        if parts is not None:
            term.components = deepcopy(parts)
    found.common_terms = list(terms.values())
    names = [term.name for term in found.common_terms]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two terms are called '{twice[0]}': rename the column of that name")
    return found


def _check_arithmetic(call: Call) -> None:
    """Refuse what formulae reads in another order than Python and R: -x ** 2, x ** 2 ** 3, 0 < x < 1."""
    for tree in (part for argument in call.args for part in _within(argument)):
        if not isinstance(tree, Binary):
            continue
        kind, left = tree.operator.kind, tree.left
        sides = [side for side in (left, tree.right) if isinstance(side, Binary)]
        if kind == "STAR_STAR" and isinstance(left, Unary | Binary):
            raise ValueError(
                f"'{_text(tree)}' of '{_text(call)}' can be read in two ways: put what is done "
                "first in parentheses"
            )
        if kind in COMPARISONS and any(side.operator.kind in COMPARISONS for side in sides):
            raise ValueError(
                f"'{_text(tree)}' of '{_text(call)}' compares twice: write a product of two "
                "comparisons, (0 < x) * (x < 1)"
            )


def _advice(error: Exception) -> str:
    if "Interaction with" in str(error):
        return "let a spline stand alone, or use a product with poly(x, 2)"
    if "Intercept'" in str(error):
        return "put 0 at the start of the terms, outside of parentheses"
    return "write a sum of columns, products a * b, and functions of columns"


def _check_sum(tree: Any, *, inside: bool = False) -> None:
    """Refuse what a sum of terms cannot hold, such as numbers and comparisons."""
    if isinstance(tree, Grouping):
        _check_sum(tree.expression, inside=True)
    elif isinstance(tree, Unary):
        _check_sum(tree.right, inside=inside)
    elif isinstance(tree, Binary) and tree.operator.kind in ("PLUS", "MINUS"):
        _check_sum(tree.left, inside=inside)
        _check_sum(tree.right, inside=inside)
        if tree.operator.kind == "MINUS":
            _check_removed(tree)
            if inside and isinstance(tree.right, Literal):  # formulae keeps the intercept
                raise ValueError(
                    f"'{_text(tree)}' takes the intercept away in parentheses: put 0 at the start of "
                    "the terms, outside of parentheses"
                )
    elif not (isinstance(tree, Literal) and type(tree.value) is int and tree.value in (0, 1)):
        _check_term(tree, inside=False)


def _check_removed(tree: Binary) -> None:
    """Refuse to take away a term that is not there, which would change nothing."""
    if isinstance(tree.right, Literal):
        return
    here, gone = ({t.name for t in _model(part).common_terms} for part in (tree.left, tree.right))
    if lost := sorted(gone - here):
        raise ValueError(
            f"the formula takes '{lost[0]}' away, which is not there: leave it out, or write "
            f"I({_text(tree).removeprefix(IMPLICIT)}) for a difference"
        )


def _check_term(tree: Any, *, inside: bool) -> None:
    """Refuse a term, or a factor inside a product, that is no column and no function of columns."""
    if isinstance(tree, Call):
        name = getattr(getattr(tree.callee, "name", None), "lexeme", "")
        if name == "offset" and inside:
            raise ValueError(
                f"'{_text(tree)}' stands in a product, and an offset has no coefficient: add it as "
                "a term of its own"
            )
        if nested := next((c for a in tree.args for c in _calls(a) if _is_offset(c)), None):
            raise ValueError(f"'{_text(nested)}' stands in '{_text(tree)}': add it as a term")
    elif isinstance(tree, Grouping) and inside:
        for part in _summands(tree.expression):
            _check_term(part, inside=True)
    elif isinstance(tree, Binary) and tree.operator.kind in PRODUCTS:
        sum_left = isinstance(tree.left, Grouping) and len(list(_summands(tree.left))) > 1
        if tree.operator.kind == "STAR_STAR":
            if not sum_left or not isinstance(tree.right, Literal):
                _refuse_arithmetic(tree)
            _check_term(tree.left, inside=True)
            return
        factors = [*_factors(tree)]
        if twice := [text for text in factors if factors.count(text) > 1]:
            square = " * ".join(factors)
            raise ValueError(
                f"'{_text(tree)}' multiplies '{twice[0]}' by itself, which a formula reads as "
                f"'{twice[0]}': write I({square}) for the product"
            )
        for part in (tree.left, tree.right):
            if isinstance(part, Literal):
                _refuse_arithmetic(tree)
            _check_term(part, inside=True)
    elif isinstance(tree, QuotedName) or (isinstance(tree, Variable) and tree.level is None):
        return
    else:
        _refuse_arithmetic(tree)


def _refuse_arithmetic(tree: Any) -> None:
    text = _text(tree).removeprefix(IMPLICIT)
    if isinstance(tree, Variable) or not isinstance(getattr(tree, "value", 0), int | float):
        raise ValueError(f"'{text}' is no term: write columns and functions of columns")
    raise ValueError(
        f"'{text}' is arithmetic, which a formula reads as terms: write I({text}) for its value"
    )


def _summands(tree: Any) -> Iterator[Any]:
    if isinstance(tree, Grouping):
        yield from _summands(tree.expression)
    elif isinstance(tree, Binary) and tree.operator.kind in ("PLUS", "MINUS"):
        yield from _summands(tree.left)
        yield from _summands(tree.right)
    else:
        yield tree


def _factors(tree: Any) -> Iterator[str]:
    if isinstance(tree, Binary) and tree.operator.kind in PRODUCTS:
        yield from _factors(tree.left)
        yield from _factors(tree.right)
    else:
        yield _text(tree).strip("`")


def _is_offset(tree: Call) -> bool:
    return isinstance(tree.callee, Variable) and tree.callee.name.lexeme == "offset"


def _calls(tree: Any) -> Iterator[Call]:
    yield from (part for part in _within(tree) if isinstance(part, Call))


def _within(tree: Any) -> Iterator[Any]:
    """Yield an expression and all expressions inside it."""
    yield tree
    parts = [getattr(tree, name, None) for name in ("left", "right", "expression", "value")]
    for part in (*parts, *(tree.args if isinstance(tree, Call) else ())):
        if isinstance(part, Assign | Binary | Call | Grouping | Unary):
            yield from _within(part)


def _text(tree: Any) -> str:
    """Return an expression as it is written."""
    if isinstance(tree, Binary):
        return f"{_text(tree.left)} {tree.operator.lexeme} {_text(tree.right)}"
    if isinstance(tree, Unary):
        return f"{tree.operator.lexeme}{_text(tree.right)}"
    if isinstance(tree, Grouping):
        return f"({_text(tree.expression)})"
    if isinstance(tree, Call):
        return f"{_text(tree.callee)}({', '.join(map(_text, tree.args))})"
    if isinstance(tree, Assign):
        return f"{_text(tree.name)}={_text(tree.value)}"
    if isinstance(tree, Variable):
        level = f"[{_text(tree.level)}]" if tree.level is not None else ""
        return f"{tree.name.lexeme}{level}"
    if isinstance(tree, QuotedName):
        return str(tree.expression.lexeme)
    return str(getattr(tree, "lexeme", None) or tree.value)


def text_of_tokens(tokens: Sequence[Any]) -> str:
    """Return tokens as text, with spaces where they help to read it."""
    out = ""
    for before, token in zip([None, *tokens], tokens, strict=False):
        out += " " if before and {before.kind, token.kind} <= WORDS else ""  # never one word of two
        spaced = token.kind in ("PLUS", "MINUS", "STAR", "SLASH", "PIPE", "EQUAL_EQUAL")
        out += f" {token.lexeme} " if spaced else token.lexeme
        out += " " if token.kind == "COMMA" else ""
    return out.replace("|  |", "||").strip()
