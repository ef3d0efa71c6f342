"""A checkpoint of another model is refused by name of what differs, when it is resumed and when it is loaded."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch

import hierfl
from hierfl import guides, models
from hierfl.methods import fedavg, fedsvi, pfedme
from hierfl.optimizers import SGD
from hierfl.runs.records import digest
from tests.methods.cases import units
from tests.programs import assert_close, federation, fit, regression


def scaled(scale: Any, *, name: str | None = None) -> Any:
    def model(batch: hierfl.ClientBatch) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with batch.clients():
            w = pyro.sample("w", dist.Normal(mu, 1.0))
            with batch.data():
                pyro.sample("y", dist.Normal(w, scale), obs=batch.y)

    return hierfl.model(model, name=name) if name else model


def net(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))


def changed(method: hierfl.Method, by: float) -> hierfl.Method:
    """Return a method of the user's own: another's, with another client."""
    inner = method.client

    def client(program: hierfl.Program) -> hierfl.Client:
        assert by
        return inner(program)

    return hierfl.Method("own", method.model, method.guide, client, method.server)


# The run's method, another one, and what is said to differ.
OTHERS: dict[str, tuple[Callable[[], hierfl.Method], Callable[[], hierfl.Method], str]] = {
    "a closure's number": (
        lambda: fedsvi(scaled(1.0)), lambda: fedsvi(scaled(100.0)), "model: value of closure's 'scale'"
    ),
    "a likelihood": (
        lambda: fedsvi(models.bayesian_network(net(), likelihood=lambda o: dist.Normal(o[..., 0], 1.0))),
        lambda: fedsvi(models.bayesian_network(net(), likelihood=lambda o: dist.Normal(o[..., 0], 2.0))),
        "model likelihood: code"
    ),
    "a client of one's own": (
        lambda: changed(pfedme(units(), steps=2), 1.0), lambda: changed(pfedme(units(), steps=2), 2.0),
        "client: value of closure's 'by'"
    ),
    "a setting": (
        lambda: fedsvi(regression, optimizer=SGD(0.1)), lambda: fedsvi(regression, optimizer=SGD(0.2)),
        "optimizer lr: 0.1 there, 0.2 here"
    ),
    "a guide": (
        lambda: fedsvi(regression, guides.mean_field), lambda: fedsvi(regression, guides.mean_field(init_scale=0.2)),
        "guide init_scale: null there, 0.2 here"
    ),
}  # fmt: skip


@pytest.mark.slow("a client of one's own")
@pytest.mark.parametrize("what", OTHERS)
def test_another_model_is_refused_by_name(what: str, tmp_path: Path) -> None:
    one, two, message = OTHERS[what]
    data = federation((3, 2))
    first = fit(one(), data, rounds=1, checkpoint=tmp_path)
    reads: list[Callable[[], hierfl.Fit]] = [
        lambda: fit(two(), data, rounds=1, checkpoint=tmp_path, resume=True),
        lambda: hierfl.load(tmp_path, method=two(), data=data),
    ]
    for read in reads:
        with pytest.raises(
            hierfl.CheckpointError, match="another run: it differs in method"
        ) as told:
            read()
        assert message in str(told.value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = hierfl.load(tmp_path, method=one(), data=data)
    assert_close(first.progress.server, again.progress.server, 0.0)


def test_where_learned_weights_start_may_differ(tmp_path: Path) -> None:
    """The checkpoint replaces them, so a script need not seed its network to resume."""
    data = federation((3, 2))
    flat = models.network(net(seed=0), likelihood=models.likelihood.normal(1.0))
    other = models.network(net(seed=1), likelihood=models.likelihood.normal(1.0))
    ours, others = (fedavg(model, steps=2) for model in (flat, other))
    whole = fit(ours, data, rounds=4, checkpoint=tmp_path / "a", checkpoint_every=2)
    hierfl.load(tmp_path / "a", method=others, data=data)
    newest = tmp_path / "a" / "round-00000004"
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    again = fit(others, data, rounds=4, checkpoint=tmp_path / "a", resume=True)
    assert_close(whole.progress.server, again.progress.server, 0.0)


def test_a_marked_model_is_compared_too(tmp_path: Path) -> None:
    data = federation((3, 2))
    fit(fedsvi(scaled(1.0, name="scaled")), data, rounds=1).save(tmp_path, with_data=True)
    assert hierfl.load(tmp_path).clients == data.names
    scaled(2.0, name="scaled")
    with pytest.raises(
        hierfl.CannotRemake,
        match=r"marked as 'scaled' is not the recorded one: it differs in model: value of closure's 'scale'",
    ):
        hierfl.load(tmp_path)
    with pytest.raises(
        hierfl.CannotRemake, match="the model that was passed is not the recorded one"
    ):
        hierfl.load(tmp_path, model=scaled(3.0))
    assert hierfl.load(tmp_path, model=scaled(1.0)).clients == data.names
    with pytest.raises(ValueError, match="leave model= and guide= out"):
        hierfl.load(tmp_path, method=fedsvi(scaled(1.0)), model=scaled(1.0))


def rewritten(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = sorted(folder.glob("round-*"))[-1] / "state.json"
    record = json.loads(path.read_text())
    record.pop("sha256")
    change(record["about"]["method"]["with"]["model"])
    path.write_text(json.dumps({**record, "sha256": digest(record)}))


def test_under_another_python_the_rest_is_compared_and_a_warning_says_so(tmp_path: Path) -> None:
    data, method = federation((3, 2)), fedsvi(scaled(1.0))
    fit(method, data, rounds=1, checkpoint=tmp_path)
    rewritten(tmp_path, lambda model: model["code"].update(python="cpython-399", code="0" * 16))
    with pytest.warns(UserWarning, match="belongs to this run: model: its code was compiled by"):
        hierfl.load(tmp_path, method=method, data=data)
    with pytest.raises(hierfl.CheckpointError, match="value of closure's 'scale'"):
        hierfl.load(tmp_path, method=fedsvi(scaled(2.0)), data=data)


def test_a_record_without_a_fingerprint_is_refused(tmp_path: Path) -> None:
    data, method = federation((3, 2)), fedsvi(scaled(1.0))
    fit(method, data, rounds=1, checkpoint=tmp_path)
    rewritten(tmp_path, lambda model: model.pop("code"))
    with pytest.raises(hierfl.CheckpointError, match="model: one of the two does not say what its"):
        fit(method, data, rounds=1, checkpoint=tmp_path, resume=True)
