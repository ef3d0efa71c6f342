"""A formula's text, taken apart: the response, its additions, the groups, and the terms for `formulae`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, Literal

from formulae.scanner import ScanError, Scanner

from hierfl.formulas.columns import Kind
from hierfl.formulas.parameters import covariates_of, declarations_of, parts_of
from hierfl.formulas.schema import Schema
from hierfl.formulas.syntax import NAMES, Group, factor_smooth, text_of_tokens
from hierfl.formulas.terms import bare_columns, calls, columns_of, described
from hierfl.formulas.transforms import CODINGS
from hierfl.models.families import Response, ResponseFamily

# Addition to the response -> what its column holds.
ADDITIONS = {
    "trials": "the number of trials",
    "weights": "how many times a row counts in the likelihood",
    "cens": "how a time is censored: 0 or 'none', 1 or 'right', -1 or 'left', 2 or 'interval'",
    "event": "1 where a time was observed, 0 where it is right-censored",
    "upper": "the upper end of the interval in which an event happened",
    "entry": "the time at which observation began",
    "trunc": "the bounds between which responses were recorded",
}


@dataclass(frozen=True)
class Parts:
    """A formula, taken apart; an addition -> its column, {"trials": "n"}; common, "1 + age + sex".

    `labels` are the columns of the response, and `trunc` is its addition of that name.
    """

    response: str
    additions: Mapping[str, str]
    common: str
    groups: tuple[Group, ...]
    labels: tuple[str, ...]
    trunc: str


def parse(text: str) -> Parts:
    """Take a formula such as "y ~ x + (1 + x | hospital)" apart, or say what to write instead.

    >>> parse("y | trials(n) ~ age + (1 + age || site/ward)").groups[1]
    Group(terms='1 + age', by=('site', 'ward'), correlated=False, kind='', cov='')
    """
    if not isinstance(text, str):
        raise TypeError(f"the formula is a {type(text).__name__}: it must be a string, 'y ~ x'")
    tokens = tokens_of(text)
    at = [i for i, token in enumerate(tokens) if token.kind == "TILDE"]
    if len(at) != 1:
        raise ValueError(
            f"the formula '{text}' has {len(at)} signs '~': write 'response ~ terms', as in 'y ~ x'"
        )
    left, right = tokens[: at[0]], tokens[at[0] + 1 :]
    if not left or not right:
        raise ValueError(
            f"the formula '{text}' has nothing on one side of '~': write 'response ~ terms', '1' "
            "for no terms"
        )
    response, labels, additions = _response(left)
    trunc = additions.pop("trunc", "")
    common, groups = [], dict[tuple[Any, ...], Group]()
    curves: list[tuple[str, str]] = []
    for sign, term in summands_of(right):
        inside, words = _inside(term), text_of_tokens(term)
        bars = [i for i, token in enumerate(inside) if token.kind == "PIPE"]
        if not bars:
            if "fs" in words and sign == "+" and (found := factor_smooth(inside)):
                curves.append(found)
                continue
            if words.startswith("car(") and sign == "+":
                from hierfl.formulas.call_syntax import called_group

                group = called_group(inside)
                if groups.setdefault((group.name, group.terms), group) is not group:
                    raise ValueError(f"'{group.name}' stands in the formula twice: remove one")
                continue
            common.append(f"{sign} {words}")
            continue
        if sign == "-":
            raise ValueError(f"the formula takes '{words}' away: leave it out instead")
        depth = [t.kind for t in inside[: bars[0]]]
        if depth.count("LEFT_PAREN") > depth.count("RIGHT_PAREN"):
            raise ValueError(
                f"'{words}' has a bar inside of other parentheses: write its groups as a term"
            )
        if len(inside) == len(term):
            raise ValueError(
                f"'{words}' has a bar without parentheses: write ({words}), with all "
                "terms that vary by group inside of them"
            )
        for group in _groups(inside, bars):
            if groups.setdefault((group.name, group.terms), group) is not group:
                raise ValueError(f"the term '{group.text}' stands in the formula twice: remove one")
    for terms, name in curves:  # their intercept is that of another term of these groups, if any
        same = [g for g in groups.values() if g.by == (name,) and not g.kind]
        others = [g for g in same if not g.terms.startswith("0")]
        group = Group(f"{0 if others else 1} + {terms}", (name,), correlated=False)
        groups.setdefault((group.name, group.terms), group)
    written = " ".join(common).removeprefix("+ ") or "1"
    return Parts(response, additions, written, tuple(groups.values()), labels, trunc)


def tokens_of(text: str) -> list[Any]:
    """Return the tokens of a formula, or say what cannot be read."""
    if not text.strip():
        raise ValueError("the formula is empty: write 'response ~ terms', as in 'y ~ x'")
    if text.count("`") % 2:
        raise ValueError(f"the formula '{text}' has a back-quote that is not closed: close it")
    try:
        tokens = Scanner(text).scan(add_intercept=False)[:-1]
    except ScanError as error:
        signs = {
            "^": "write I(x ** 2) for a power, (a + b) ** 2 for products",
            "~": "write a list, one formula each, as ['y ~ x', 'sigma ~ x']",
        }
        advice = next((signs[sign] for sign in signs if sign in str(error)), "remove it")
        raise ValueError(f"the formula '{text}' cannot be read ({error}): {advice}") from error
    depth = 0
    for token in tokens:
        depth += {"LEFT_PAREN": 1, "RIGHT_PAREN": -1}.get(token.kind, 0)
        if depth < 0:
            break
    if depth:
        raise ValueError(f"the formula '{text}' has a parenthesis without its partner: add it")
    return tokens


def summands_of(tokens: Sequence[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Yield the terms of a sum with their signs; parentheses make one term."""
    depth, sign = 0, "+"
    term: list[Any] = []
    for token in tokens:
        depth += {"LEFT_PAREN": 1, "RIGHT_PAREN": -1}.get(token.kind, 0)
        if depth == 0 and token.kind in ("PLUS", "MINUS"):
            if term:
                yield sign, term
            elif sign == "-":
                raise ValueError(f"'- {token.lexeme}' are two signs in a row: keep one")
            sign, term = token.lexeme, []
        else:
            term.append(token)
    if not term:
        raise ValueError(f"the formula ends with '{sign}': remove it, or write a term after it")
    yield sign, term


