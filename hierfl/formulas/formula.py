"""`formula`: a mixed model as one line of text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import chain
from typing import Any, TypedDict, TypeVar, Unpack

import pandas as pd

from hierfl.core.arguments import check_names, expect_kind, shown, spelled
from hierfl.data.batch import ClientBatch
from hierfl.data.clients import ClientData
from hierfl.data.consistency import is_frame
from hierfl.data.preprocess import read_frame
from hierfl.formulas.agree import has_columns, schema
from hierfl.formulas.checked import check_declared, given
from hierfl.formulas.client_data import Inside, client_data
from hierfl.formulas.columns import by_client
from hierfl.formulas.declaration import Declaration, Missing, joined, with_bounds
from hierfl.formulas.layout import Dims, Layout, Parameter, dims, layout_of, parameters_of
from hierfl.formulas.levels import Rare
from hierfl.formulas.priors import SitePriors, site_priors
from hierfl.formulas.schema import Schema
from hierfl.formulas.shown import prior_table, text_of, updated
from hierfl.formulas.source import source
from hierfl.formulas.structures import matrix_of
from hierfl.formulas.terms import parse
from hierfl.models.families import ResponseFamily
from hierfl.models.priors import Prior

Frames = pd.DataFrame | Mapping[str, pd.DataFrame]
M = TypeVar("M")
OPTIONS = ("family", "priors", "missing")  # that an update may change


class SchemaOptions(TypedDict, total=False):
    """What clients agree on beforehand, and which levels they may name; as in `hierfl.schema`."""

    units: Mapping[str, str] | None
    levels: Mapping[str, Sequence[Any]] | None
    min_count: int | None
    rare: Rare


@spelled
@dataclass(frozen=True, eq=False)
class Formula:
    """A mixed model in one line of text; with a schema, it is a Pyro model of a `ClientBatch`.

    Args:
        text: the formula.
        family: of the response.
        clients: the column that names the clients.
        priors: site -> distribution, or brms's words for one.
        missing: "refuse" rows with missing values, or "drop" them.
        schema: that clients have agreed on; None: `hierfl.fit` makes it first.
        data2: matrix that a term names -> names of its groups, and its rows.
    """

    text: str
    family: ResponseFamily
    clients: str
    priors: Mapping[str, Prior] = field(default_factory=dict)
    missing: Missing = "refuse"
    schema: Schema | None = None
    data2: Mapping[str, Any] = field(default_factory=dict)
    # The groups within clients, from each client's first rows; clients keep them, records do not.
    _inside: Inside = field(default_factory=dict, init=False, repr=False)

    def __repr__(self) -> str:
        return text_of(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, without what is made of it again."""
        return {part.name: getattr(self, part.name) for part in fields(self)}

    @cached_property
    def declared(self) -> Declaration:
        """The formula, its family and its clients."""
        parts = parse(self.text)
        return with_bounds(Declaration(parts, self.family, self.clients, self.missing, self.data2))

    @property
    def agreed(self) -> Schema:
        """The schema.

        Raises:
            ValueError: clients have not agreed on one.
        """
        if self.schema is None or not self.has_schema:
            fix = "fit it, hierfl.fit(formula, frames), or call formula.on(frames)"
            raise ValueError(f"clients have not agreed on a schema for '{self.text}' yet: {fix}")
        return self.schema

    @property
    def has_schema(self) -> bool:
        """Whether clients have agreed on all that the formula needs."""
        schema, kinds = self.schema, self.declared.columns
        return bool(schema and schema.formula == self.text and has_columns(schema, kinds))

    @cached_property
    def layout(self) -> Layout:
        """Which coefficients are global and which are a client's own."""
        return layout_of(self.declared, self.agreed)

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """The parameters of the family that have terms."""
        return parameters_of(self.declared, self.agreed, self.layout)

    @property
    def layouts(self) -> list[Layout]:
        """The layout of the response's terms, and then those of parameters."""
        return [self.layout, *(parameter.layout for parameter in self.parameters.values())]

    @cached_property
    def site_priors(self) -> SitePriors:
        """The prior of every site, or of each column of it, the user's and the defaults."""
        return site_priors(self)

    @property
    def all_priors(self) -> dict[str, Prior]:
        """The distributions of `site_priors`."""
        return {name: of.prior for name, of in self.site_priors.items()}

    def on(self, frames: Any, **options: Unpack[SchemaOptions]) -> Formula:
        """Return the formula with the schema that some frames agree on, or itself if it has one.

        Args:
            frames: one frame with the column of clients, or {client: frame}.
            **options: `units`, `levels`, `min_count` and `rare`, as in `hierfl.schema`.

        Raises:
            KeyError, TypeError, ValueError: as `hierfl.schema`.
        """
        check_names("on", options, tuple(SchemaOptions.__annotations__))
        if self.has_schema:
            return self
        return replace(self, schema=schema(frames, self, start=self.schema, **options))

    def update(self, text: str, **options: Any) -> Formula:
        """Return a formula with other terms, `"~ . + age"`, like R's `update`.

        A dot stands for the terms on its side of this formula. The schema of the columns is kept;
        clients agree on what the new terms need when the formula is fitted.

        Args:
            text: the new formula; with nothing before the "~", the response stays.
            **options: `family`, `priors` and `missing`, as in `hierfl.formula`. Default: those of
                this formula.

        Raises:
            TypeError: an option is unknown.
            ValueError: the text cannot be read, or removes a term that is not there.
        """
        check_names("update", options, OPTIONS)
        own = {name: getattr(self, name) for name in OPTIONS} | options
        made = replace(self, text=updated(self.text, text), **given(**own))
        check_declared(made.declared)
        return made

    def prior_summary(self) -> pd.DataFrame:
        """Return a row for each prior: its `site`, the `prior`, and its `source`, "user" or "default".

        Raises:
            ValueError: clients have not agreed on a schema, which the defaults need.
        """
        return prior_table(self)

    def program(self) -> str:
        """Return the Pyro program of the formula: the text that runs, to copy and change.

        Raises:
            ValueError: clients have not agreed on a schema.
        """
        return source(self)

    @cached_property
    def model(self) -> Callable[[ClientBatch], None]:
        """The program as a function."""
        # Its mark would be that of every formula in the process; a recipe holds the formula itself.
        text = self.program().replace("@hierfl.model\n", "")
        scope: dict[str, Any] = {}
        exec(compile(text, f"<program of '{self.text}'>", "exec"), scope)
        made: Callable[[ClientBatch], None] = scope["model"]
        return made

    @cached_property
    def dims(self) -> dict[str, Dims]:
        """Site -> name and labels of each of its dimensions, for ArviZ and tables."""
        dimensions = dims(self.declared, self.agreed, self.layout)
        for own in self.parameters.values():
            dimensions |= dims(own.declared, self.agreed, own.layout)
        return dimensions

    def __call__(self, batch: ClientBatch) -> None:
        """Run the program."""
        self.model(batch)

    def data(self, frames: Any, *, labeled: bool = True) -> ClientData:
        """Return clients' rows as the program reads them.

        Groups within a client, such as wards, are numbered when the formula first sees rows, and
        keep their numbers.

        Args:
            frames: one frame with the column of clients, or {client: frame}.
            labeled: whether the frames have the response.

        Raises:
            KeyError, TypeError, ValueError: a column is missing, or a value does not fit the
                schema.
        """
        return client_data(self, frames, self._inside, labeled=labeled)


