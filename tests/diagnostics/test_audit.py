"""The audit: every tensor that crosses is listed, and what is said to depend on the rows does."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import hierfl
from hierfl import methods, models
from hierfl.cli import app
from hierfl.core.trees import named_leaves
from hierfl.diagnostics import Audit, audit
from hierfl.diagnostics.audit import COLUMNS
from hierfl.engine import chunks
from hierfl.engine.federation import Federation
from hierfl.method import Phase
from hierfl.models.likelihood import normal
from hierfl.optimizers import SGD
from tests.programs import federation, regression


def net() -> torch.nn.Module:
    return torch.nn.Linear(2, 1)


def of(found: Audit, direction: str) -> dict[str, str]:
    rows = found.table[found.table["direction"] == direction]
    return dict(zip(rows["name"], rows["depends on"], strict=True))


def test_what_fedavg_sends() -> None:
    method = methods.fedavg(
        models.network(net(), likelihood=normal(1.0)), optimizer=SGD(0.01), steps=2
    )
    found = audit(method, federation((5, 3, 7)), rounds=2)
    assert found.client == federation((5, 3, 7)).names[1]
    assert (found.rows, found.values, found.rounds) == (3, 15, 2)
    assert of(found, "up") == {
        "theta.value theta.bias": "its rows",
        "theta.value theta.weight": "its rows",
        "theta.weight": "how many",
        "loss.value": "its rows",
        "loss.weight": "how many",
    }
    assert of(found, "down") == {"theta.bias": "its rows", "theta.weight": "its rows"}
    assert found.sent == 2 * 4
    assert set(found.table["server sees"]) == {"", "a sum"}
    assert "sent 8 numbers that depend on its 3 rows, which hold 15" in str(found)
    assert f"In 2 rounds, client '{found.client}' sent" in found.reading
    assert replace(found, rounds=1).reading.startswith("In 1 round, client")
    first = audit(method, federation((5, 3, 7)), rounds=1)
    assert of(first, "down") == {"theta.bias": "", "theta.weight": ""}  # before the first update


def test_the_others_do_not_work_in_the_last_round(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = list[int]()
    module, work_on = sys.modules[audit.__module__], chunks.work_on

    def counted(on: Federation, phases: tuple[Phase, ...], task: chunks.Task) -> chunks.Done:
        rounds.append(task.round)
        return work_on(on, phases, task)

    monkeypatch.setattr(module, "work_on", counted)
    found = audit(methods.fedsvi(regression), federation((5, 3, 7)), rounds=3)
    assert found.rounds == 3  # its own messages of the last round are listed
    assert sorted(rounds) == [0, 0, 1, 1]  # with its rows, and with others in their place


def test_mail_and_what_is_seen_alone() -> None:
    network = models.network(net(), likelihood=normal(1.0))
    found = audit(
        methods.pfedhn(network, optimizer=SGD(0.01), steps=2), federation((5, 3, 7)), client="north"
    )
    assert of(found, "mail") == {"theta.bias": "its rows", "theta.weight": "its rows"}
    away = found.table[found.table["name"].str.startswith("away")]
    assert set(away["server sees"]) == {"by itself"} and set(away["rounds"]) == {"0-2"}


def test_a_method_that_stops_automatically_is_run_to_its_end() -> None:
    found = audit(methods.two_stage(regression), federation((5, 6, 7)))
    fitted = hierfl.fit(methods.two_stage(regression), federation((5, 6, 7)))
    assert found.rounds == len(fitted.history)
    assert {"factor.value precision", "factor.value shift"} <= of(found, "up").keys()


def test_the_bytes_are_those_of_the_history() -> None:
    """All that goes up and down in a round, of tensors of one client."""
    method = methods.scaffold(
        models.network(net(), likelihood=normal(1.0)), optimizer=SGD(0.01), steps=2
    )
    data = federation((5, 3, 7))
    found, history = audit(method, data, rounds=1), hierfl.fit(method, data, rounds=1).history
    by_direction = found.table.groupby("direction")["bytes"].sum()
    assert by_direction["up"] * 3 == history["bytes_up"][0]
    assert by_direction["down"] * 3 == history["bytes_down"][0]


def test_nothing_of_the_run_is_changed() -> None:
    """The audited run gives the numbers of `fit`."""
    data = federation((5, 3, 7))
    before = {name: v.clone() for name, v in named_leaves(data.fields).items()}
    audit(methods.fedsvi(regression), data, rounds=2)
    assert all(torch.equal(v, before[name]) for name, v in named_leaves(data.fields).items())


def test_what_it_refuses() -> None:
    method = methods.fedsvi(regression)
    with pytest.raises(ValueError, match="audit two clients or more"):
        audit(method, federation((5,)))
    with pytest.raises(KeyError, match="there is no client 'x'; choose from"):
        audit(method, federation((5, 3)), client="x")
    data = federation((5, 3))
    same: dict[str, Any] = {n: v[:1].expand(3, *v.shape[1:]) for n, v in data.fields.items()}
    same_rows = hierfl.ClientData.from_arrays(["a", "a", "b"], **same)
    with pytest.raises(ValueError, match="so that nothing would differ"):
        audit(method, same_rows)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = CliRunner()
    shown = runner.invoke(app, ["audit", "fedsvi", "--rounds", "1"])
    assert shown.exit_code == 0, shown.output
    assert all(column.split()[0] in shown.output for column in COLUMNS)
    assert "_shared.loc" in shown.output and "client 'switzerland' sent" in shown.output
    weights = runner.invoke(app, ["audit", "fedavg", "--rounds", "1"])
    assert "theta.weight" in weights.output and "sent 6 numbers" in weights.output
    sites = runner.invoke(app, ["audit", "fola", "--rounds", "1"])
    assert "shift" in sites.output and "sent 11 numbers" in sites.output
    refused = runner.invoke(app, ["audit", "fedrep"], env={"COLUMNS": "400"})
    assert refused.exit_code == 2 and "needs a head" in refused.output
    assert "build it with a model and options that it takes" in refused.output
    assert "there is no method 'no_such'" in _said(runner.invoke(app, ["audit", "no_such"]).output)
    (tmp_path / "own_study.py").write_text(
        "import torch\nfrom tests.programs import federation, regression\nfrom hierfl import "
        "methods\nmethod, data = methods.fedsvi(regression), federation((4, 2))\n"
    )
    monkeypatch.chdir(tmp_path)
    shown = runner.invoke(app, ["audit", "own_study:method", "own_study:data", "--client", "south"])
    assert shown.exit_code == 0, shown.output
    assert "client 'south' sent" in shown.output
    wrong = runner.invoke(app, ["audit", "own_study:data", "own_study:data"])
    assert "name a hierfl method" in _said(wrong.output)
    wrong = runner.invoke(app, ["audit", "bfi", "own_study:nothing"])
    assert "cannot be imported" in _said(wrong.output)


def _said(output: str) -> str:
    """Return a boxed message as one line."""
    return " ".join(output.replace("│", " ").split())
