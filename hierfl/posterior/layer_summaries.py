"""Summaries by layer of networks that are too large to be written out number by number."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hierfl.core.arguments import NoSuchName
from hierfl.core.trees import Tree
from hierfl.data.batch import ClientBatch
from hierfl.posterior.client_loop import each_draw, what_is_read
from hierfl.posterior.draws import Draws, joined_draws, mapped_or_in_turn
from hierfl.posterior.snapshot import Snapshot, all_sites
from hierfl.program.program import Params
from hierfl.program.sites import Values

STATISTICS = ("mean", "sd", "rms", "largest")


@dataclass(frozen=True, eq=False)
class Network:
    """A network's tensors, sites that share a first name; `parts`: layer (the middle name) -> sites."""

    parts: Mapping[str, Sequence[str]]
    is_local: bool

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers' names, L of them."""
        return tuple(self.parts)

    def summary(self, values: Values, lead: int) -> Tensor:
        """Return mean, sd, root mean square and largest size of each layer, (*lead, L, 4)."""
        layers = []
        for sites in self.parts.values():
            each = (values[site] for site in sites)
            flat = torch.cat(
                [v.flatten(lead) if v.dim() > lead else v[..., None] for v in each], -1
            )
            statistics = (
                flat.mean(-1),
                flat.std(-1, correction=0),
                flat.square().mean(-1).sqrt(),
                flat.abs().amax(-1),
            )
            layers.append(torch.stack(statistics, -1))
        return torch.stack(layers, -2)


def network_of(sites: Sequence[str], *, is_local: bool) -> Network:
    """Group sites into a network, in their order."""
    layers: dict[str, list[str]] = {}
    for site in sites:
        _, *rest = site.split(".")
        layers.setdefault(".".join(rest[:-1]) or site, []).append(site)
    return Network(layers, is_local)


def split(
    draws: Draws, var_names: Collection[str] | None, expand: int
) -> tuple[set[str], dict[str, Network]]:
    """Return the sites to write out, and networks of over `expand` scalars, to summarize by layer."""
    sizes = {name: v[0].numel() for name, v in draws.shared.items()} | {
        name: v[0, 0].numel() for name, v in draws.own.items()
    }
    if var_names is not None:
        return _named(var_names, sizes), {}
    kinds: dict[tuple[str, bool], list[str]] = {}
    for name in sizes:
        kinds.setdefault((name.split(".")[0], name in draws.own), []).append(name)
    large = {
        kind: found for kind, found in kinds.items() if sum(sizes[site] for site in found) > expand
    }
    at_two_levels = {name for name, is_local in large if (name, not is_local) in large}
    return sizes.keys() - {site for found in large.values() for site in found}, {
        f"{name}_shared" if name in at_two_levels and not is_local else name: network_of(
            found, is_local=is_local
        )
        for (name, is_local), found in large.items()
    }


def by_layer(
    draws: Draws, expand: int, var_names: Collection[str] | None = None
) -> tuple[dict[str, Network], Draws]:
    """Return large networks, and draws with their summaries, (S, L, 4) or (S, N, L, 4), in place of sites."""
    keep, large = split(draws, var_names, expand)
    small = draws.only(keep)
    for name, net in large.items():
        level = small.own if net.is_local else small.shared
        level[name] = net.summary(draws.sites, 1 + net.is_local)
    return large, small


def _named(var_names: Collection[str], known: Collection[str]) -> set[str]:
    if isinstance(var_names, str):
        raise NoSuchName(
            f"var_names is the string '{var_names}': it must be a list, ['{var_names}']"
        )
    foreign = [site for site in var_names if site not in known]
    if foreign:
        raise NoSuchName(f"there is no site '{foreign[0]}': the sites are {', '.join(known)}")
    return set(var_names)


def drawn_by_layer(
    fit: Snapshot, keep: Collection[str], large: Mapping[str, Network], **how: Any
) -> Iterator[Draws]:
    """Yield the draws of chunks of clients, of networks summaries alone: their weights are never gathered."""
    program = fit.program
    names = [name for name in all_sites(program) if name in keep]

    def one(params: Params, own: ClientBatch, batch: ClientBatch) -> Tree:
        values = program.draw_all(params, own, batch)
        layers = {name: net.summary(values, 0) for name, net in large.items()}
        return {"sites": {name: values[name] for name in names}, "layers": layers}

    how["reads"] = what_is_read(program)
    for chunk in mapped_or_in_turn(fit, lambda s: each_draw(s, one, **how)):
        joined = joined_draws(program, [chunk.found["sites"]])
        for name, value in chunk.found["layers"].items():  # (C, S, L, 4)
            if large[name].is_local:
                joined.own[name] = value.movedim(0, 1)
            else:
                joined.shared[name] = value[0]
        yield joined


def of_all_clients(chunks: Sequence[Draws]) -> Draws:
    """Join the draws of chunks of clients."""
    own = {name: torch.cat([chunk.own[name] for chunk in chunks], 1) for name in chunks[0].own}
    return Draws(chunks[0].shared, own)
