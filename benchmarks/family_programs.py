"""A small hierarchical program of each response family, and clients drawn from its priors.

One covariate, an intercept a client, and the family's parameters with priors narrow enough to
simulate from:

    y_kn ~ family(a_k + slope x_kn),    a_k ~ Normal(Intercept, sd)

Times are censored on all sides, and some enter late, by times drawn apart from the responses.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from hierfl import ClientBatch, ClientData
from hierfl.models import families
from hierfl.models.families import Response, ResponseFamily
from hierfl.models.families.names import FAMILIES
from hierfl.program.sites import Model

NAMES = sorted([*FAMILIES, "piecewise_exponential"])
LEVELS = {
    **dict.fromkeys(("categorical", "multinomial", "dirichlet"), ("a", "b", "c")),
    **dict.fromkeys(("acat", "cumulative", "sratio"), ("a", "b", "c", "d")),
}
BREAKS = (0.7, 1.5)
Truth = dict[str, Tensor]


def family_of(name: str) -> ResponseFamily:
    """Return a family with its default link."""
    if name == "piecewise_exponential":
        return families.piecewise_exponential(BREAKS)
    return families.named(name)


def response_of(name: str) -> Response:
    """Return a response of the family's kind: levels where it has some."""
    return Response(1.0, 1.0, LEVELS.get(name, ()))


def priors(name: str) -> dict[str, Any]:
    """Return priors of all global sites, narrow enough that data drawn from them look like data."""
    family, response = family_of(name), response_of(name)
    width = family.outputs(response)
    shape = () if width == 1 else (width,)

    def repeated(fn: Any) -> Any:
        return fn.expand(shape).to_event(len(shape))

    steps: Any = families.Ordered(dist.Normal(0.0, 1.5), 2 if name == "ordered_beta" else 3)
    if name in ("acat", "sratio"):
        steps = dist.Normal(0.0, 1.5).expand([3]).to_event(1)
    own = {
        "sigma": dist.LogNormal(-0.5, 0.4),
        "nu": dist.Gamma(8.0, 1.0),
        "shape": dist.LogNormal(0.7, 0.4),
        "phi": dist.LogNormal(1.8, 0.4),
        "zi": dist.Beta(3.0, 7.0),
        "hu": dist.Beta(3.0, 7.0),
        "alpha": dist.Normal(0.0, 2.0),
        "kappa": dist.LogNormal(1.0, 0.4),
        "thresholds": steps,
        "log_hazard": dist.Normal(0.0, 0.5).expand([len(BREAKS) + 1]).to_event(1),
    }
    level = {"Intercept": repeated(dist.Normal(0.5, 0.5))} if family.has_intercept else {}
    return {
        **level,
        "slope": repeated(dist.Normal(0.0, 0.5)),
        "sd": repeated(dist.LogNormal(-0.7, 0.5)),
        **{parameter: own[parameter] for parameter in family.parameters(response)},
    }


def program(name: str, additions: tuple[str, ...] = ()) -> Model:
    """Return the program of a family.

    Args:
        name: of the family.
        additions: row fields that the data have. Default none.
    """
    family, given = family_of(name), priors(name)
    width = family.outputs(response_of(name))

    def model(batch: ClientBatch) -> None:
        sites = {site: pyro.sample(site, prior) for site, prior in given.items()}
        level, slope, sd = (sites.pop(k, torch.zeros(())) for k in ("Intercept", "slope", "sd"))
        own = dist.Normal(level, sd)
        rows = {a: getattr(batch, a) for a in additions}
        with batch.clients():
            a = pyro.sample("a", own if width == 1 else own.to_event(1))
            with batch.data():
                x = batch.x if width == 1 else batch.x[..., None]
                fn = family.of(a + slope * x, **sites, **rows)
                pyro.sample("y", fn, obs=batch.y)

    return model