# ------------------------------------------------------------ frames in place of `ClientData`
def of_frames(
    model: M, data: Any, validation: Any, clients: str | None = None
) -> tuple[M, Any, Any]:
    """Return a formula with its schema, and its rows, as they are run; of another program each column is a field."""
    formula = model if isinstance(model, Formula) else getattr(model, "model", None)  # of a method
    is_read = isinstance(data, ClientData)
    if clients is not None and not is_frame(data):
        what = f"clients={clients!r} names a column of a frame, and data is {shown(data)}"
        raise ValueError(f"{what}: leave clients= out")
    if clients is not None and isinstance(formula, Formula) and clients != formula.clients:
        what = f"clients is {clients!r}, and '{formula.clients}' of the formula"
        raise ValueError(f"{what}: leave clients= out")
    if not isinstance(formula, Formula):
        rows = data if clients is None else read_frame(data, clients)
        return model, rows, validation if clients is None else read_frame(validation, clients, rows)
    if isinstance(model, Formula):
        ready: Any = model if is_read else model.on(data)
        return ready, rows_of(ready, data), rows_of(ready, validation)
    if not is_read and not formula.has_schema:
        fix = "give the method formula.on(frame), and fit it to the frame"
        raise ValueError(f"the method's formula '{formula.text}' has no schema: {fix}")
    return model, rows_of(formula, data), rows_of(formula, validation)


