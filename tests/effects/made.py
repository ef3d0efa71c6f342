"""Formulas on small made-up frames, with draws of their priors in place of a posterior: no fit is run."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pyro.distributions as dist
import torch
from torch import Tensor

import hierfl
from hierfl import Program, full_batch, read
from hierfl.diagnostics.simulated_data import drawn as simulated
from hierfl.effects.drawn import CoefficientDraws
from hierfl.guides import delta
from hierfl.models import families
from hierfl.posterior.draws import local_plates
from tests.read_once import once

CLIENTS = ("north", "south", "east", "west")
REGIONS = {"north": "cold", "south": "warm", "east": "cold", "west": "warm"}


def frame(rows: int = 24, seed: int = 0) -> pd.DataFrame:
    """Return a frame of its own, which a test may change."""
    return _frame(rows, seed).copy()


@cache
def _frame(rows: int, seed: int) -> pd.DataFrame:
    """Rows of four clients: numbers, categories, groups above, within and across clients, and responses."""
    rng = np.random.default_rng(seed)
    parts = []
    for k, name in enumerate(CLIENTS):
        n = rows + 6 * k
        part = pd.DataFrame(
            {
                "site": name,
                "region": REGIONS[name],
                "beds": 10.0 * k,
                "ward": [f"{name} {i % 3}" for i in range(n)],
                "year": [f"y{i % 2}" for i in range(n)],
                "age": rng.normal(50.0 + 2.0 * k, 10.0, n),
                "dose": rng.normal(0.0, 1.0, n),
                "sex": [("f", "m")[i % 2] for i in range(n)],
                "arm": [("a", "b", "c")[i // 8 % 3] for i in range(n)],
            }
        )
        part["old"] = part["age"] > part["age"].median()
        part["n"] = rng.integers(3, 12, n)
        part["died"] = rng.binomial(1, 0.4, n)
        part["k"] = rng.binomial(part["n"], 0.4)
        part["count"] = rng.poisson(3.0, n)
        part["y"] = 1.0 + 0.05 * part["age"] + rng.normal(0.0, 1.0, n)
        part["time"] = rng.exponential(5.0, n)
        part["share"] = rng.beta(2.0, 3.0, n)
        part["seen"] = rng.binomial(1, 0.7, n)
        part["grade"] = pd.Categorical.from_codes(rng.integers(0, 3, n), ["i", "ii", "iii"], True)
        part["lost"], part["all"] = part["n"] - part["k"], part["n"] + part["count"]
        part["most"], part["left"] = 0.7 * part["share"], 0.3 * part["share"]
        part["rest"], part["angle"] = 1.0 - part["share"], 2.0 * np.arctan(part["dose"])
        part["some"] = part["count"] + 1
        parts.append(part)
    return pd.concat(parts, ignore_index=True)


read_once = once(read, {})


def program_of(formula: hierfl.Formula, data: hierfl.ClientData) -> Program:
    return read_once(formula, delta, data, learn=False)


def drawn(
    text: str, family: Any = "gaussian", *, draws: int = 20, **options: Any
) -> CoefficientDraws:
    """A formula's coefficients, drawn from their prior by the program itself."""
    if isinstance(text, str) and isinstance(family, str) and not options:
        return _drawn(text, family, draws)
    return _drawn.__wrapped__(text, family, draws, **options)


@cache
def _drawn(text: str, family: Any, draws: int, **options: Any) -> CoefficientDraws:
    rows = frame()
    made = hierfl.formula(text, family, clients="site", **options).on(rows)
    return of_formula(made, rows, draws)


def of_formula(made: hierfl.Formula, rows: pd.DataFrame, draws: int = 20) -> CoefficientDraws:
    """Draws of a formula's coefficients from their prior."""
    data = made.data(rows)
    program = program_of(made, data)
    batch = full_batch(data, torch.arange(data.num_clients), seed=0)
    values, _ = simulated(program, batch, count=draws, seed=1)
    local = local_plates(program)
    shared = {name: value for name, value in values.items() if name not in local}
    own = {n: values[n].squeeze(2) for n in local}  # (S, N, 1, *event)
    return CoefficientDraws(made, data.names, data, shared, own)


def repeated(found: CoefficientDraws, draws: int) -> CoefficientDraws:
    """The first draw, several times."""
    shared, own = (
        {name: value[:1].expand(draws, *value.shape[1:]) for name, value in of.items()}
        for of in (found.shared, found.own)
    )
    return replace(found, shared=shared, own=own)


def with_shared(found: CoefficientDraws, **values: Any) -> CoefficientDraws:
    """The same draws with some global sites at fixed values; intercepts are those at the columns' means."""
    intercepts = [name for name in values if name.endswith("Intercept")]
    centered = {n: f"{n}_centered" for n in intercepts if f"{n}_centered" in found.shared}
    values = {centered.get(name, name): value for name, value in values.items()}
    fixed = {
        name: torch.as_tensor(value).double().expand(found.shared[name].shape)
        for name, value in values.items()
    }
    return replace(found, shared={**found.shared, **fixed})


def of_program(found: CoefficientDraws, rows: pd.DataFrame) -> Tensor:
    """The mean response of labeled rows by the program itself, (S, n), client after client."""
    data = found.formula.data(rows)
    program = program_of(found.formula, data)
    parts = []
    for name in data.names:
        k = found.clients.index(name)
        batch = full_batch(data.select([name]), torch.arange(1), seed=0)
        each = []
        for s in range(found.count):
            values = {n: v[s] for n, v in found.shared.items()}
            values |= {n: v[s, k][None, None] for n, v in found.own.items()}
            ((fn, _),) = program.observed(values, batch, {}).values()
            base: Any = fn
            while isinstance(base, dist.MaskedDistribution | dist.Independent):
                base = base.base_dist
            if isinstance(base, families.Censored):
                base = base.base
            each.append((base.probs if isinstance(base, dist.Categorical) else base.mean)[0])
        parts.append(torch.stack(each))
    return torch.cat(parts, 1)