def drawn(name: str, seed: int, *, clients: int = 8, rows: int = 12) -> tuple[Truth, ClientData]:
    """Return parameters drawn from the priors, site -> value, and rows given them.

    Both are drawn again where a level of an ordinal response does not occur, and where shares of an
    ordered beta lack an end or are few between both: thresholds would have no bound but their
    prior, and a schema has no level without rows. Ranks stay uniform, as the choice depends on the
    rows alone.

    Args:
        name: of the family.
        seed: of parameters and rows.
        clients: their number.
        rows: of each client.
    """
    family = family_of(name)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        truth, x, y, fields = _replication(name, clients, rows)
        while not _is_whole(family, y, len(LEVELS.get(name, ()))):
            truth, x, y, fields = _replication(name, clients, rows)
    family.check(y.flatten(0, 1), {k: v.flatten() for k, v in fields.items()})
    client = np.repeat(np.arange(clients), rows)
    columns: dict[str, Any] = {k: v.flatten(0, 1) for k, v in {"x": x, "y": y, **fields}.items()}
    return truth, ClientData.from_arrays(client, **columns)


def _is_whole(family: ResponseFamily, y: Tensor, levels: int) -> bool:
    """Return whether each level of an ordinal response occurs, and shares at and between both ends."""
    if family.kind == "ordered":
        return len(y.unique()) == levels
    ends = (y == 0.0).sum(), (y == 1.0).sum()
    between = y.numel() - int(sum(ends))
    return family.kind != "share" or (min(map(int, ends)) > 0 and between > y.numel() // 4)


def _replication(
    name: str, clients: int, rows: int
) -> tuple[Truth, Tensor, Tensor, dict[str, Tensor]]:
    """Return parameters, x and y (clients, rows), and the response's other fields, drawn by torch's generator."""
    family = family_of(name)
    truth: Truth = {site: prior.sample() for site, prior in priors(name).items()}
    level = truth.get("Intercept", torch.zeros(()))
    truth["a"] = level + truth["sd"] * torch.randn(clients, *truth["sd"].shape)
    x = torch.randn(clients, rows)
    each = x.reshape(clients, rows, *[1] * truth["sd"].dim())
    eta = truth["a"][:, None] + truth["slope"] * each
    own = {k: truth[k] for k in family.parameters(response_of(name))}
    fields = _additions(family, clients, rows)
    y = family.of(eta, **own, **{k: v for k, v in fields.items() if k != "cens"}).sample()
    if "entry" in fields:
        y, fields = _seen(y, fields["entry"])
    return truth, x, y, fields


def additions_of(name: str) -> tuple[str, ...]:
    """Return the row fields of the family's simulated data."""
    return family_of(name).additions


def _additions(family: ResponseFamily, clients: int, rows: int) -> dict[str, Tensor]:
    if "trials" in family.additions:
        return {"trials": torch.randint(2, 12, (clients, rows))}
    if "entry" in family.additions:
        late = torch.rand(clients, rows) < 0.4
        return {"entry": torch.where(late, 0.5 * torch.rand(clients, rows), 0.0)}
    return {}


def _seen(time: Tensor, entry: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return what is seen of times.

    A fifth at visits half a unit apart, and none after the end of follow-up.
    """
    visits = torch.rand(time.shape) < 0.2
    low = torch.maximum(torch.floor(2.0 * time) / 2.0, entry)
    high = torch.floor(2.0 * time) / 2.0 + 0.5
    left = visits & (low <= entry)  # between entry and the first visit
    between = visits & ~left
    end = entry + 0.2 + 5.0 * torch.rand(time.shape)
    after = ~visits & (time > end)
    cens = torch.zeros(time.shape, dtype=torch.long)
    cens = torch.where(after, 1, torch.where(left, -1, torch.where(between, 2, cens)))
    value = torch.where(after, end, torch.where(left, high, torch.where(between, low, time)))
    return value, {"cens": cens, "upper": torch.where(between, high, value), "entry": entry}
