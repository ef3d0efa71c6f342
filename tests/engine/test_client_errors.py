"""A client that fails, or sends what is not finite, does not stop the others; an update far out is named."""

import math
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

import hierfl
from hierfl import ClientBatch, ClientData, ClientError, methods, models
from hierfl.core import noise
from hierfl.core.trees import tree_leaves
from hierfl.diagnostics.checks_of_rounds import clients_of_rounds
from hierfl.engine.aggregate import far_out
from hierfl.optimizers import SGD
from tests.programs import fit
from tests.sampled import sampled

# rows of the bad client are among those that the checks before the first round are made with
pytestmark = [
    pytest.mark.filterwarnings("ignore:the program cannot be evaluated on a few rows"),
    pytest.mark.filterwarnings("ignore:.*standardize"),
]
COUNTS = (5, 3, 7, 4, 6, 3)
NAMES = ("ant", "bee", "cow", "dog", "eel", "fox")
BAD = 2  # "cow": not the first or last, whose rows the checks before the first round run on


def rows(bad: dict[int, float]) -> ClientData:
    """Six clients; `scale` of some is what makes them fail (below 0) or overflow (1e200)."""
    g = torch.Generator().manual_seed(0)
    n = sum(COUNTS)
    x = torch.randn(n, 2, generator=g)
    client = torch.repeat_interleave(torch.arange(6), torch.tensor(COUNTS))
    scale = torch.ones(n)
    for k, value in bad.items():
        scale[client == k] = value
    y = x.sum(-1) + torch.randn(n, generator=g)
    return ClientData.from_arrays(client, names=NAMES, x=x, y=y, scale=scale)


def slopes(batch: ClientBatch) -> None:
    """Slopes by client; a client whose scale is negative has no Cholesky factor, and torch raises."""
    loc = pyro.sample("loc", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with batch.clients():
        slope = pyro.sample("slope", dist.Normal(loc, 0.7).to_event(1))
        with batch.data():
            root = torch.linalg.cholesky(batch.scale[..., None, None] * torch.eye(1))[..., 0, 0]
            pyro.sample("y", dist.Normal((batch.x * slope).sum(-1) * root**4, 1.0), obs=batch.y)


def shared_line(batch: ClientBatch) -> None:
    """A line that all clients share, for methods without local params."""
    slope = pyro.param("slope", torch.zeros(2))
    with batch.clients(), batch.data():
        root = torch.linalg.cholesky(batch.scale[..., None, None] * torch.eye(1))[..., 0, 0]
        pyro.sample("y", dist.Normal((batch.x * slope).sum(-1) * root**4, 1.0), obs=batch.y)


METHODS: dict[str, Any] = {
    "fedsvi": lambda: methods.fedsvi(slopes, local_steps=2, batch_size=2),
    "fedavg": lambda: methods.fedavg(shared_line, steps=2, batch_size=2),
    "pvi": lambda: methods.pvi(slopes, steps=2),
}
FAULTS = {"fails": -1.0, "is not finite": 1e200}


def states(fitted: hierfl.Fit) -> list[Tensor]:
    return tree_leaves((fitted.progress.server, fitted.progress.table))


def run(method: Any, data: ClientData, **options: Any) -> hierfl.Fit:
    return fit(method, data, rounds=3, **{"on_client_error": "skip", **options})


def assert_same(one: hierfl.Fit, other: hierfl.Fit, tolerance: float = 1e-12) -> None:
    for a, b in zip(states(one), states(other), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


QUICK = [
    *(("fedsvi", "vectorized", "fails"), ("fedavg", "vectorized", "is not finite")),
    *(("fedsvi", "sequential", "is not finite"), ("fedavg", "sequential", "fails")),
]
WAYS = sampled(product(METHODS, ["vectorized", "sequential"], FAULTS), QUICK)


@pytest.mark.slow("fedsvi-sequential-is not finite", "fedsvi-vectorized-fails")
@pytest.mark.parametrize(("name", "engine", "fault"), WAYS)
def test_a_round_is_that_of_a_cohort_without_the_client(
    name: str, engine: Any, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = rows({BAD: FAULTS[fault]})
    skipped = run(METHODS[name](), data, engine=engine)
    table = fit(METHODS[name](), rows({}), rounds=1).federation.client.own
    kept = tree_leaves(skipped.progress.table)
    for leaf, start in zip(kept, tree_leaves(table), strict=True):
        assert torch.equal(leaf[BAD], start), "its state is what it was"
    others = torch.tensor([0, 1, 3, 4, 5])
    monkeypatch.setattr(noise, "cohort", lambda *args: others)
    assert_same(run(METHODS[name](), data, engine=engine, on_client_error="raise"), skipped)
    assert skipped.history["clients"].tolist() == [5, 5, 5]
    for left_out in skipped.history["left_out"]:
        [one] = left_out
        said = one["reason"].replace("its state is NaN", "is not finite")
        assert one["client"] == "cow" and fault in said and "\n" not in said
    assert "a client skipped 3 times" in repr(skipped)


@pytest.mark.parametrize("fault", FAULTS)
def test_raise_is_the_default_and_names_the_client(fault: str) -> None:
    with pytest.raises(ClientError, match="client 'cow'"):
        run(METHODS["fedsvi"](), rows({BAD: FAULTS[fault]}), on_client_error="raise")


def test_without_a_bad_client_skip_changes_no_number() -> None:
    for chunk in (None, 2):
        skip = run(METHODS["fedsvi"](), rows({}), chunk=chunk)
        same = run(METHODS["fedsvi"](), rows({}), chunk=chunk, on_client_error="raise")
        assert all(torch.equal(a, b) for a, b in zip(states(skip), states(same), strict=True))
        assert skip.history["left_out"].tolist() == [[], [], []]
        assert "left_out" not in same.history and "skipped" not in repr(same)


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"engine": "sequential"}, {"chunk": 2, "compile": True}])
def test_several_bad_clients_in_several_chunks(how: dict[str, Any], two_cores: None) -> None:
    """They fall into chunks of this process and of its copy."""
    data, method = rows({1: -1.0, 3: 1e200, 4: -1.0}), METHODS["fedsvi"]
    assert_names_and_states(run(method(), data, **how), run(method(), data, chunk=2))


