"""The vantage6 algorithm of `examples/`, by vantage6's own mock: as here, and hostile tasks are refused.

It runs where vantage6-algorithm-tools is installed, which holds other versions than hierfl's tests do.
"""

from __future__ import annotations

import base64
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import hierfl
from hierfl.models.families.names import FAMILIES
from hierfl.nodes.envelope import read_answer, read_request, write_answer, write_request
from hierfl.nodes.log import entries
from tests.nodes.transports import TEXT, formula, frames

pytestmark = [
    pytest.mark.filterwarnings("ignore:the rounds ended"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of vantage6
]
FOLDER = Path(__file__).parents[2] / "examples" / "vantage6_formula"
STORE: dict[str, Any] = json.loads((FOLDER / "algorithm_store.json").read_text())
HOW = {"formula": TEXT, "clients": "hospital", "family": "bernoulli"}


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """A collaboration of the four hospitals, whose nodes keep their folders in tmp_path."""
    mock = pytest.importorskip("vantage6.algorithm.tools.mock_client")
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setenv("TEMPORARY_FOLDER", str(tmp_path))

    def made(parts: dict[str, pd.DataFrame] | None = None) -> Any:
        named = (parts or frames()).items()
        rows = [[{"database": part.assign(hospital=name)}] for name, part in named]
        return mock.MockAlgorithmClient(datasets=rows, module="hierfl_formula")

    return made


def run(client: Any, **kwargs: Any) -> dict[str, Any]:
    task = client.task.create(
        input_={"method": "central", "kwargs": {**HOW, **kwargs}}, organizations=[0]
    )
    (found,) = client.wait_for_results(task_id=task["id"])
    return found


def test_a_formula_is_fitted_as_here(network: Any, tmp_path: Path) -> None:
    found = run(network(), draws=200)
    here = hierfl.fit(formula(), frames())
    assert found["chosen"].startswith("two_stage") and found["clients"] == sorted(frames())
    assert len(found["rounds"]) == len(here.history)
    draws: Any = here.posterior(draws=200)["posterior"]
    means = {line["parameter"]: line["mean"] for line in found["summary"]}
    for name in [name for name in draws.data_vars if draws[name].ndim == 2]:
        assert means[name] == pytest.approx(float(draws[name].mean()), abs=1e-9), name
    for k in range(4):
        left = [one["what"] for one in entries(tmp_path / f"organization-{k}")]
        assert left.count("update") == len(found["rounds"]) and "introduction" in left


def test_rows_without_the_column_are_named_as_in_vantage6(network: Any) -> None:
    client = network()
    for tables in client.datasets_per_org.values():
        del tables[0]["hospital"]
    assert run(client, rounds=1)["clients"] == [f"mock-{k}" for k in range(4)]


def test_the_environment_of_a_node_is_its_policy(
    network: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HIERFL_MIN_ROWS", "150")
    monkeypatch.setenv("HIERFL_METHODS", "two_stage, fedsvi")
    with pytest.warns(UserWarning, match="asks for 150 rows or more"):
        found = run(network(), rounds=1)
    assert found["clients"] == sorted(n for n, part in frames().items() if len(part) >= 150)
    said = (tmp_path / "organization-0" / "environment.toml").read_text()
    assert said == 'methods = ["two_stage", "fedsvi"]\nmin_rows = 150\n'
    line = next(one for one in entries(tmp_path / "organization-0") if one["what"] == "update")
    assert line["policy"] == {"methods": ["fedsvi", "two_stage"], "min_rows": 150}
    assert line["by"] == "vantage6 collaboration 1"


def test_priors_are_a_few_distributions_with_numbers(network: Any) -> None:
    found = run(network(), rounds=1, priors={"age": ["Normal", 0, 0.001]})
    mean = next(line["mean"] for line in found["summary"] if line["parameter"] == "age")
    assert abs(mean) < 0.01
    for wrong in (["os.system", 0], ["Normal", "__import__('os')"], ["MaskedDistribution", 1]):
        with pytest.raises(ValueError, match="write one of Normal"):
            run(network(), priors={"age": wrong})


@pytest.mark.parametrize(
    "text",
    [
        "y ~ __import__('os').system('true') + (1 | hospital)",
        "y ~ eval(age) + (1 | hospital)",
        "y ~ np.load(age) + (1 | hospital)",
        "y ~ {open('/etc/passwd')} + (1 | hospital)",
        "y ~ `age'); raise SystemExit(1) #` + (1 | hospital)",
    ],
)
def test_no_code_of_a_formula_is_run(text: str, network: Any) -> None:
    with pytest.raises((ValueError, KeyError, hierfl.nodes.TooFewNodes)):
        run(network(), formula=text)


@pytest.mark.parametrize("request_", ["", "!", base64.b64encode(b"\x80\x04.").decode(), 7])
def test_a_node_refuses_hostile_tasks(request_: Any, network: Any, tmp_path: Path) -> None:
    client = network()
    kwargs = {**HOW, "priors": None, "missing": "refuse", "request": request_}
    sent = {"method": "partial", "kwargs": kwargs}
    try:
        task = client.task.create(input_=sent, organizations=[1])
    except ValueError:  # of base64: vantage6 writes it into the node's log, and sends nothing
        return
    (found,) = client.wait_for_results(task_id=task["id"])
    line = json.loads(base64.b64decode(found).partition(b"\n")[0])
    assert line["wrong"] and line["bytes"] == 0
    assert [one["what"] for one in entries(tmp_path / "organization-1")] == ["refusal"]


def test_wrong_answers_are_refused(network: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on other transports: one organization lies in a round, in ways that a Gaussian summary has."""
    hierfl_formula: Any = importlib.import_module("hierfl_formula")

    from hierfl.core.trees import tree_map
    from hierfl.nodes.messages import from_bytes, to_bytes

    asked = hierfl.nodes.Station.answer

    def changed(by: float, **about: Any) -> Callable[[bytes], bytes]:
        def change(content: bytes) -> bytes:
            found = from_bytes(content, most=1 << 20)
            tree = tree_map(lambda v: v * by if v.is_floating_point() else v, found.tree)
            return to_bytes(tree, {**found.about, **about})

        return change

    lies: list[tuple[Callable[[bytes], bytes], str]] = [
        (changed(float("nan")), "is not finite"),
        (changed(1e30), "above 1e"),
        (changed(1.0, round=99), "round 99"),
        (changed(1.0, client="cleveland"), "client cleveland"),
        (changed(1.0, run="x"), "of run x"),
        (lambda content: b"\x80\x04.", "not a message"),
        (lambda content: content + bytes(1 << 22), "bytes"),
    ]
    for change, why in lies:

        def lied(self: Any, request: bytes, *, by: Any = None, change: Any = change) -> bytes:
            answer = asked(self, request, by=by)
            if self.folder.name == "organization-3" and read_request(request)[0] == "round":
                return write_answer(request, change(read_answer(request, answer)))
            return answer

        monkeypatch.setattr(hierfl_formula.hierfl.nodes.Station, "answer", lied)
        found = run(network(), rounds=1, seed=len(why))
        assert [one["client"] for one in found["left_out"]] == ["va"]
        assert why in found["left_out"][0]["reason"]


def test_the_store_describes_what_there_is() -> None:
    """Without vantage6: the functions and their arguments are those of the code."""
    source = (FOLDER / "hierfl_formula" / "__init__.py").read_text()
    central, partial = STORE["functions"]
    for function in (central, partial):
        head = source.partition(f"def {function['name']}(")[2].partition(") ->")[0]
        for argument in function["arguments"]:
            assert f"    {argument['name']}: " in head
    family = next(one for one in central["arguments"] if one["name"] == "family")
    assert family["allowed_values"] == sorted(FAMILIES)
    assert "PKG_NAME=hierfl_formula" in (FOLDER / "Dockerfile").read_text()
    assert write_request("introduce", b"")
