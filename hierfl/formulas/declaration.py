"""What a user declares, checked: formulas, the families of the response and parameters, and columns."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, Literal, NamedTuple

from hierfl.core.arguments import expect_kind
from hierfl.formulas.columns import Kind
from hierfl.formulas.expressions import CODINGS, Call, Name, TermSum, calls, column_of, columns_of
from hierfl.formulas.schema import STATEFUL, Implausible, Schema
from hierfl.models import families
from hierfl.models.families import Response, ResponseFamily, gaussian


def grouping_name(by: Sequence[str]) -> str:
    """Return the name of the groups of some columns; two sets of columns never have the same."""
    return ":".join(f"`{name}`" if ":" in name else name for name in by)


@dataclass(frozen=True)
class Group:
    """A term with a bar: `(1 + age | hospital:ward)` is by ("hospital", "ward"); correlated: `|`, not `||`.

    `kind`: "gr", "escar" or "esicar" of groups with the matrix `cov`; "": they are independent.
    """

    terms: TermSum
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


@dataclass(frozen=True)
class FormulaTree:
    """One formula: the columns of its response, `labels`, the common terms and the groups.

    An addition to the response has its column, {"trials": "n"}; `bounds` are those of trunc(). That of the
    response has the formulas of parameters and of `covariates` by name, and the `texts` of all, in one `text`.
    """

    labels: tuple[str, ...]
    common: TermSum
    groups: tuple[Group, ...]
    additions: Mapping[str, str] = field(default_factory=dict)
    bounds: tuple[float, float] | None = None
    others: "Mapping[str, FormulaTree]" = field(default_factory=dict)
    covariates: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    text: str = ""

    @property
    def response(self) -> str:
        """The name of the response, "y" or "cbind(a, b)"."""
        several = len(self.labels) > 1
        return str(Call("cbind", tuple(map(Name, self.labels)))) if several else self.labels[0]

    @property
    def terms(self) -> tuple[TermSum, ...]:
        """The common terms, and then those of each group."""
        return (self.common, *(group.terms for group in self.groups))


class PredictorLink(NamedTuple):
    """The link of a parameter's linear predictor, and the code that takes the predictor to the parameter."""

    name: str
    inverse: str


LOG, LOGIT = PredictorLink("log", ".exp()"), PredictorLink("logit", ".sigmoid()")
LINKS = {"sigma": LOG, "shape": LOG, "phi": LOG, "zi": LOGIT, "hu": LOGIT}
SOME = Response(1.0, 1.0, ("a", "b", "c"))  # of which every family has its parameters


def joined(texts: str | Sequence[str]) -> str:
    """Return the text of a formula, or of a list of them: of the response and of parameters."""
    fix = "it must be a string, 'y ~ x', or a list of strings, ['y ~ x', 'sigma ~ x']"
    listed = [texts] if isinstance(texts, str) else texts
    expect_kind(listed or None, list | tuple, "the formula", fix)
    for text in listed:
        expect_kind(text, str, "a formula of the list", fix)
    return texts if isinstance(texts, str) else "; ".join(text.strip() for text in texts)


def family_of_parameter(name: str, family: ResponseFamily) -> ResponseFamily:
    """Return the family of a parameter with terms; refuse a name that cannot have some."""
    parameters = family.parameters(SOME)
    usable = [parameter for parameter in parameters if parameter in LINKS]
    if name not in usable:
        there = " or ".join(f"'{parameter} ~ ...'" for parameter in usable) or "none"
        what = f"'{name} ~ ...' gives terms to '{name}', which family '{family.name}' cannot have"
        raise ValueError(f"{what}: after the formula of the response write {there}")

    def scale(response: Response) -> tuple[float, float]:
        """Return the center and spread of the predictor, given the response."""
        spread = family.scale(response)[1] if name == "sigma" else 1.0
        return (float(f"{math.log(spread):.6g}") if spread > 0.0 else 0.0), 0.0

    return ResponseFamily(name, LINKS[name].name, "positive", "", lambda response: {}, scale)


def covariate_family(name: str, mean: float, sd: float) -> ResponseFamily:
    """Return the family of a covariate, of which the response knows nothing."""
    plain = gaussian()
    center, spread = float(f"{mean:.6g}"), float(f"{sd:.6g}")
    return replace(
        plain,
        name="gaussian",
        parameters=lambda response: {
            f"sigma_{name}": plain.parameters(replace(response, mean=center, sd=spread))["sigma"]
        },
        scale=lambda response: (center, spread),
    )


Missing = Literal["refuse", "drop"]