def _inside(term: Sequence[Any]) -> Sequence[Any]:
    """Return what one pair of parentheses around a term holds."""
    depth = 0
    for place, token in enumerate(term):
        depth += {"LEFT_PAREN": 1, "RIGHT_PAREN": -1}.get(token.kind, 0)
        if depth == 0:
            return _inside(term[1:-1]) if place == len(term) - 1 and place > 0 else term
    return term


def _groups(tokens: Sequence[Any], bars: list[int]) -> Iterator[Group]:
    """Yield the groups of one term with a bar; `a/b` stands for `a` and `a:b`."""
    whole = text_of_tokens(tokens)
    correlated = len(bars) == 1
    if len(bars) > 2 or (len(bars) == 2 and bars[1] != bars[0] + 1):
        raise ValueError(f"the term '({whole})' has several bars: write one term for each")
    terms, by = text_of_tokens(tokens[: bars[0]]), _inside(tokens[bars[-1] + 1 :])
    if not terms or not by:
        raise ValueError(f"the term '({whole})' lacks a side of its bar: write (1 | hospital)")
    if text_of_tokens(by).startswith("gr("):
        from hierfl.formulas.call_syntax import called_group

        yield called_group(by, terms)
        return
    kinds = [token.kind for token in by]
    signs = kinds[1::2]
    if len(by) % 2 == 0 or not {*kinds[::2]} <= {*NAMES} or not {*signs} <= {"COLON", "SLASH"}:
        raise ValueError(
            f"the groups '{text_of_tokens(by)}' of '({whole})' are no columns: name one column, a:b for "
            "combinations, or a/b for b within a"
        )
    columns = [token.lexeme.strip("`") for token in by[::2]]
    for place, sign in enumerate(signs, 1):
        if sign == "SLASH":
            yield Group(terms, tuple(columns[:place]), correlated)
    yield Group(terms, tuple(columns), correlated)


def _response(tokens: Sequence[Any]) -> tuple[str, tuple[str, ...], dict[str, str]]:
    """Return the response, its columns, and its additions, "time | event(status) + entry(start)"."""
    kinds = [token.kind for token in tokens]
    bar = kinds.index("PIPE") if "PIPE" in kinds else len(tokens)
    name = tokens[0].lexeme.strip("`")
    labels: tuple[str, ...] = (name,)
    if bar != 1 or kinds[0] not in NAMES:
        from hierfl.formulas.call_syntax import columns_of_response

        name, labels = columns_of_response(tokens[:bar])
    additions: dict[str, str] = {}
    if bar == len(tokens):
        return name, labels, additions
    for sign, term in summands_of(tokens[bar + 1 :]):
        if sign == "-":
            raise ValueError(
                f"the response has '- {text_of_tokens(term)}': additions are joined by '+'"
            )
        for addition, column in _addition(term):
            if addition in additions:
                raise ValueError(f"the response has the addition '{addition}' twice: remove one")
            additions[addition] = column
    if {"cens", "event"} <= additions.keys():
        raise ValueError("the response has both cens() and event(): keep one")
    return name, labels, additions


