"""Which coefficients of a formula are global, and which are a client's own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal

import numpy as np
import pandas as pd

from hierfl.formulas.declaration import LINKS, Declaration, Group, covariate_family, response_of
from hierfl.formulas.design import Design, Matrix, designs_of
from hierfl.formulas.expressions import DesignTerm, Factor
from hierfl.formulas.schema import Schema
from hierfl.formulas.smooths import entries_of
from hierfl.formulas.writer import CENTERED, INTERCEPT, NO_NAME, THRESHOLDS, unique, unique_names
from hierfl.models.families import Response

# Names of plates, and of dimensions of the posterior, which no site may have.
RESERVED = ("clients", "data", "client", "chain", "draw")
Place = Literal["clients", "above", "within", "crossed"]
Dims = tuple[tuple[str, tuple[str, ...]], ...]  # names and labels of a site's dimensions


@dataclass(frozen=True, eq=False)
class GroupTerm:
    """A term with a bar, once it is known how its groups lie to the clients.

    `columns` has Intercept first; `size` is the (largest) number of groups; `levels` is () of
    clients and groups within them; `index` and `field` are the data fields of groups and columns.
    """

    group: Group
    place: Place
    site: str
    design: Design
    columns: tuple[str, ...]
    size: int
    levels: tuple[str, ...]
    index: str
    field: str
    entries: tuple[str, ...]  # what has a standard deviation of its own: the columns, or curves
    places: tuple[int, ...] = ()  # of each column's among `entries`; (): one each

    @property
    def is_single(self) -> bool:
        """It is `(1 | g)`: one coefficient per group."""
        return self.columns == (INTERCEPT,)

    def evaluate(self, ready: pd.DataFrame, client: str) -> Matrix:
        """Return its columns on a client's `prepared` rows, (n, q)."""
        matrix, _ = self.design.evaluate(ready, client)
        if INTERCEPT not in self.columns:
            return matrix
        return np.concatenate([np.ones((len(ready), 1)), matrix], axis=1)

    @property
    def sd(self) -> str:
        """Name of the site of its standard deviations."""
        return f"sd_{self.site}"

    @property
    def cor(self) -> str | None:
        """Name of its correlations, a deterministic site; None where there are none."""
        return f"cor_{self.site}" if self.group.correlated and len(self.columns) > 1 else None

    @property
    def cholesky(self) -> str:
        """Name of the site of the Cholesky factor of its correlations."""
        return f"L_{self.site}"

    @property
    def lengths(self) -> dict[str, DesignTerm]:
        """The site of the length scale of each `gp`, and its term."""
        curves = [term for term in self.design.terms if term.smooth and term.smooth.kind == "gp"]
        return {f"lscale_{self.site}_{term.name}": term for term in curves}

    @property
    def sites(self) -> tuple[str, ...]:
        """All its sites."""
        kinds = ("z", "rho") if self.group.kind else ()
        sites = (self.site, self.sd, *(f"{kind}_{self.site}" for kind in kinds), *self.lengths)
        if self.cor is None:
            return sites
        moved = (f"{self.sd}{CENTERED}", f"{self.cholesky}{CENTERED}")
        return (*sites, self.cor, self.cholesky, *moved)


@dataclass(frozen=True, eq=False)
class Layout:
    """A formula's coefficients and columns.

    `means`: column -> its mean, where it is not 0, at which the intercept is sampled;
    `threshold_means` those at which thresholds are. `own`: column
    -> the clients' term whose coefficient has the common one as its mean. The likelihood reads the
    columns `read`. Of a parameter's terms `prefix` begins the names of sites and `suffix` ends those of
    fields; `intercept` is that site. `steps` are the columns of cs(), which move thresholds.
    """

    common: Design
    has_intercept: bool
    means: Mapping[str, float]
    groups: tuple[GroupTerm, ...]
    own: Mapping[str, GroupTerm]
    read: tuple[str, ...]
    prefix: str = ""
    suffix: str = ""
    intercept: str = INTERCEPT
    steps: tuple[str, ...] = ()
    threshold_means: Mapping[str, float] = field(default_factory=dict)

    @property
    def sampled_intercept(self) -> str:
        """The site of the intercept at the columns' means; `intercept` where all means are 0."""
        return f"{self.intercept}{CENTERED}" if self.means else self.intercept

    @property
    def sites(self) -> list[str]:
        """The sites of all terms."""
        of_common = (term.sites for term in self.common.terms)
        return [*chain(*of_common, *(term.sites for term in self.groups))]

    @property
    def designs(self) -> tuple[Design, ...]:
        """The designs of the common terms and of each term with a bar."""
        return (self.common, *(term.design for term in self.groups))

    def at(self, place: Place) -> tuple[GroupTerm, ...]:
        """Return the terms with a bar whose groups lie at a place."""
        return tuple(term for term in self.groups if term.place == place)


