"""What integrates out of a hierarchy and its clients' factors in closed form.

With factors exp(eta . v - v' Lambda v / 2) in v = (w, u), where u are entries of z, the local
parameters w integrate out client by client, and then the means m. This leaves a density of the
scales s. If clients have mixing parameters t, u contains some of them, and a density of s and all t
is left.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hierfl.summaries.gaussians import LOG_2_PI, Normal, Quadratic, times_factor, without_own
from hierfl.summaries.hierarchy import Factors, Hierarchy


def rest_of(hierarchy: Hierarchy, z: Tensor, t: Tensor | None) -> Tensor:
    """Return what v holds beside Normal local parameters: u (U,), or (C, O + U)."""
    u = z[hierarchy.reading.shared]
    if hierarchy.mixing is None or t is None:
        return u
    o = hierarchy.mixing.sampled_part(t)
    return torch.cat([o, u.expand(len(o), -1)], 1)


def arranged(hierarchy: Hierarchy, precision: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Return factors (C, V, V) and (C, V) with the Normal local parameters first."""
    if hierarchy.mixing is None:
        return precision, shift
    at = hierarchy.arrangement
    return precision[:, at][:, :, at], shift[:, at]


def given(
    hierarchy: Hierarchy,
    normal: Normal,
    z: Tensor,
    precision: Tensor,
    shift: Tensor,
    t: Tensor | None = None,
) -> Quadratic:
    """Return p(w | z, t) times each client's factor, as a function of w.

    `normal` is p(w | z, t), the factors are (C, V, V) and (C, V); t is (C, M), or None.
    """
    return times_factor(normal, rest_of(hierarchy, z, t), *arranged(hierarchy, precision, shift))


def of_means(
    hierarchy: Hierarchy, scales: Tensor, factors: Factors, t: Tensor | None = None
) -> Quadratic:
    """Return the surrogate posterior as a function of m (Km,), with every w_k integrated out.

    Its constant contains log p(s) and log p(t | s). s is (Ks,); t is (N, M), or None.
    """
    count = len(hierarchy.inside)
    batch = hierarchy.batch(factors.fields, 1 if t is None else len(t))
    z = hierarchy.whole(torch.zeros(count, dtype=scales.dtype), scales)
    own, rest = hierarchy.local(z, batch, t), rest_of(hierarchy, z, t)
    *factor, constant_of_rows = hierarchy.at_scale(factors, z)
    precision, shift = arranged(hierarchy, *factor)
    summed = len(own.mean) == len(own.precision) == 1 and rest.dim() == 1
    each = without_own(
        own.precision, own.log_det, precision, shift, diagonal=hierarchy.diagonal, summed=summed
    )
    clients = max(len(own.mean), len(rest) if rest.dim() == 2 else 1)
    parts = [v.expand(clients, v.shape[-1]) for v in (own.mean, rest)]
    whole = each.along(torch.cat(parts, 1), hierarchy.slopes_at(z, batch, t))  # m = 0 there
    zero = torch.zeros(hierarchy.reading.own_size, dtype=z.dtype)
    log_p = hierarchy.log_global(
        z, hierarchy.sites(z, zero, hierarchy.row), without=hierarchy.linear
    )
    log_p = log_p + hierarchy.log_mixing(z, batch, t).sum() + constant_of_rows.sum()
    if not count:
        return whole._replace(constant=whole.constant + log_p)
    prior = hierarchy.means(scales)
    pull = (prior.precision @ prior.mean[..., None])[0, :, 0]
    constant = 0.5 * (prior.log_det[0] - prior.mean[0] @ pull - count * LOG_2_PI)
    return Quadratic(
        prior.precision[0] + whole.precision, pull + whole.shift, log_p + constant + whole.constant
    )