def rows_of(model: object, rows: Any, fitted: Collection[str] = (), *, asked: bool = False) -> Any:
    """Return frames of a formula, and only those, as a program's rows; when `asked` some may lack the response."""
    if not isinstance(model, Formula) or rows is None or isinstance(rows, ClientData):
        return rows
    for term in chain.from_iterable(layout.at("within") for layout in model.layouts):
        names = [name for name in by_client(rows, model.clients) if name in fitted]
        if lost := [name for name in names if (name, term.group.name) not in model._inside]:
            what = f"a loaded fit does not know the groups '{term.group.name}' of client"
            fix = "call formula.data(the rows it was fitted to) of fit.method.model first"
            raise ValueError(f"{what} '{lost[0]}': {fix}")
    frames = list(rows.values()) if isinstance(rows, Mapping) else [rows]
    labels = {*model.declared.parts.labels}
    labeled = all(labels <= {*getattr(frame, "columns", ())} for frame in frames)
    inside = model._inside
    if asked:  # what other clients' groups are called in one question does not bind the next
        inside = {place: names for place, names in inside.items() if place[0] in fitted}
    return client_data(model, rows, inside, labeled=labeled, asked=asked)


# ------------------------------------------------------------ declared
@spelled
def formula(
    text: str | Sequence[str],
    family: str | ResponseFamily = "gaussian",
    *,
    clients: str,
    priors: Mapping[str, Any] | None = None,
    missing: Missing = "refuse",
    schema: Schema | None = None,
    data2: Mapping[str, Any] | None = None,
) -> Formula:
    """Declare a mixed model in one line of text.

        model = hierfl.formula("died ~ age + (1 + age | hospital)", "bernoulli", clients="hospital")
        fit = hierfl.fit(model, frames)

    The syntax is that of brms and lme4. `(1 + age | hospital)` gives each hospital its own
    intercept and slope, which may be correlated; with `||` they are independent. The data show
    where other groups belong: `(1 | region)` above the clients is global, `(1 | hospital/ward)`
    within them is local, `(1 | year)` at several of them is global. Products `a * b`, `C(x)`,
    `offset(x)`, `mo(x)`, `cs(x)`, `mi(x)`, `scale(x)`, `center(x)`, `bs(x, df=5)`, `poly(x, 2)`,
    functions such as `log(x)` are terms. `s(x, k=10)` is a penalized spline, `s(x, by=sex)` one for
    each level, `s(x, hospital, bs="fs")` one for each group, and `gp(x, k=20)` a Gaussian process.
    `(1 | gr(hospital, cov=A))` are groups with a known covariance, and `car(M, gr=county)`
    neighbors. Additions to the response are `y | trials(n)`, `weights(w)`, `trunc(lb=0, ub=10)`,
    and for times `event(status)`, `cens(status, upper)`, `entry(start)`. `cbind(a, b, c)` is a
    response in several columns.

    Args:
        text: the formula. A list, such as ["y ~ x + (1 | h)", "sigma ~ x + (1 | h)"], or formulas
            separated by semicolons, also give terms to parameters of the family: `sigma`, `shape`
            and `phi` on the log scale, `zi` and `hu` as log odds. "x | mi() ~ z" imputes x, the
            covariate of `mi(x)`, where rows lack it.
        family: the family of the response, or its name, as listed in docs/families.md. Default
            "gaussian".
        clients: the column that names the clients.
        priors: site -> distribution of Pyro or of PreliZ, or as in brms, "normal(0, 1)", which for
            a scale means the part above 0. A site is "age", "sigma", or one column, "sex[male]".
            "b" stands for all common coefficients; "sd" for all standard deviations of groups,
            "sd_hospital" for one; "cor" for the correlations (the concentration of an LKJ, or
            "lkj(2)"); "sds", "sdgp" and "lscale" for the scales of smooth terms. Default: weakly
            informative ones, listed in `Formula.prior_summary`.
        missing: "refuse" rows with missing values, or "drop" them.
        schema: the schema that clients have agreed on. Default None: `hierfl.fit` makes it from
            their counts and sums.
        data2: matrices that terms name, {"A": frame}, as in brms: pandas frames whose index and
            columns name the groups. For `gr(g, cov=A)` a covariance; for `car(M, gr=g)`, 1 for
            neighbors and 0 for others. Over nodes, only the server needs them. Default: none.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the formula cannot be read, or has an unsupported part; the message names it and
            the nearest supported one.
    """
    own = given(family=family, priors=priors, missing=missing)
    expect_kind(clients, str, "clients", "give the name of the column that names the clients")
    expect_kind(data2 or {}, Mapping, "data2", "give a dict of frames, {'A': frame}")
    if schema is not None and schema.clients != clients:
        raise ValueError(f"the schema is for clients '{schema.clients}', not '{clients}'")
    own["data2"] = {name: matrix_of(name, matrix) for name, matrix in (data2 or {}).items()}
    made = Formula(joined(text), clients=clients, schema=schema, **own)
    check_declared(made.declared)
    return made
