"""Runs saved by hierfl 0.1.0 load, predict as a fit made now does, and can be resumed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro.distributions as dist
import pytest
import torch

import hierfl
from hierfl import guides, methods, models
from hierfl.data.clients import ClientData
from hierfl.method import Method
from hierfl.program.public_names import CannotRemake
from hierfl.program.recipes import JSON, describe
from hierfl.runs import checkpoint
from hierfl.runs.result import Fit

OLD = Path(__file__).parent / "written_by_0_1_0"


def rows() -> ClientData:
    g = torch.Generator().manual_seed(0)
    counts = torch.tensor([5, 3, 7])
    n = int(counts.sum())
    x = torch.randn(n, 2, generator=g)
    return ClientData.from_arrays(
        torch.repeat_interleave(torch.arange(3), counts),
        names=("north", "south", "east"),
        x=x,
        y=x.sum(-1) + torch.randn(n, generator=g),
        ill=(torch.rand(n, generator=g) < 0.5).double(),
        visits=torch.poisson(torch.ones(n, dtype=torch.float64), generator=g),
    )


def averaging() -> Method:
    """Return the method that 0.1.0 wrote as below.

    `fedavg(model, steps=2, batch_size=2, beta=2.0, fine_tune=True)`
    """
    torch.manual_seed(0)
    model = models.network(torch.nn.Linear(2, 1), likelihood=models.likelihood.normal(1.0))
    tuned = methods.fine_tuned(
        methods.fedavg(model, steps=2, batch_size=2), steps=2, unit="step", batch_size=2
    )
    return methods.over_relaxed(tuned, beta=2.0)


# The calls that made the runs, and the sum of `fit.predict(rows, draws=4).mean` that 0.1.0 printed.
RUNS: dict[str, tuple[Callable[[], Method], float]] = {
    "fedsvi": (
        lambda: methods.fedsvi(
            models.linear(prior_loc=dist.Normal(0.0, 1.0), prior_scale=dist.HalfNormal(1.0)),
            guide=guides.structured(shared=guides.low_rank_normal),
            optimizer=hierfl.optimizers.Adam(0.02),
        ),
        -0.8461015964209901,
    ),
    "mean_field": (
        lambda: methods.fedsvi(
            models.softmax(2, y="ill"), guide=guides.mean_field(init_scale=0.05)
        ),
        15.0,
    ),
    "fedlaplace": (
        lambda: methods.fedlaplace(
            models.logistic(y="ill", intercept=None), points=8, weighed=64, enough=8, corrections=1
        ),
        7.573042932788772,
    ),
    "pvi": (
        lambda: methods.pvi(
            models.poisson(y="visits", intercept="global", slopes="global"), points=2, steps=2
        ),
        19.174202923855155,
    ),
    "bfi": (
        lambda: methods.bfi(models.logistic(y="ill", prior_scale=0.5), steps=2),
        8.724300536731395,
    ),
}


def fitted_now(method: Method) -> Fit:
    return hierfl.fit(method, rows(), rounds=2, seed=3, compile=False)


def names_in(description: JSON) -> set[str]:
    """Return every name that a description holds."""
    if isinstance(description, list):
        return set().union(*map(names_in, description))
    if not isinstance(description, dict):
        return set()
    own = {description[key] for key in ("made_by", "family", "named") if key in description}
    return own.union(*map(names_in, description.values()))


# ------------------------------------------------------------ load
@pytest.mark.parametrize("name", RUNS)
def test_an_old_run_loads_and_predicts_the_same(name: str) -> None:
    method, printed = RUNS[name]
    old, now = hierfl.load(OLD / name), fitted_now(method())
    found, wanted = (fit.predict(rows(), draws=4).mean for fit in (old, now))
    assert torch.allclose(found, wanted, rtol=0.0, atol=1e-12)
    assert float(found.sum()) == pytest.approx(printed, abs=1e-12)
    assert old.history["round"].tolist() == now.history["round"].tolist()


@pytest.mark.parametrize("name", RUNS)
def test_its_method_is_described_by_public_names(name: str) -> None:
    found = describe(hierfl.load(OLD / name).method)
    assert found == describe(RUNS[name][0]())
    assert names_in(found) and not [name for name in names_in(found) if ":" in name]


def test_the_names_of_one_run() -> None:
    assert names_in(describe(hierfl.load(OLD / "fedsvi").method)) == {
        "hierfl.guides.low_rank_normal",
        "hierfl.guides.structured",
        "hierfl.methods.fedsvi",
        "hierfl.models.linear",
        "hierfl.optimizers.Adam",
        "pyro.distributions.HalfNormal",
        "pyro.distributions.Normal",
    }


def test_a_run_of_a_module_needs_its_method_passed(tmp_path: Path) -> None:
    with pytest.raises(
        CannotRemake, match=r"'torch.nn.modules.linear.Linear' is not stored in a file; hand the"
    ):
        hierfl.load(OLD / "fedavg")
    with pytest.warns(UserWarning, match="model module: the record is of an earlier release"):
        old = hierfl.load(OLD / "fedavg", method=averaging())
    now = fitted_now(averaging())
    found, wanted = (fit.predict(rows(), draws=4).mean for fit in (old, now))
    assert torch.allclose(found, wanted, rtol=0.0, atol=1e-12)


# ------------------------------------------------------------ resume
@pytest.mark.parametrize("name", RUNS)
def test_an_old_run_can_be_resumed(name: str, tmp_path: Path) -> None:
    """The record holds old names and the method passed in has new ones, but both describe the same method."""
    shutil.copytree(OLD / name, tmp_path / "run")
    method = RUNS[name][0]()
    options: dict[str, Any] = {"rounds": 2, "seed": 3, "compile": False}
    options["checkpoint"] = tmp_path / "run"
    again = hierfl.fit(method, rows(), resume=True, **options)
    assert again.progress.round == hierfl.load(OLD / name).progress.round
    other = methods.fedsvi(models.linear(), guide=guides.delta)
    with pytest.raises(hierfl.CheckpointError, match=r"(differs in method|lacks|not torch)"):
        hierfl.fit(other, rows(), resume=True, **options)


def test_checkpoints_of_one_run_are_kept_under_either_name(tmp_path: Path) -> None:
    """`save` takes a run under old names for the same one, and refuses the folder of another."""
    early, fitted = Path("round-00000001"), fitted_now(RUNS["fedsvi"][0]())
    shutil.copytree(OLD / "fedsvi" / "round-00000002", tmp_path / "same" / early)
    fitted.save(tmp_path / "same")
    assert len(checkpoint.checkpoints(tmp_path / "same")) == 2
    shutil.copytree(OLD / "mean_field" / "round-00000002", tmp_path / "other" / early)
    with pytest.raises(hierfl.CheckpointError, match=r"holds another run .* differs in method"):
        fitted.save(tmp_path / "other")
    assert (tmp_path / "other" / early / "state.json").exists()
