"""Models of the same data beside each other: by client and by row, with weights to stack them by."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from hierfl.core.arguments import spelled
from hierfl.core.tables import Shown, printed
from hierfl.diagnostics.loo import By, Loo, compare, expect_named_fits, named_loo
from hierfl.posterior.snapshot import Snapshot, lacks_rows

NO_ROWS = "Rows are not compared: they are at the nodes, or were not saved."


@printed
@dataclass(frozen=True, eq=False)
class Compared:
    """Models compared by leave-one-out, the best first.

    Args:
        by_client: by model, `rank`, `elpd` (of all rows of a client jointly, given the other
            clients), `p`, `elpd_diff` to the best, `weight` (stacking), `se` and `dse`, of the
            difference, and `k_hat`, the largest of its clients: which model predicts a new client.
        by_row: the same by row, given all other rows: which model predicts a new row of a client
            that it knows. None: no rows are here.
        clients: by client, elpd of each model, and `k_hat`, the largest over models; from 0.7 on
            trust none of the row; a warning names the model.
        loo: model -> its leave-one-out by client as an ArviZ object: `arviz.compare(found.loo)`.
        loo_rows: the same by row.
    """

    by_client: pd.DataFrame
    by_row: pd.DataFrame | None
    clients: pd.DataFrame
    loo: Mapping[str, Any]
    loo_rows: Mapping[str, Any] | None

    def __tables__(self) -> Shown:
        tables = (
            () if self.by_row is None else (("By row", self.by_row.reset_index(names="model")),)
        )
        note = (
            "elpd in nats, higher is better; weight: of stacking. .clients has each client's elpd."
        )
        if self.by_row is None:
            note += f" {NO_ROWS}"
        title = f"{len(self.loo)} models of {len(self.clients)} clients, a client left out"
        return Shown(title, self.by_client.reset_index(names="model"), note, tables)


@spelled
def compare_models(fits: Mapping[str, Snapshot], *, draws: int = 2000, seed: int = 0) -> Compared:
    """Compare fits of the same data by client and by row.

    Over nodes, by client alone, from what the server of two_stage has kept: no node is asked.

    Args:
        fits: name -> fit, two or more: `{"slopes": fit1, "intercepts": fit2}`.
        draws: S, of each posterior, as in `hierfl.diagnostics.loo`.
        seed: of the draws.

    Raises:
        TypeError: `fits` is not a mapping.
        ValueError: there are fewer than two, they are of different data, or as
            `hierfl.diagnostics.loo`.

    Source: Vehtari, Gelman and Gabry 2017, arXiv:1507.04544; stacking: Yao et al. 2018,
    arXiv:1704.02030.
    """
    expect_named_fits(fits, "compare_models")

    def estimates(by: By) -> dict[str, Loo]:
        return {n: named_loo(n, fitted, by, draws=draws, seed=seed) for n, fitted in fits.items()}

    by_client = estimates("client")
    by_row = None if any(map(lacks_rows, fits.values())) else estimates("row")
    clients = pd.DataFrame({name: of.table["elpd"] for name, of in by_client.items()})
    k_hats = pd.concat([of.table["k_hat"] for of in by_client.values()], axis=1)
    return Compared(
        compare(by_client, "client"),
        None if by_row is None else compare(by_row, "row"),
        clients.assign(k_hat=k_hats.max(axis=1)),
        {name: of.arviz for name, of in by_client.items()},
        None if by_row is None else {name: of.arviz for name, of in by_row.items()},
    )