def assert_names_and_states(one: hierfl.Fit, other: hierfl.Fit) -> None:
    named = [sorted(out["client"] for out in each) for each in one.history["left_out"]]
    assert named == [["bee", "dog", "eel"]] * 3
    assert_same(one, other, 1e-9)


def test_a_round_without_any_client_is_an_error_that_names_them() -> None:
    method = methods.fedavg(shared_line, optimizer=SGD(1e300), steps=5, batch_size=None)
    with pytest.raises(ClientError, match=r"all 6 clients are left out \('ant': .*and 1 more"):
        run(method, rows({}))


def test_a_resumed_run_is_that_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    data, method = rows({BAD: -1.0}), METHODS["fedsvi"]
    options: dict[str, Any] = {"checkpoint": tmp_path, "checkpoint_every": 1}
    whole = run(method(), data, **options)
    shutil.rmtree(tmp_path / "round-00000003")
    resumed = run(method(), data, resume=True, **options)
    assert all(torch.equal(a, b) for a, b in zip(states(whole), states(resumed), strict=True))
    columns = [c for c in whole.history if c != "seconds"]
    assert resumed.history[columns].to_dict() == whole.history[columns].to_dict()


def test_skipping_is_refused_where_no_client_can_be_left_out() -> None:
    data = rows({})
    with pytest.raises(ValueError, match="fedlaplace sums the updates of all clients"):
        run(methods.fedlaplace(slopes), data)
    with pytest.raises(ValueError, match="on_client_error is 'ignore'"):
        run(methods.fedsvi(slopes), data, on_client_error="ignore")


def warnings_of(fitted: hierfl.Fit) -> list[str]:
    return [check.answer for check in clients_of_rounds(fitted) if check.verdict == "warning"]


def test_who_was_left_out_is_named_with_the_reason() -> None:
    [said] = warnings_of(run(METHODS["fedsvi"](), rows({BAD: -1.0})))
    assert "1 of 6 clients" in said and "cow (in 3 of 3 rounds, first in round 1: it fails" in said


def test_new_clients_that_fail_are_named() -> None:
    fitted = run(METHODS["fedsvi"](), rows({}))
    with pytest.warns(UserWarning, match="new client 'cow' was left out of 2 of 2 rounds"):
        joined = fitted.personalize(rows({BAD: -1.0}), rounds=2)
    start = tree_leaves(fitted.personalize(rows({}), rounds=0).progress.table)
    for leaf, first in zip(tree_leaves(joined.progress.table), start, strict=True):
        assert torch.equal(leaf[BAD], first[BAD])


def test_an_update_far_out_is_named_and_counted() -> None:
    """Of twelve clients one sends a gradient a thousand times larger: its labels are in other units."""
    g = torch.Generator().manual_seed(0)
    ids = torch.arange(12).repeat_interleave(10)
    x = torch.randn(120, 2, generator=g)
    y = x.sum(-1) + torch.randn(120, generator=g)

    def fitted(y: Tensor) -> hierfl.Fit:
        names = tuple("abcdefghijkl")
        data = ClientData.from_arrays(ids, names=names, x=x, y=y)
        model = models.network(nn.Linear(2, 1), likelihood=models.likelihood.normal(1.0))
        method = methods.fedavg(model, steps=5, batch_size=None)
        return hierfl.fit(method, data, rounds=2, settings=hierfl.Settings(compile=False))

    torch.manual_seed(0)
    assert "far_out" not in fitted(y).history, "honest clients are not named"
    far = fitted(torch.where(ids == 7, 1e4 * y, y))
    [one] = far.history["far_out"][0]
    assert one["client"] == "h" and one["times"] > 100
    assert far.history["clients"].tolist() == [12, 12], "it is counted"
    assert any("far larger than the others of their round: h (in" in t for t in warnings_of(far))


@pytest.mark.parametrize(
    ("clients", "sd", "most"), [(8, 0.3, 0), (10, 1.0, 12), (50, 1.0, 3), (500, 1.0, 3)]
)
def test_honest_clients_are_rarely_named(clients: int, sd: float, most: int) -> None:
    g = torch.Generator().manual_seed(1)
    named = missed = 0
    for _ in range(300):
        norm = (sd * torch.randn(clients, generator=g)).exp()
        named += bool(far_out({"theta": norm}))
        norm[3] = 3e3 * norm.max()
        missed += 3 not in [one["place"] for one in far_out({"theta": norm})]
    assert named <= most
    assert missed <= (0 if clients >= 50 else 90), "the limit follows the spread of few clients"


def test_far_out_asks_for_a_cohort_and_for_size() -> None:
    assert far_out({"theta": torch.tensor([1.0] * 6 + [1e6])}) == []  # seven clients
    equal = torch.ones(20)
    assert far_out({"theta": equal}) == []
    equal[4] = 9.0  # infinitely many deviations, and less than ten times the median
    assert far_out({"theta": equal}) == []
    equal[4] = 11.0
    [one] = far_out({"theta": equal, "loss": torch.zeros(0)})
    assert one["place"] == 4 and one["share"] == "theta" and math.isclose(one["times"], 11.0)
    assert far_out({"theta": torch.zeros(20)}) == []