def layout_of(declared: Declaration, schema: Schema) -> Layout:
    """Return the layout of a formula under a schema; refuse two terms of one name."""
    common, *of_groups = designs_of(declared, schema)
    groups = _group_terms(declared, schema, of_groups)
    own: dict[str, GroupTerm] = {}
    for term in groups:
        for name in term.columns if term.place == "clients" else ():
            own.setdefault(name, term)
    takes_intercept = common.has_intercept and declared.family.has_intercept
    of_steps = {name for term in common.terms if term.by_step for name in term.columns}
    read = tuple(name for name in common.columns if name not in own and name not in of_steps)
    steps = tuple(name for name in common.columns if name in of_steps)
    made = Layout(common, takes_intercept, {}, groups, own, read, steps=steps)
    if common.has_intercept and declared.family.kind == "ordered":
        made = replace(made, threshold_means=_means(made, schema))
    elif common.has_intercept:
        made = replace(made, means=_means(made, schema))
    _check_names(made, declared, response_of(declared, schema))
    return made


def _means(layout: Layout, schema: Schema) -> dict[str, float]:
    """Return the means of the common columns, without those of centered columns."""
    margins = {name: schema.design[name] for name in layout.common.columns}
    # a mean of 1e-17 is the rounding of a column that is centered already
    is_off = {n: layout.common.is_smooth or abs(m.mean) > 1e-9 * m.sd for n, m in margins.items()}
    return {name: margin.mean for name, margin in margins.items() if is_off[name]}


def _group_terms(
    declared: Declaration, schema: Schema, of_groups: Sequence[Design]
) -> tuple[GroupTerm, ...]:
    index = unique_names("g_", [group.name for group in declared.parts.groups])
    designs: dict[str, tuple[Group, Design, tuple[str, ...]]] = {}
    for group, terms in zip(declared.parts.groups, of_groups, strict=True):
        columns, fault = ((INTERCEPT,) if terms.has_intercept else ()) + terms.columns, ""
        if terms.offsets:
            fault = "has an offset: put it among the common terms"
        elif lost := [term.name for term in terms.terms if term.monotone or term.by_step]:
            fix = "among the common terms only: use C(x), or x as a number"
            fault = f"has '{lost[0]}', which may appear {fix}"
        elif not columns:
            fault = f"has no columns: write (1 | {group.name})"
        if fault:
            raise ValueError(f"the term '{group.text}' {fault}")
        is_taken = group.name in designs or group.name in RESERVED
        site = unique(f"{group.name}.{columns[0]}", designs) if is_taken else group.name
        designs[site] = group, terms, columns
    fields = unique_names("z_", designs)
    made = []
    for site, (group, terms, columns) in designs.items():
        at = schema.groups.get(group.name)
        place: Place = "clients" if at is None else at.level
        size = 0 if at is None else at.most if at.level == "within" else len(at.levels)
        levels = () if at is None else at.levels
        of_fields = (index[group.name], fields[site])
        of_scales: tuple[tuple[str, ...], tuple[int, ...]] = (columns, ())
        if terms.is_smooth:
            of_scales = entries_of(group, terms.terms, columns)
        made.append(
            GroupTerm(group, place, site, terms, columns, size, levels, *of_fields, *of_scales)
        )
    return tuple(made)


def _check_names(layout: Layout, declared: Declaration, response: Response) -> None:
    """Refuse two sites, or two columns, of one name."""
    reserved = dict.fromkeys(RESERVED, "a plate or a dimension of the model")
    reserved |= dict.fromkeys(declared.family.parameters(response), "a parameter of the family")
    reserved |= dict.fromkeys((INTERCEPT, f"{INTERCEPT}{CENTERED}"), "the intercept")
    reserved[f"{THRESHOLDS}{CENTERED}"] = "the thresholds"
    dims = [f"{term.name}_dim" for term in layout.common.terms if term.coords]
    dims += [f"{g.site}_{end}" for g in layout.groups for end in ("term", "term_2", "group", "sd")]
    reserved |= dict.fromkeys(dims, "a dimension of the posterior")
    names = [declared.parts.response, *layout.sites]
    for name in names:
        if name in reserved:
            raise ValueError(f"'{name}' has the name of {reserved[name]}: rename the column")
        reserved[name] = "the response" if name == names[0] else "another term"
    check_columns(layout)


def check_columns(*layouts: Layout) -> None:
    """Refuse two terms, or two layouts, in which a column of one name is made of other factors."""
    made_of: dict[str, frozenset[Factor]] = {}
    for design in chain.from_iterable(layout.designs for layout in layouts):
        for name, made in ((name, term.factors) for term in design.terms for name in term.columns):
            if design.columns.count(name) > 1 or made_of.setdefault(name, made) != made:
                raise ValueError(f"two terms have a column '{name}': rename one of their columns")


