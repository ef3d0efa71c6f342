"""The FedMAP and FedVI studies: their clients, and that a small run gives a table and figures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from hierfl.methods import fedavg
from hierfl.models import network
from hierfl.models.likelihood import bernoulli
from hierfl.optimisers import SGD
from hierfl.studies import fedmap_synthetic, toy_fedmap, writers
from hierfl.studies.synthetic_clients import Skew, _rows, synthetic_clients
from tests.programs import fit

SMALL = fedmap_synthetic.Settings(rows=500, rounds=4, epochs=4)
OPTIONS = {"lr": 0.03, "prox": 0.1, "variance": 60.0, "first": 60.0, "rest": 5.0}


# ------------------------------------------------------------------------------------------------ synthetic clients
@pytest.mark.parametrize("skew", fedmap_synthetic.SKEWS)
def test_synthetic_clients_have_the_published_sizes_and_skews(skew: Skew) -> None:
    train, test = synthetic_clients(skew, seed=1, rows=400)
    counts = train.counts + test.counts
    assert counts.tolist() == [400] * 5 + [100 if skew == "quantity" else 400] * 5
    assert torch.allclose(train.counts / counts, torch.full((10,), 0.7), atol=0.01)
    for k in range(10):
        own = [rows.select([k]) for rows in (train, test)]
        ones = torch.cat([part.fields["y"] for part in own]).mean()
        assert float(ones) == pytest.approx(0.15 if skew == "label" and k >= 5 else 0.5)
        x = own[0].fields["x"]
        assert torch.allclose(x.mean(0), torch.zeros(30), atol=1e-10) and torch.allclose(
            x.std(0, unbiased=False), torch.ones(30)
        )
    again = synthetic_clients(skew, seed=1, rows=400)[0].fields["x"]
    assert torch.equal(again, train.fields["x"])
    assert not torch.equal(synthetic_clients(skew, seed=2, rows=400)[0].fields["x"], again)


def test_classes_are_a_blob_and_a_shell_in_four_dimensions() -> None:
    x = _rows(np.repeat([0.0, 1.0], 20_000), np.random.Generator(np.random.Philox(0)))
    blob, shell = np.linalg.norm(x[:20_000, :4], axis=1), np.linalg.norm(x[20_000:, :4], axis=1)
    assert (blob**2).mean() == pytest.approx(8.0, rel=0.03)
    assert (shell.mean(), shell.var()) == (
        pytest.approx(8.0, rel=0.01),
        pytest.approx(2.0, rel=0.05),
    )
    assert x[:, 4:].var() == pytest.approx(9.0, rel=0.02)
    with pytest.raises(ValueError, match="skew is 'rows'"):
        synthetic_clients("rows", seed=0)  # type: ignore[arg-type]


def test_balanced_accuracy_of_the_majority_class_is_a_half() -> None:
    train, test = synthetic_clients("label", seed=0, rows=100)
    module = fedmap_synthetic.net(0)
    with torch.no_grad():
        module.get_parameter("4.weight").zero_()
        module.get_parameter("4.bias").fill_(-1.0)
    fitted = fit(
        fedavg(network(module, likelihood=bernoulli()), optimiser=SGD(0.0), steps=1),
        train,
        rounds=1,
    )
    assert set(fedmap_synthetic.balanced_accuracy(fitted, test).values()) == {50.0}
    assert float(fitted.predict(test).scores()["accuracy"].iloc[-1]) > 0.7


@pytest.mark.parametrize("name", fedmap_synthetic.METHODS)
def test_methods_with_weights_of_their_own_classify_every_client(name: str) -> None:
    """A client's classes differ by its own linear map, so that no common first layer serves them all."""
    torch.set_default_dtype(torch.float32)
    found = fedmap_synthetic.one(name, "feature", 0, SMALL, OPTIONS)["balanced_accuracy"]
    assert list(found) == [f"client {k + 1}" for k in range(10)]
    own = name in ("Individual", "FedMAP", "FedMAP, by layer")
    assert (float(np.mean(list(found.values()))) > 65.0) == own


def test_table_averages_over_clients_and_then_over_seeds() -> None:
    rows = [
        {
            "skew": skew,
            "method": m,
            "seed": s,
            "client": c,
            "balanced_accuracy": 50.0 + i + 2.0 * s + c,
        }
        for skew in fedmap_synthetic.SKEWS
        for i, m in enumerate(fedmap_synthetic.METHODS)
        for s in range(2)
        for c in range(2)
    ]
    table = fedmap_synthetic.table(pd.DataFrame(rows))
    assert table.loc["Individual", "label"] == "51.5 ± 1.4 (76.6)"
    assert table.loc["FedMAP, by layer", "quantity"] == "56.5 ± 1.4"
    lines = fedmap_synthetic.reading(pd.DataFrame(rows))
    assert lines[0] == (
        "feature skew: FedMAP is +1.00 points from FedBN, the best of the other methods, "
        "and above it in 2 of 2 seeds."
    )


# ------------------------------------------------------------------------------------------------ lines
def test_toy_learns_that_the_slopes_agree(tmp_path: Path) -> None:
    found = toy_fedmap.run(tmp_path, quick=True)
    assert all(path.stat().st_size > 0 for path in found.files)
    few = found.table[["2 (1)", "3 (2)", "4 (3)"]].mean(axis=1)
    others = ("Alone", toy_fedmap.LEAST_SQUARES, toy_fedmap.DITTO)
    assert few["FedMAP, exact"] < min(few[name] for name in others)
    numbers = toy_fedmap.one(0, {"pull": 0.1, "rate": 1.0})
    mu_a, _, s_a, s_b = numbers["exact"]
    assert -1.2 < mu_a < -0.6 and (1 + s_b) > 5 * (1 + s_a) and numbers["pooled"][0] > 1.0


# ------------------------------------------------------------------------------------------------ writers
@pytest.mark.skipif("HIERFL_DATA" not in os.environ, reason="FEMNIST is read from HIERFL_DATA")
@pytest.mark.parametrize("name", writers.METHODS)
def test_every_method_of_the_writers_study_runs(name: str) -> None:
    torch.set_default_dtype(torch.float32)
    found: Any = writers.one(
        name, 0, writers.Settings(rounds=1, cohort=2, writers=4, new=1), {"lr": 0.1}
    )
    assert {"participating", "new", "other mix"} <= set(found)
