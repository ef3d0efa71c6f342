"""A fit of a formula again, with other terms: the same rows, method, seed and settings."""

from typing import Any

import torch

import hierfl
from hierfl.core.arguments import expect_kind
from hierfl.core.user_warnings import warn
from hierfl.data.absent import HAND_IN, NOT_SAVED, RowsNotSaved, is_absent
from hierfl.data.clients import ClientData
from hierfl.formulas.formula import Formula, Frames
from hierfl.method import Method
from hierfl.posterior.snapshot import expect_fit
from hierfl.program.sites import Recipe, recipe_of


def update(
    fit: Any, formula: str, data: Frames, *, rounds: int | None = None, **options: Any
) -> Any:  # a Fit, whose module imports this one
    """Refit with other terms, `fit.update("~ . + age", frames)`, like R's `update`.

    The schema is kept as far as the terms allow: levels, units and the least number of rows. So are
    the seed, the cohort, the settings and the method; if it was chosen, it is chosen again.

    Args:
        fit: a fit of a `hierfl.formula`.
        formula: the new terms; a dot stands for the old terms on its side.
        data: the frames that it was fitted to, with the columns of the new terms. A fit keeps only
            the columns of its own terms.
        rounds: as in `hierfl.fit`. Default None: as many as the fit planned, if its method was
            named and does not stop automatically.
        **options: `family`, `priors` and `missing`, as in `Formula.update`.

    Raises:
        TypeError: the fit is of another model, or an option is unknown.
        ValueError: the rows of the frames are not those of the fit; or as `Formula.update` and
            `hierfl.fit`.
    """
    expect_fit(fit)
    old, federation = fit.method.model, fit.federation
    expect_kind(old, Formula, "the model", "fit.update is for fits of a hierfl.formula")
    new = old.update(formula, **options)
    _check_same_rows(old, federation.data, data)
    made = _with_schema(new, old, data)
    rows = made.data(data)
    if is_fewer := federation.data.num_rows - rows.num_rows:
        what = f"{is_fewer} rows lack a value of the new terms and are left out"
        warn(f"{what}: fits of other rows are not compared by their scores")
    how: dict[str, Any] = {"seed": federation.seed, "settings": federation.settings}
    if federation.cohort < federation.data.num_clients:
        how["cohort"] = federation.cohort
    if fit.chosen is not None:
        return hierfl.fit(made, rows, rounds=rounds, **how)
    method = with_model(fit.method, made)
    if rounds is None and method.most_rounds is None:
        rounds = fit.rounds
    return hierfl.fit(method, rows, rounds=rounds, **how)


def _with_schema(made: Formula, old: Formula, frames: Frames) -> Formula:
    """Return a formula with a schema, in which levels and units are those agreed on before."""
    columns = {n: c for n, c in old.agreed.columns.items() if n in made.declared.columns}
    levels = {n: c.levels for n, c in columns.items() if c.kind == "category"}
    shared = {g.name for g in made.declared.parts.groups if made.clients not in g.by}
    groups = {n: g.levels for n, g in old.agreed.groups.items() if g.levels and n in shared}
    merged = any(column.rare for column in columns.values())
    return made.on(
        frames,
        levels={**groups, **levels},
        units={n: c.unit for n, c in columns.items() if c.unit},
        min_count=old.agreed.min_count,
        rare="merge" if merged else "refuse",
    )


def _check_same_rows(old: Formula, fitted: ClientData, frames: Frames) -> None:
    """Refuse frames whose columns of the old terms are not those of the fit."""
    if is_absent(fitted):
        raise RowsNotSaved(f"{NOT_SAVED}, to compare them with those of the update: {HAND_IN}")
    handed = old.data(frames)
    same = set(fitted.names) <= set(handed.names)
    handed = handed.select(list(fitted.names)) if same else handed
    for name, values in fitted.fields.items() if same else ():
        other = handed.fields.get(name)
        if other is None or other.shape != values.shape:
            same = False
            break
        same &= torch.allclose(values.double(), other.double(), equal_nan=True)
    if not same:
        fix = "give those that it was fitted to, or fit the updated formula, fit.method.model.update(text)"
        raise ValueError(f"the frames have other rows than the fit's: {fix}")


def with_model(method: Method, model: Formula) -> Method:
    """Return a method of the same settings for another model; refuse one that no builder made."""
    recipe = recipe_of(method)
    if recipe is None:
        what = f"method '{method.name}' was not made by a function of hierfl.methods"
        raise ValueError(f"{what}, and cannot be remade for another formula: fit it to the frames")
    options = {
        name: model
        if value is method.model
        else with_model(value, model)
        if isinstance(value, Method)
        else value
        for name, value in recipe.options.items()
    }
    made = Recipe(recipe.factory, options).again()
    assert isinstance(made, Method)
    return made
