"""What nodes answer of their clients, and the answers of a formula that need clients' own draws."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import pandas as pd
import torch

from hierfl.core.tables import Shown, shown_as
from hierfl.effects.drawn import CoefficientDraws

Found = TypeVar("Found")


def _shown(found: FromNodes[Any]) -> Shown:
    """Every client, and whether its node gave an answer."""
    rows = [(name, "given") for name in found.given] + list(found.withheld.items())
    return Shown(
        f"Answers of {len(found.given)} of {len(rows)} nodes",
        pd.DataFrame(sorted(rows), columns=["client", "answer"]),
        "What stays at a node is written into its folder.",
    )


@shown_as(_shown)
@dataclass(frozen=True, eq=False)
class FromNodes(Generic[Found]):
    """What nodes answered: client -> what was `given`, or why it was `withheld`."""

    given: Mapping[str, Found]
    withheld: Mapping[str, str]

    @property
    def table(self) -> pd.DataFrame:
        """One table of all clients, with the client in front.

        Raises:
            ValueError: no node gave a table.
        """
        frames = {k: v for k, v in self.given.items() if isinstance(v, pd.DataFrame)}
        if not frames:
            why = next(iter(self.withheld.values()), "draws are tensors: see .given")
            raise ValueError(f"no node gave a table ({why})")
        return pd.concat(frames, names=["client"]).reset_index(level=0)


# ------------------------------------------------------------ clients' own draws
def with_own(
    nodes: Any, found: CoefficientDraws, what: str, names: Collection[str] | None
) -> CoefficientDraws:
    """Return draws of a formula's coefficients with those of clients whose nodes send them.

    Of `names` a client whose node does not is an error; of None it is left out with a warning.
    """
    if any(own.at("above") for own in found.formula.layouts):
        raise ValueError(
            f"fit.{what} of a client needs the groups above it, which are at its node: ask for "
            "client=None or 'new'"
        )
    for name in names or ():
        nodes.federation.data.index([str(name)])  # refuses unknown clients
    answers = nodes.local_draws(found.count, seed=found.seed, clients=names)
    given, why = dict[str, Any](), dict(answers.withheld)
    for name, draws in answers.given.items():
        if (wrong := _unlike(found, draws)) is None:
            given[name] = draws
        else:
            why[name] = wrong
    if why and names is not None:
        client, reason = next(iter(why.items()))
        raise ValueError(
            f"fit.{what} needs draws of client '{client}', which its node keeps: {reason}"
        )
    if why:
        some = "; ".join(f"'{client}': {reason}" for client, reason in list(why.items())[:5])
        warnings.warn(
            f"{len(why)} clients are left out, whose nodes send no draws ({some})", stacklevel=6
        )
    clients = tuple(given)
    groups = [term for of in found.formula.layouts for term in of.groups]
    sites = {term.site for term in groups if term.place in ("clients", "within")} if given else ()
    own = {s: torch.stack([given[name][s] for name in clients], 1).double() for s in sorted(sites)}
    return replace(found, clients=clients, own=own)


def _unlike(found: CoefficientDraws, draws: Mapping[str, Any]) -> str | None:
    """Return why what a node sent is no draws of its client's coefficients; None: they are."""
    for of in (found, *found.with_terms.values()):
        for term in of.layout.groups:
            if term.place not in ("clients", "within"):
                continue
            size = len(term.columns) * of.outputs * (term.size if term.place == "within" else 1)
            value = draws.get(term.site)
            if (
                value is None
                or value.shape[:1] != (found.count,)
                or value.numel() != found.count * size
            ):
                return f"it sends no {found.count} draws of '{term.site}'"
            if not value.is_floating_point() or not bool(value.isfinite().all()):
                return f"its draws of '{term.site}' are not finite, or of groups with too few rows"
    return None


# ------------------------------------------------------------ what is at the nodes alone
AT_NODES = {
    "predictions": "averages over rows; take fit.effects, or a typical row, fit.comparisons(...)",
    "r2": "sums over rows; take fit.icc(), or score predictions, fit.scores()",
    "posterior_predictive": "labels of rows; ask the nodes, fit.predict()",
    "replicate": "labels of rows; ask the nodes, fit.predict()",
    "update": "rows; fit them again, hierfl.nodes.fit(fit.method.model.update(text), nodes), at nodes of "
    "that formula",
    "infer_discrete": "labels of rows; fit the node's own rows there, hierfl.fit(model, rows), and ask that fit",
    "infer_rows": "values of rows; fit the node's own rows there, hierfl.fit(model, rows), and ask that fit",
    "personalize": "rows of a new client; take its node in, fit.updated(nodes)",
}


def refused(name: str) -> Any:
    """Return a method of `hierfl.Fit` that is refused over nodes, with what to call in its place."""

    def asked(fit: Any, *args: Any, **how: Any) -> Any:
        what, instead = AT_NODES[name].split("; ")
        raise ValueError(f"fit.{name} is of {what}, which are at the nodes: {instead}")

    asked.__name__ = name
    asked.__doc__ = f"Refuse `hierfl.Fit.{name}`, and say what to call over nodes."
    return asked