def dims(declared: Declaration, schema: Schema, layout: Layout) -> dict[str, Dims]:
    """Return the name and the labels of each dimension of each site that has one."""
    response = response_of(declared, schema)
    outputs = declared.family.outputs(response)
    # The first level of a category is the reference, which has no predictor.
    level = f"{declared.parts.response}_level"
    last: Dims = ((level, response.levels[-outputs:]),) if outputs > 1 else ()
    sites: dict[str, Dims] = {}
    if layout.has_intercept and last:
        sites |= {INTERCEPT: last, layout.sampled_intercept: last}
    for term in layout.common.terms:
        own: Dims = ((f"{term.name}_dim", term.coords),) if term.coords else ()
        if own or last:
            sites[term.name] = own + last
        if term.monotone:
            curve: Dims = ((f"{term.name}_by", term.curves),) if term.curves else ()
            sites |= {f"b_{term.name}": curve} if curve else {}
            step: Dims = ((f"{term.name}_step", term.steps),) if term.curves else own
            sites[f"simplex_{term.name}"] = (*curve, *step)
        if term.smooth and term.smooth.levels:
            by: Dims = ((f"{term.name}_by", term.smooth.levels),)
            sites |= dict.fromkeys([f"{kind}_{term.name}" for kind in term.smooth.kinds], by)
        if term.by_step:
            steps = tuple(map(str, range(1, len(response.levels))))
            sites[term.name] = (*own, (f"{term.name}_threshold", steps))
    for group in layout.groups:
        columns = group.columns
        if last:
            columns = tuple(f"{c}[{level}]" for c in columns for level in last[0][1])
        many = () if group.is_single and not last else ((f"{group.site}_term", columns),)
        if many:
            sites[group.sd] = ((f"{group.site}_sd", group.entries),) if group.places else many
        if group.cor:
            pairs = (*many, (f"{group.site}_term_2", columns))
            sites |= {group.cor: pairs, group.cholesky: pairs}
            for site in (group.sd, group.cholesky):
                sites[f"{site}{CENTERED}"] = sites[site]
        if group.place == "clients" and many:
            sites[group.site] = many
        if group.place != "clients":
            levels = group.levels or tuple(map(str, range(group.size)))  # none of those within
            sites[group.site] = ((f"{group.site}_group", levels), *many)
    return sites


def rows_of_above(layout: Layout, term: GroupTerm) -> tuple[str, ...]:
    """Return the columns of a term above the clients that no own coefficient takes up."""
    return tuple(name for name in term.columns if name not in layout.own)


# ------------------------------------------------------------ parameters that have terms
@dataclass(frozen=True, eq=False)
class Parameter:
    """A parameter with terms: its declaration, which has the formula's response, and its layout."""

    name: str
    declared: Declaration
    layout: Layout

    @property
    def is_covariate(self) -> bool:
        """Whether it is no parameter but a covariate, "x | mi() ~ z"."""
        return self.declared.family.kind == "real"

    @property
    def inverse(self) -> str:
        """What takes the linear predictor to the parameter, as code."""
        return LINKS[self.name].inverse


def parameters_of(declared: Declaration, schema: Schema, main: Layout) -> dict[str, Parameter]:
    """Return each parameter with terms; refuse two sites of one name."""
    parameters = {}
    taken = {main.intercept, main.sampled_intercept, *main.sites}
    for name, own in declared.of_parameters.items():
        if own.family.kind == "real":
            own = scaled(own, schema)
        plain = layout_of(own, schema)
        if plain.common.offsets:
            raise ValueError(f"'{name} ~ ...' has an offset: only the response's terms may")
        made = Parameter(name, own, _of_parameter(name, plain))
        check_columns(main, plain)
        sites = {made.layout.intercept, made.layout.sampled_intercept, *made.layout.sites}
        if twice := sorted(sites & taken):
            what = f"'{twice[0]}' is a term of the response and one of '{name}'"
            raise ValueError(f"{what}: rename the column")
        taken |= sites
        parameters[name] = made
    return parameters


def _of_parameter(name: str, layout: Layout) -> Layout:
    """Return a layout whose sites and fields have the names of a parameter."""
    word = NO_NAME.sub("_", name)
    terms = tuple(replace(term, name=f"{name}_{term.name}") for term in layout.common.terms)
    groups = tuple(
        replace(
            term,
            site=f"{name}_{term.site}",
            index=f"{term.index}_{word}",
            field=f"{term.field}_{word}",
        )
        for term in layout.groups
    )
    again = dict(zip(layout.groups, groups, strict=True))
    return replace(
        layout,
        common=replace(layout.common, terms=terms),
        groups=groups,
        own={column: again[term] for column, term in layout.own.items()},
        prefix=f"{name}_",
        suffix=f"_{word}",
        intercept=f"{name}_{INTERCEPT}",
    )


def scaled(own: Declaration, schema: Schema) -> Declaration:
    """Return a covariate's declaration with the center and the spread that clients have agreed on."""
    name = own.parts.response
    column = schema.columns[name]
    if column.sd == 0.0:
        raise ValueError(f"'{name}' has one value in all rows that have it: take mi({name}) out")
    return replace(own, family=covariate_family(name, column.mean, column.sd))