@dataclass(frozen=True)
class Declaration:
    """Formulas before clients have agreed on a schema; missing="refuse" or "drop" rows that miss a value."""

    parts: FormulaTree
    family: ResponseFamily
    clients: str
    missing: Missing = "refuse"
    data2: Mapping[str, Any] = field(default_factory=dict)  # matrix -> names, and rows

    @property
    def text(self) -> str:
        """The formulas as the user wrote them."""
        return self.parts.text

    @cached_property
    def of_parameters(self) -> "dict[str, Declaration]":
        """Parameter or covariate that has terms -> their declaration; refuse what cannot have some."""
        declared = {}
        for name, tree in self.parts.others.items():
            if name in self.imputed:
                family = covariate_family(name, 0.0, 1.0)
            else:
                family = family_of_parameter(name, self.family)
            declared[name] = replace(self, parts=tree, family=family)
        return declared

    @property
    def every_parts(self) -> tuple[FormulaTree, ...]:
        """The formula of the response, and those of parameters."""
        return (self.parts, *self.parts.others.values())

    @cached_property
    def described(self) -> tuple[TermSum, ...]:
        """The common terms, those of each group, then those of parameters."""
        return tuple(chain.from_iterable(tree.terms for tree in self.every_parts))

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of all formulas."""
        return tuple(chain.from_iterable(tree.groups for tree in self.every_parts))

    @cached_property
    def groupings(self) -> tuple[tuple[str, ...], ...]:
        """The columns of each kind of group but the clients, each once."""
        plain = dict.fromkeys(group.by for group in self.groups if not group.kind)
        return tuple(by for by in plain if by != (self.clients,))

    @property
    def structured(self) -> list[Group]:
        """The groups with a known covariance, or with neighbors."""
        return [group for group in self.groups if group.kind]

    @property
    def imputed(self) -> tuple[str, ...]:
        """The covariates that a formula of their own imputes, "x | mi() ~ z"."""
        return self.parts.covariates

    @property
    def calls(self) -> tuple[Call, ...]:
        """Every call in the terms of all formulas, inner ones first."""
        return tuple(chain.from_iterable(map(calls, self.described)))

    def calls_of(self, callee: str) -> bool:
        """Return whether some term calls a function."""
        return any(call.callee == callee for call in self.calls)

    @cached_property
    def transforms(self) -> dict[str, Call]:
        """The calls with constants that clients agree on, as they are written; inner ones first."""
        return {str(call): call for call in self.calls if call.callee in STATEFUL}

    def transform(self, text: str) -> Call:
        """Return a call with constants; refuse one that the formula does not have."""
        if text not in self.transforms:
            raise Implausible(f"the formula has no transform '{text[:200]}'")
        return self.transforms[text]

    @property
    def columns_read(self) -> tuple[str, ...]:
        """The columns of `rows_of`, and those that rows may lack: covariates, and ends of intervals."""
        ends = [name for of, name in self.parts.additions.items() if of == "upper"]
        return tuple(dict.fromkeys((*self.rows_of, *self.imputed, *ends)))

    @cached_property
    def columns(self) -> dict[str, Kind | None]:
        """Column of a term, the response or an addition -> its kind; None: as the frame has it."""
        kinds: dict[str, Kind | None] = dict.fromkeys(chain(*map(columns_of, self.described)))
        bare = {*chain(*(columns_of(terms, *CODINGS) for terms in self.described))}
        for call in self.calls:
            if call.callee in CODINGS:  # a category, even where it holds numbers
                kinds[column_of(call)] = None if column_of(call) in bare else "category"
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
        kinds = {**dict.fromkeys(chain(*self.groupings)), **self.columns}
        kinds |= dict.fromkeys(name for group in self.structured for name in group.by)
        without = {self.clients, *self.imputed}
        return {name: kind for name, kind in kinds.items() if name not in without}


def response_of(declared: Declaration, schema: Schema) -> Response:
    """Return what the schema knows about the response, as the family needs it."""
    labels = declared.parts.labels
    if schema.response is None:
        levels = labels if len(labels) > 1 else schema.columns[labels[0]].levels
        return Response(float("nan"), float("nan"), levels)
    return Response(schema.response.mean, schema.response.sd)


def additions_of(declared: Declaration) -> tuple[str, ...]:
    """Return the additions that the likelihood reads: event() is the code of cens()."""
    additions = set(declared.parts.additions)
    codes = {"cens"} if "event" in additions else set()
    return tuple(sorted((additions | codes) - {"event", "weights"}))


def with_bounds(declared: Declaration) -> Declaration:
    """Return a declaration whose family is that between the bounds of trunc()."""
    bounds, additions = declared.parts.bounds, declared.parts.additions
    if bounds is None:
        return declared
    if of_times := {"cens", "event", "upper", "entry"} & additions.keys():
        fix = "write entry(start) for those that entered late"
        raise ValueError(f"the response has trunc() and {min(of_times)}(): for times, {fix}")
    return replace(declared, family=families.truncated(declared.family, *bounds))