def _addition(term: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """Yield an addition and its column; brms's cens(status, upper) is two."""
    called = term[0].lexeme
    arguments = [t.lexeme.strip("`") for t in term[2:-1:2]]
    if called not in ADDITIONS:
        from hierfl.formulas.call_syntax import ELSEWHERE

        advice = ELSEWHERE.get(called)
        known = f"write {advice}" if advice else f"the additions are {', '.join(ADDITIONS)}"
        raise ValueError(
            f"the addition '{text_of_tokens(term)}' of the response is not known: {known}"
        )
    if called == "trunc":
        yield called, text_of_tokens(term)
        return
    form = " ".join("name" if t.kind in NAMES else t.lexeme for t in term[1:])
    if form != "( name )" and not (called == "cens" and form == "( name , name )"):
        raise ValueError(
            f"the addition '{text_of_tokens(term)}' needs one column, {ADDITIONS[called]}: write "
            f"{called}(column)"
        )
    yield called, arguments[0]
    if len(arguments) == 2:
        yield "upper", arguments[1]


# ------------------------------------------------------------ what a user declares
Missing = Literal["refuse", "drop"]


@dataclass(frozen=True)
class Declaration:
    """A formula before clients have agreed on a schema; missing="refuse" or "drop" rows that miss a value."""

    text: str
    family: ResponseFamily
    clients: str
    missing: Missing = "refuse"
    data2: Mapping[str, Any] = field(default_factory=dict)  # matrix -> names, and rows

    @cached_property
    def parts(self) -> Parts:
        """The formula of the response, taken apart."""
        return parse(parts_of(self.text)[0] if ";" in self.text else self.text)

    @cached_property
    def of_parameters(self) -> dict[str, Declaration]:
        """Parameter of the family that has terms -> their declaration."""
        return declarations_of(self)

    @property
    def described(self) -> tuple[Any, ...]:
        """The common terms, those of each group, then those of parameters, as new `formulae` models."""
        groups = (group.terms for group in self.parts.groups)
        found = tuple(map(described, (self.parts.common, *groups)))
        if ";" in self.text:
            found += tuple(chain.from_iterable(d.described for d in self.of_parameters.values()))
        return found

    @cached_property
    def groupings(self) -> tuple[tuple[str, ...], ...]:
        """The columns of each kind of group but the clients, each once."""
        found = dict.fromkeys(group.by for group in self.parts.groups if not group.kind)
        if ";" in self.text:
            for own in self.of_parameters.values():
                found |= dict.fromkeys(group.by for group in own.parts.groups if not group.kind)
        return tuple(by for by in found if by != (self.clients,))

    @cached_property
    def imputed(self) -> tuple[str, ...]:
        """The covariates that a formula of their own imputes, "x | mi() ~ z"."""
        return covariates_of(self.text) if "mi(" in self.text else ()

    @property
    def columns_read(self) -> tuple[str, ...]:
        """The columns of `rows_of`, and the covariates that rows may lack."""
        return (*self.rows_of, *self.imputed)

    @property
    def structured(self) -> list[Group]:
        """The groups with a known covariance, or with neighbors."""
        own = self.of_parameters.values() if ";" in self.text else ()
        every = chain(self.parts.groups, *(declared.parts.groups for declared in own))
        return [group for group in every if group.kind]

    @cached_property
    def columns(self) -> dict[str, Kind | None]:
        """Column of a term, the response or an addition -> its kind; None: as the frame has it."""
        kinds: dict[str, Kind | None] = {}
        every = self.described
        for found in every:
            for name in columns_of(found):
                kinds.setdefault(name, None)
        for call in chain.from_iterable(map(calls, every)):
            if call.callee in CODINGS:  # a category, even where it holds numbers
                name = call.args[0].name
                read_elsewhere = any(name in bare_columns(found) for found in every)
                kinds[name] = None if read_elsewhere else "category"
        if "mi(" in self.text:
            kinds |= dict.fromkeys(self.imputed, "number")
        labels = self.family.kind in ("category", "ordered")
        # yes and no are taken as 1 and 0
        number: Kind | None = None if self.family.kind == "binary" else "number"
        kinds |= dict.fromkeys(self.parts.labels, "category" if labels else number)
        for addition, column in self.parts.additions.items():
            if addition != "upper":  # which is missing where no interval ends
                kinds[column] = None if addition == "cens" else "number"
        return kinds

    @property
    def rows_of(self) -> dict[str, Kind | None]:
        """All columns without which a row is not read, those of groups too, except the clients'."""
        found = {**dict.fromkeys(chain.from_iterable(self.groupings)), **self.columns}
        if "gr(" in self.text or "car(" in self.text:
            found |= dict.fromkeys(name for group in self.structured for name in group.by)
        found.pop(self.clients, None)
        if "mi(" in self.text:
            found = {name: kind for name, kind in found.items() if name not in self.imputed}
        return found


def response_of(declared: Declaration, schema: Schema) -> Response:
    """Return what the schema knows about the response, as the family needs it."""
    labels = declared.parts.labels
    if schema.response is None:
        levels = labels if len(labels) > 1 else schema.columns[labels[0]].levels
        return Response(float("nan"), float("nan"), levels)
    return Response(schema.response.mean, schema.response.sd)
