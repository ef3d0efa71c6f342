"""A node with far more rows than others is asked in the same round as they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from hierfl import methods
from hierfl.data.clients import ClientData
from hierfl.nodes import Answer
from hierfl.nodes.run import fit_nodes
from tests.nodes.one_process import machines
from tests.programs import regression


def test_a_silent_node_of_many_rows_ends_no_round(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    counts = {"a": 20, "b": 20, "c": 60_000}
    data = ClientData.from_clients(
        {
            name: {
                "x": torch.randn(n, 2, generator=g),
                "y": torch.randn(n, generator=g),
            }
            for name, n in counts.items()
        },
        client_fields={"height": torch.zeros(3)},
    )
    method = methods.fedsvi(regression, batch_size=4)
    around = machines(method, data, tmp_path)

    def ask(contents: Mapping[str, bytes]) -> Iterable[Answer]:
        return around.ask({name: one for name, one in contents.items() if name != "c"})

    found = fit_nodes(method, around.agreement, ask, rounds=1, fewest=2)
    assert found.history["clients"].tolist() == [2]
