"""Groups' intercepts and slopes: their spread has its prior at the means of columns, and is reported at 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hierfl.formulas.layout import AT_MEANS, CENTERED, INTERCEPT, GroupTerm, Writer, independent
from hierfl.formulas.schema import Schema
from hierfl.models.priors import Prior


def means_of(group: GroupTerm, schema: Schema) -> dict[str, float]:
    """Return the means of a correlated term's numbers; {} if all are 0.

    An intercept's sd at 0 grows with the numbers' distance from 0. A prior of it in units of the
    response would pull the sd of the slopes toward 0 where the numbers are years, or ages.
    """
    if not group.cor or group.places or group.group.kind or INTERCEPT not in group.columns:
        return {}
    numbers = [name for name in group.columns[1:] if name not in group.design.coded]
    margins = {name: schema.design[name] for name in numbers}
    return {name: m.mean for name, m in margins.items() if abs(m.mean) > 1e-9 * m.sd}


def origins(model: Any) -> dict[str, list[float]]:
    """Return a formula's sites of clients whose intercept has its prior at the columns' means.

    Of each, the weights of its entries in that intercept, which no shift of a column changes.
    """
    return {
        group.site: [1.0, *(means.get(name, 0.0) for name in group.columns[1:])]
        for found in model.layouts
        for group in found.at("clients")
        if (means := means_of(group, model.agreed))
    }


def write_moved(
    out: Writer, group: GroupTerm, priors: Mapping[str, Prior], means: Mapping[str, float]
) -> None:
    """Write sds and correlations at the means of a term's columns, and those at 0 that follow."""
    columns = group.columns
    sd, cholesky = f"{group.sd}{CENTERED}", f"{group.cholesky}{CENTERED}"
    names = [f"{group.sd}[{name}]" for name in columns]
    note = f"{', '.join(columns)}; {AT_MEANS}"
    out.sample(sd, independent(priors, names, [len(columns)]), note=note)
    concentration = float(priors[str(group.cor)])
    out.sample(cholesky, f"dist.LKJCholesky({len(columns)}, {concentration})")
    moves = ", ".join(f"{-means.get(name, 0.0):.9g}" for name in columns[1:])
    out.add(f"lower = {out.named(sd)}[:, None] * {out.named(cholesky)}")
    out.add(f"first = lower[:1] + torch.tensor([[{moves}]]) @ lower[1:]  # where they are 0")
    out.add("upper = torch.linalg.qr(torch.cat([first, lower[1:]]).mT).R")
    out.add("lower = upper.mT * upper.diagonal().sign()")
    scale, factor = out.named(group.sd), out.named(group.cholesky)
    out.scales[group.site] = scale
    out.add(f"{scale} = pyro.deterministic({group.sd!r}, lower.square().sum(-1).sqrt())")
    out.add(f"{factor} = pyro.deterministic({group.cholesky!r}, lower / {scale}[:, None])")
    out.add(f"pyro.deterministic({group.cor!r}, {factor} @ {factor}.mT)")
