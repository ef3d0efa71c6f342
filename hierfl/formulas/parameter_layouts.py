"""Layouts of parameters that have terms: sites, fields and priors by the parameter's name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hierfl.formulas.declaration import LINKS, SOME, Declaration
from hierfl.formulas.imputed import scaled
from hierfl.formulas.layout import Layout, check_columns, layout_of
from hierfl.formulas.priors import all_priors, is_of
from hierfl.formulas.schema import OFFSET, Schema
from hierfl.formulas.writer import CENTERED, INTERCEPT, NO_NAME
from hierfl.models.priors import Prior


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

    def own(self, priors: Mapping[str, Prior]) -> dict[str, Prior]:
        """Return the priors of this parameter's sites, by the names that its layout has."""
        first = f"{self.name}_"
        columns = {
            f"{first}{column}": column for column in (INTERCEPT, *self.layout.common.columns)
        }
        sites = {term.name for term in self.layout.common.terms}
        kinds = ("b", "simplex", "sds", "sdgp", "lscale")
        sites |= {f"{kind}_{name}" for name in sites for kind in kinds}
        sites |= {*self.declared.family.parameters(SOME)}
        for group in self.layout.groups:
            sites |= {group.sd, group.cor or group.sd, f"rho_{group.site}"}
            sites |= {f"lscale_{group.site}_{term.name}" for term in group.design.terms}
        return {
            columns.get(key, key): prior
            for key, prior in priors.items()
            if key in columns or any(is_of(key, site) for site in sites)
        }

    def named(self, priors: Mapping[str, Prior]) -> dict[str, Prior]:
        """Return priors by the names of a formula's sites."""
        columns = {INTERCEPT, *self.layout.common.columns}
        return {f"{self.name}_{k}" if k in columns else k: v for k, v in priors.items()}


def parameters_of(declared: Declaration, schema: Schema, main: Layout) -> dict[str, Parameter]:
    """Return each parameter with terms; refuse two sites of one name."""
    parameters = {}
    taken = _sites(main)
    for name, own in declared.of_parameters.items():
        if own.family.kind == "real":
            own = scaled(own, schema)
        plain = layout_of(own, schema)
        if plain.common.offsets:
            raise ValueError(f"'{name} ~ ...' has an offset: only the response's terms may")
        made = Parameter(name, own, _of_parameter(name, plain))
        check_columns(main, plain)
        if twice := sorted(_sites(made.layout) & taken):
            what = f"'{twice[0]}' is a term of the response and one of '{name}'"
            raise ValueError(f"{what}: rename the column")
        taken |= _sites(made.layout)
        parameters[name] = made
    return parameters


def _sites(layout: Layout) -> set[str]:
    own = {layout.intercept, layout.sampled_intercept, *(term.name for term in layout.common.terms)}
    scales = {site for group in layout.groups for site in (group.sd, group.cholesky)}
    own |= scales | {f"{site}{CENTERED}" for site in scales}
    return own | {group.site for group in layout.groups}


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
        suffix=f"_{word}",
        intercept=f"{name}_{INTERCEPT}",
    )


def priors_with_parameters(
    declared: Declaration,
    schema: Schema,
    main: Layout,
    parameters: Mapping[str, Parameter],
    own: Mapping[str, Prior],
) -> dict[str, Prior]:
    """Return the priors of all sites; those of a parameter's begin with its name."""
    of_response = dict(own)
    of_parameters: dict[str, Prior] = {}
    design = {name: of for name, of in schema.design.items() if name != OFFSET}  # the response's
    plain = replace(schema, design=design)
    for name, parameter in parameters.items():
        of_parameter = {key: own[key] for key in own if parameter.own({key: own[key]})}
        of_response = {key: prior for key, prior in of_response.items() if key not in of_parameter}
        if name in of_response:
            fix = f"give priors of its sites, such as '{name}_{INTERCEPT}'"
            raise ValueError(f"priors has '{name}', which has terms of its own: {fix}")
        args = parameter.declared, plain, parameter.layout
        of_parameters |= parameter.named(all_priors(*args, parameter.own(of_parameter)))
    response_priors = all_priors(declared, schema, main, of_response)
    return {
        name: prior for name, prior in response_priors.items() if name not in parameters
    } | of_parameters
