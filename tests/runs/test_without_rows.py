"""A fit saved without its rows: nothing of them is on disk, and what does not need them is answered as before."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import hierfl
from hierfl import ClientBatch, ClientData, Fit
from hierfl.core.trees import named_leaves
from hierfl.data.absent import absent
from hierfl.methods import fedsvi
from hierfl.runs.records import about
from tests.programs import FAMILIES, federation, fit, regression
from tests.runs.fits import two_rounds

FAMILY = {"structured": FAMILIES["structured"], "conditional": FAMILIES["conditional"]}


def new_clients() -> ClientData:
    data = federation((4, 2), seed=8)
    return replace(data, names=("new", "newer"))


def of_clients(fitted: Fit) -> list[Tensor]:
    rows = federation(seed=9).select(["north", "south"])
    return [fitted.predict(rows, draws=5).mean, *fitted.draws(5).own.values()]


def of_others(fitted: Fit) -> list[Tensor]:
    new = fitted.personalize(new_clients(), rounds=2)
    before = hierfl.predict_from_prior(fitted, new_clients(), draws=5).mean
    return [
        new.predict(new_clients(), draws=5).mean,
        before,
        *named_leaves(fitted.message).values(),
    ]


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@pytest.mark.slow("conditional")
@pytest.mark.parametrize("name", FAMILY)
def test_what_needs_no_rows_is_the_same_and_the_rest_is_refused(name: str, tmp_path: Path) -> None:
    """The conditional guide reads rows; test_every_answer_after_load.py goes over all methods."""
    fitted = fit(fedsvi(regression, FAMILY[name]), federation(), rounds=2)
    fitted.save(tmp_path)
    back = hierfl.load(tmp_path)
    assert equal(of_others(fitted), of_others(back))
    both: list[Any] = [f.posterior(5, var_names=["loc"]) for f in (fitted, back)]
    assert both[0].posterior["loc"].equals(both[1].posterior["loc"])
    needing: list[tuple[Any, str]] = [
        (lambda: back.posterior_predictive(5), "pass them, hierfl"),
        (lambda: hierfl.diagnostics.loo(back), "pass them, hierfl"),
        # the prior of `slope` is shifted by `height`, which was not saved either
        (lambda: back.prior(5), "'slope' depends on them.*hierfl"),
    ]
    if name == "conditional":
        needing += [(lambda: of_clients(back), "'(lift|slope)' depends on them.*hierfl")]
    else:
        assert equal(of_clients(fitted), of_clients(back))
    for needs, words in needing:
        with pytest.raises(hierfl.RowsNotSaved, match=words + r".load\(folder, data="):
            needs()
    whole = hierfl.load(tmp_path, data=federation())
    assert equal(of_clients(fitted), of_clients(whole))


def test_columns_with_one_value_at_each_client_need_no_rows(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    frame = pd.DataFrame({"h": np.resize(list("abcdef"), 240), "x": rng.normal(size=240)})
    frame["up"] = frame.h.map(dict(zip("abcdef", (2.0, 3, 1, 5, 4, 6), strict=True)))
    frame["y"] = 0.3 * frame.up + frame.x + rng.normal(size=240)
    model = hierfl.formula("y ~ up + x + (1 | h)", clients="h")
    fitted = hierfl.fit(model, frame, seed=0, progress=False)
    fitted.save(tmp_path)
    loaded = hierfl.load(tmp_path)
    both: list[Any] = [
        one.posterior(draws=50, var_names=["up", "Intercept"]) for one in (fitted, loaded)
    ]
    ours, theirs = (found.posterior for found in both)
    assert ours.equals(theirs)
    np.testing.assert_array_equal(fitted.predict(frame).mean, loaded.predict(frame).mean)


def test_another_prior_is_refused_by_site_where_the_start_depends_on_a_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No fingerprint of code sees a value from elsewhere, and the start does not tell without rows."""

    def model(batch: ClientBatch) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, float(os.environ["SCALE_OF_MU"])))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        with batch.clients():
            own = pyro.sample("own", dist.Normal(mu + 0.3 * batch.up, tau))
            with batch.data():
                pyro.sample("y", dist.Normal(own, 1.0), obs=batch.y)

    data = ClientData.from_arrays(np.repeat(list("abcd"), 8), y=torch.randn(32))
    data = replace(data, client_fields={"up": torch.arange(4.0)})
    monkeypatch.setenv("SCALE_OF_MU", "1.0")
    fitted = hierfl.fit(model, data, seed=0, progress=False)
    fitted.save(tmp_path)
    loaded = hierfl.load(tmp_path, model=model)
    both: list[Any] = [f.posterior(5, var_names=["mu"]) for f in (fitted, loaded)]
    assert both[0].posterior.equals(both[1].posterior)
    monkeypatch.setenv("SCALE_OF_MU", "4.0")
    with pytest.raises(hierfl.CheckpointError, match="another program: it differs in site 'mu'"):
        hierfl.load(tmp_path, model=model)


