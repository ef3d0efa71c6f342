"""A fit as ArviZ's groups: arrays with names for their dimensions, which `hierfl.posterior.arviz_io` makes an object of.

Large networks are not written out: by default a network whose tensors have more than `EXPAND` numbers is summarised by layer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from torch import Tensor

from hierfl.data.clients import ClientData
from hierfl.posterior.arviz_io import arviz_of
from hierfl.posterior.draws import Draws, posterior_draws
from hierfl.posterior.layer_summaries import STATISTICS, Network, split, summaries
from hierfl.posterior.snapshot import Snapshot

EXPAND = 1000  # numbers of a client's network, or of the global one, that are still written out
ROW, CLIENT = "row", "client"


@dataclass(frozen=True, eq=False)
class Groups:
    """What is to become an ArviZ object, gathered bit by bit.

    Args:
        fit: whose.
        arrays: group -> variable -> array.
        dims: variable -> the names of its dimensions, those of chains and draws apart.
        coords: dimension -> labels, as `hierfl.posterior.arviz_io.arviz_of` takes them.
    """

    fit: Snapshot
    arrays: dict[str, dict[str, Any]] = field(default_factory=dict)
    dims: dict[str, list[str]] = field(default_factory=dict)
    coords: dict[str, Any] = field(default_factory=dict)

    def sites(self, group: str, draws: Draws) -> None:
        """Draws of sites: local ones by client, features by name where exactly one field has as many."""
        features = self.fit.federation.data.features
        self.coords[CLIENT] = list(self.fit.clients)
        for name, value in {**draws.shared, **draws.own}.items():
            lead = [CLIENT] if name in draws.own else []
            dims: list[str] = []
            for i, size in enumerate(value.shape[1 + len(lead) :]):
                label = _feature_dim(features, size)
                dims.append(
                    f"{name}_dim_{i}" if label is None or label in dims else label
                )  # no dimension twice
                self.coords.setdefault(dims[-1], list(features.get(dims[-1]) or range(size)))
            self.put(group, name, value, [*lead, *dims])

    def layers(
        self, group: str, found: Mapping[str, Tensor], networks: Mapping[str, Network]
    ) -> None:
        """Summaries of networks: (S, L, 4), or (S, N, L, 4) of clients' own, as one variable a statistic."""
        for name, value in found.items():
            net = networks[name]
            self.coords[f"{name}_layer"] = list(net.layers)
            for i, statistic in enumerate(STATISTICS):
                lead = [CLIENT] if net.is_local else []
                self.put(group, f"{name}_{statistic}", value[..., i], [*lead, f"{name}_layer"])

    def rows(self, group: str, values: Mapping[str, Tensor], data: ClientData) -> None:
        """What is one a row, (..., n, *event), or one a client, of the clients of `data`."""
        owners = [data.names[k] for k in data.row_client.tolist()]
        self.coords.update(
            {ROW: range(data.num_rows), "row_client": (ROW, owners), CLIENT: list(data.names)}
        )
        for site, value in values.items():
            of_rows = site in self.fit.program.sites_of_rows
            lead = 0 if group == "observed_data" else 1
            rest = value.shape[lead + 1 :]
            self.put(
                group,
                site,
                value,
                [ROW if of_rows else CLIENT, *(f"{site}_dim_{i}" for i in range(len(rest)))],
            )

    def arviz(self, attributes: Mapping[str, Any]) -> Any:
        """The ArviZ object."""
        return arviz_of(self.arrays, self.dims, self.coords, attributes)

    def put(self, group: str, name: str, value: Tensor, dims: list[str]) -> None:
        """One variable."""
        self.arrays.setdefault(group, {})[name] = value.detach().numpy()
        self.dims[name] = dims


def _feature_dim(features: Any, size: int) -> str | None:
    """The field whose named columns a dimension of this size is of, if there is exactly one."""
    of_size = [name for name, labels in features.items() if len(labels) == size]
    return of_size[0] if len(of_size) == 1 else None


def attributes(fit: Snapshot, seed: int) -> dict[str, Any]:
    """What was run: numbers and words, as netCDF can keep them."""
    history = fit.progress.history
    return {
        "inference_library": "hierfl",
        "inference_library_version": version("hierfl"),
        "method": fit.method.name,
        "seed": fit.federation.seed,
        "draws_seed": seed,
        "rounds": fit.progress.round,
        "clients": len(fit.clients),
        "rows": fit.federation.data.num_rows,
        "bytes_up": sum(int(r.get("bytes_up", 0)) for r in history),
        "bytes_down": sum(int(r.get("bytes_down", 0)) for r in history),
        **{f"{name}_version": version(name) for name in ("torch", "pyro-ppl", "numpy", "arviz")},
    }


def drawn_groups(
    fit: Snapshot, draws: int, *, seed: int, sites: Collection[str] | None, expand: int
) -> Groups:
    """Draws of the guide: what is small, or was asked for by name, written out; other networks by layer.

    Raises:
        KeyError: a site was asked for that there is not.
    """
    keep, large = split(posterior_draws(fit, draws=1, seed=seed), sites, expand)
    groups = Groups(fit)
    groups.sites("posterior", posterior_draws(fit, draws=draws, seed=seed, keep=keep))
    if large:
        groups.layers("posterior", summaries(fit, large, draws, seed), large)
    return groups


def given_groups(
    fit: Snapshot, group: str, draws: Draws, *, sites: Collection[str] | None, expand: int
) -> Groups:
    """The same of draws that were made already."""
    keep, large = split(draws, sites, expand)
    groups = Groups(fit)
    groups.sites(
        group,
        Draws(
            *({n: v for n, v in part.items() if n in keep} for part in (draws.shared, draws.own))
        ),
    )
    both = {**draws.shared, **draws.own}
    groups.layers(
        group, {name: net.summary(both, 1 + net.is_local) for name, net in large.items()}, large
    )
    return groups