def test_rows_of_other_clients_or_other_values_are_refused(tmp_path: Path) -> None:
    two_rounds().save(tmp_path)
    for rows, what in (
        (federation(seed=1), "rows"),
        (federation().select(["south", "north", "west", "east"]), "clients"),
        (federation().without("visits"), "fields"),
    ):
        with pytest.raises(hierfl.CheckpointError, match=f"it differs in {what}"):
            hierfl.load(tmp_path, data=rows)


def test_nothing_of_the_rows_is_on_disk(tmp_path: Path) -> None:
    """No value of a row is in any file, in binary or in decimals; with `with_data=True` they all are."""
    data = federation((40, 30, 20))
    fitted = fit(fedsvi(regression), data, rounds=1, checkpoint=tmp_path / "run")
    fitted.save(tmp_path / "bare")
    fitted.save(tmp_path / "rows", with_data=True)
    values = torch.cat([data.fields["x"].flatten(), data.fields["y"], data.client_fields["height"]])
    for name, there in (("run", False), ("bare", False), ("rows", True)):
        files = [p.read_bytes() for p in (tmp_path / name).rglob("*") if p.is_file()]
        for value in values:
            forms = (value.numpy().tobytes(), str(value.item())[:12].encode())
            assert any(form in content for content in files for form in forms) == there


def test_files_are_their_owners_alone(tmp_path: Path) -> None:
    fitted = fit(
        fedsvi(regression), federation(), rounds=2, checkpoint=tmp_path / "run", checkpoint_every=1
    )
    fitted.save(tmp_path / "saved", with_data=True)
    found = [
        p for part in ("run", "saved") for p in [tmp_path / part, *(tmp_path / part).rglob("*")]
    ]
    assert {p.name for p in found} > {"fit.json", "local-rows.safetensors", "state.json"}
    for path in found:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_hashes_of_names_and_rows_are_salted(tmp_path: Path) -> None:
    """No unsalted hash is on disk, two saves share none, and what may be shared holds neither hash nor name."""
    fitted = two_rounds()
    plain = about(fitted.method, fitted.federation, fitted.rounds)
    private: list[Any] = []
    for name in ("a", "b"):
        fitted.save(tmp_path / name, with_data=True)
        for path in (p for p in (tmp_path / name).rglob("*") if p.is_file()):
            content = path.read_bytes()
            assert (
                plain["clients"].encode() not in content and plain["rows"].encode() not in content
            )
            if path.name in ("global.safetensors", "state.json"):
                assert not any(client.encode() in content for client in fitted.clients)
        there = json.loads((tmp_path / name / "round-00000002" / "state.json").read_text())["about"]
        private += [there["clients"], there["rows"], there["salt"]]
    assert len(set(private)) == 6


def test_a_fit_of_another_default_dtype_says_so(tmp_path: Path) -> None:
    two_rounds().save(tmp_path)
    torch.set_default_dtype(torch.float32)
    with pytest.raises(hierfl.CheckpointError, match=r"set_default_dtype\(torch.float64\) first"):
        hierfl.load(tmp_path)


def test_a_fit_without_rows_is_not_saved_again(tmp_path: Path) -> None:
    two_rounds().save(tmp_path / "a")
    with pytest.raises(hierfl.RowsNotSaved, match="copy its folder"):
        hierfl.load(tmp_path / "a").save(tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_missing_value_is_never_computed_with() -> None:
    """Whatever is asked of an absent field but its shape and dtype is refused."""
    values = absent((7, 2), torch.float64, (0.0, 1.0))
    assert values.shape == (7, 2) and len(values[torch.tensor([0, 3])]) == 2
    asked: list[Callable[[], Any]] = [
        lambda: values + 1,
        lambda: values.sum(),
        lambda: values.numpy(),
        lambda: values.tolist(),
        lambda: values[values.new_ones(7).bool()],
        lambda: values[torch.ones(7).bool()],
        lambda: values.index_select(0, torch.tensor([0])),
        lambda: torch.cat([values, torch.ones(1, 2)]),
        lambda: torch.ones(3, 7) @ values,
        lambda: values.isfinite(),
        lambda: values.to("cpu"),
        lambda: bool((values == 0).all()),
    ]
    for one in asked:
        with pytest.raises(hierfl.RowsNotSaved):
            one()
