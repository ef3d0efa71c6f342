"""A node's own account: what it has answered, what its rows' budget has paid for, and what it tells before a run."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import hierfl
from hierfl import Clock, methods
from hierfl.cli.officer_page import entries
from hierfl.formulas.questions import Question
from hierfl.nodes.agreed_schema import answer_schema
from hierfl.nodes.agreement import Agreement, Introduction
from hierfl.nodes.choosing import FitCall
from hierfl.nodes.client_state import Node
from hierfl.nodes.envelope import read_answer, write_request
from hierfl.nodes.messages import NodeFailed, Refused, from_bytes, to_bytes
from hierfl.nodes.node import answer, introduce, node
from hierfl.nodes.policy import Forbidden
from hierfl.nodes.stations import Station
from hierfl.optimizers import SGD
from hierfl.summaries.row_noise import RowNoise
from tests.formulas.frames import patients
from tests.methods.cases import common, shared
from tests.nodes.one_process import lone, rows
from tests.nodes.test_agreed_schema import made
from tests.nodes.test_faults import plain
from tests.programs import federation, regression


def noisy(folder: Path, seed: int = 0, **noise: Any) -> Node:
    """Return a node whose answers have noise: of each round, or of the sums of a Gaussian model."""
    family: Any = "gaussian" if "max_response" in noise else "bernoulli"
    model: Any = hierfl.models.regression(family, centered=True)
    data = federation((9, 8))
    if family == "bernoulli":
        noise = {"rounds": 2, **noise}
        data = data.with_fields(y=(data.fields["y"] > 0).double())
    of_rows = RowNoise(epsilon=1.0, delta=1e-3, max_row_norm=2.0, **noise)
    parts = [data.select([name]) for name in data.names]
    agreement = Agreement.between([Introduction.of(part) for part in parts])
    method = methods.two_stage(model, draws=100, row_noise=of_rows)
    return node(method, parts[0], agreement, folder, seed=seed)


noisy_sums = partial(noisy, max_response=3.0)


def ask(one: Node, round_: int, **change: Any) -> bytes:
    server = one.federation.server
    message = {**server.down(server.state, Clock(0, 2)), **change}
    about = {"run": one.run, "round": round_, "counted": -1}
    return answer(one, to_bytes({"message": message, "mail": {}}, about))


def test_a_budget_holds_over_rounds_restarts_and_runs(tmp_path: Path) -> None:
    one = noisy(tmp_path)
    first = ask(one, 0)
    assert ask(one, 0) == first  # the same bytes, from the folder
    assert ask(noisy(tmp_path), 0) == first  # after a restart, where the noise has another key
    ask(one, 7)
    for round_ in (0, 1, 99):
        with pytest.raises(Refused, match=r"at most 2 rounds|budget"):
            ask(noisy(tmp_path), round_, loc=one.federation.server.state.belief.loc + 1.0)
    with pytest.raises(Forbidden, match=r"budget of epsilon 1 at delta 0\.001 is spent"):
        ask(noisy(tmp_path, seed=5), 0)  # another run
    (tmp_path / "policy.toml").write_text("epsilon = 9.0\ndelta = 1e-3")
    ask(noisy(tmp_path, seed=5), 0)


def test_one_round_of_noisy_sums_is_the_budget(tmp_path: Path) -> None:
    one = noisy_sums(tmp_path)
    first = ask(one, 0)
    assert ask(one, 0) == first == ask(noisy_sums(tmp_path), 0)
    up = from_bytes(first, most=1 << 20).tree
    assert set(up["factor"][0]) == {"precision", "shift", "num_rows", "noisy_square", "fields"}
    assert float(up["misread"][0]) == 0.0  # it would be of the rows, without noise
    mean = one.federation.server.down(one.federation.server.state, Clock(0, 1))["mean"]
    with pytest.raises(Refused, match=r"at most 1 round|budget"):
        ask(one, 0, mean=mean + 1.0)
    with pytest.raises(Forbidden, match=r"budget of epsilon 1 at delta 0\.001 is spent"):
        ask(noisy_sums(tmp_path, seed=5), 0)
    (tmp_path / "policy.toml").write_text("epsilon = 2.2\ndelta = 1e-3")
    again = from_bytes(ask(noisy_sums(tmp_path, seed=5), 0), most=1 << 20).tree
    assert not torch.allclose(again["factor"][0]["shift"], up["factor"][0]["shift"])


def test_no_step_without_noise(tmp_path: Path) -> None:
    one = noisy(tmp_path)
    size = len(one.federation.server.state.belief.loc)
    with pytest.raises(Refused, match="is not of method 'two_stage with row noise'"):
        ask(one, 0, draws=torch.zeros(4, size, dtype=torch.float64))
    (tmp_path / "policy.toml").write_text("epsilon = 9.0\ndelta = 1e-3")
    with pytest.raises(Forbidden, match="adds no noise to rows"):
        ask(lone(plain(), rows().select(["east"]), tmp_path), 0)


def test_the_same_round_with_another_message_has_other_noise(tmp_path: Path) -> None:
    one = noisy(tmp_path, rounds=3)
    loc = one.federation.server.state.belief.loc
    shifts = [
        from_bytes(ask(one, 0, loc=loc + 1e-12 * k), most=1 << 20).tree["factor"][0]["shift"]
        for k in range(2)
    ]
    assert float((shifts[0] - shifts[1]).abs().max()) > 1e-3


def test_different_messages_count_whatever_round_they_name(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text("rounds_a_day = 3")
    one = lone(plain(), rows().select(["east"]), tmp_path)
    theta = one.federation.server.down(one.federation.server.state, Clock(0, 2))
    for k in range(3):
        ask(one, 0, **{name: value + k for name, value in theta.items()})
    with pytest.raises(Forbidden, match="3 rounds a day"):
        ask(one, 0, **{name: value + 3 for name, value in theta.items()})


def test_two_servers_at_once_spend_one_budget(tmp_path: Path) -> None:
    one = noisy(tmp_path)
    loc = one.federation.server.state.belief.loc

    def asked(k: int) -> str:
        try:
            return "answered" if ask(one, 0, loc=loc + 0.1 * k) else ""
        except Refused as error:
            return str(error)

    with ThreadPoolExecutor(4) as at_once:
        found = list(at_once.map(asked, range(8)))
    assert found.count("answered") == 2
    assert sum("takes at most 2 rounds" in one for one in found) == 6


def test_rows_with_a_budget_are_not_scored_for_a_server(tmp_path: Path) -> None:
    one = noisy(tmp_path)
    (tmp_path / "policy.toml").write_text(
        'may_leave = ["scores", "predictions", "rows", "summaries"]'
    )
    ask(one, 0)
    server = one.federation.server
    message = server.last(server.state, Clock(1, 2))
    about = {"run": one.run, "draws": 5, "seed": 0, "site": None, "rounds": 1, "counted": 0}
    about["ends"] = True
    rows = {"x": torch.zeros(3, 2), "y": torch.ones(3)}
    for kind, given, stays in (
        ("scores", {}, True),
        ("predictions", {}, True),
        ("predictions", rows, False),
        ("summaries", {}, False),
    ):
        tree = {"message": message, "mail": {}, "rows": given}
        said = from_bytes(answer(one, to_bytes(tree, {**about, "kind": kind})), most=1 << 20).about
        assert ("have no noise" in str(said.get("stays"))) == stays, kind


def test_a_named_policy_must_be_there(tmp_path: Path) -> None:
    part = rows().select(["east"])
    with pytest.raises(ValueError, match=r"there is no policy '.*polcy\.toml'"):
        introduce(plain(), part, tmp_path, policy=tmp_path / "polcy.toml")
    with pytest.raises(ValueError, match="there is no policy"):
        lone(plain(), part, tmp_path, policy=tmp_path / "polcy.toml")
    (tmp_path / "own.toml").write_text("")
    one = lone(plain(), part, tmp_path / "n", policy=tmp_path / "own.toml")
    (tmp_path / "own.toml").unlink()  # in the midst of a run
    with pytest.raises(Forbidden, match="policy cannot be read"):
        ask(one, 0)


def test_a_factor_of_one_row_is_refused_without_any_policy(tmp_path: Path) -> None:
    """The server takes all curvature from every row but one: a belief that is narrow and far away."""
    model: Any = hierfl.models.regression("bernoulli", centered=True)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(30, 2, generator=g, dtype=torch.float64)
    part = hierfl.ClientData.from_clients({"a": {"x": x, "y": (x[:, 0] > 0).double()}})
    one = lone(methods.two_stage(model, draws=100), part, tmp_path)
    size, row = len(one.federation.server.state.belief.loc), torch.cat([x[3], torch.ones(1)])
    away = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    loc = torch.zeros(size, dtype=torch.float64)
    loc[:3] = 1e4 * (away - row * (away @ row) / (row @ row))
    with pytest.raises(Forbidden, match="would rest on fewer rows"):
        ask(one, 0, loc=loc, covariance=1e-8 * torch.eye(size, dtype=torch.float64))
    ask(one, 1)  # the server's own first message


@pytest.mark.parametrize("about", [{"round": True}, {"round": 1 << 40}, {"counted": False}])
def test_rounds_are_plain_small_integers(about: dict[str, Any], tmp_path: Path) -> None:
    one = lone(plain(), rows().select(["east"]), tmp_path)
    message = one.federation.server.down(one.federation.server.state, Clock(0, 2))
    said = {"run": one.run, "round": 3, "counted": -1, **about}
    with pytest.raises(Refused, match=r"not a request of the kind|it asks for round"):
        answer(one, to_bytes({"message": message, "mail": {}}, said))
    with pytest.raises(Refused, match="holds mail, which the method does not send"):
        tree = {"message": message, "mail": {"a": torch.ones(1)}}
        answer(one, to_bytes(tree, {"run": one.run, "round": 0, "counted": -1}))


def test_small_mini_batches_are_refused(tmp_path: Path) -> None:
    whole, alone = "mini-batches hold 1 rows, not 3 or more", "holds 1 of the client's 3 rows"
    few = "min_count = 1\nmin_rows = 3"
    for k, (policy, why) in enumerate((("", alone), ("min_count = 1", ""), (few, whole))):
        (tmp_path / str(k)).mkdir()
        (tmp_path / str(k) / "policy.toml").write_text(policy)
        method = methods.fedsvi(regression, batch_size=1)
        with pytest.raises(Forbidden, match=why) if why else nullcontext():
            ask(lone(method, rows().select(["south"]), tmp_path / str(k)), 0)


def line() -> Any:
    likelihood = hierfl.models.likelihood.normal(1.0)
    return hierfl.models.network(torch.nn.Linear(2, 1), likelihood=likelihood)


PULL, MOMENTUM = SGD(0.01), SGD(1e-40, momentum=1e9)
FORGETFUL: dict[str, dict[str, Any]] = {  # all steps but one
    "pull": {"optimizer": PULL, "prox": 100.0, "steps": 20, "batch_size": 1},
    "epoch": {"optimizer": PULL, "prox": 100.0, "steps": 1, "unit": "epoch", "batch_size": 4},
    "momentum": {"optimizer": MOMENTUM, "steps": 5, "batch_size": 1},
}


@pytest.mark.parametrize("name", FORGETFUL)
def test_no_mini_batch_of_few_rows_makes_an_update(name: str, tmp_path: Path) -> None:
    part, method = federation((9, 8)).select(["north"]), methods.fedavg(line(), **FORGETFUL[name])
    (tmp_path / "policy.toml").write_text("min_count = 1")
    allowed = lone(method, part, tmp_path)
    before = allowed.federation.server.state
    weights, rows_of = from_bytes(ask(allowed, 0)).tree["theta"]
    move = [(weights[name][0] / rows_of - of).flatten() for name, of in sorted(before.items())]
    bias, slope = sorted(move, key=len)
    away = (part.fields["x"] - slope / bias).abs().amax(1).min()
    assert away < 1e-4  # the gradient is that of one row, which it tells
    (tmp_path / "policy.toml").unlink()
    (tmp_path / "has-policy").unlink()
    with pytest.raises(
        Forbidden, match=r"a mini-batch holds 1 of the client's 9 rows, not 5 .*batch_size"
    ):
        lone(method, part, tmp_path)


@pytest.mark.parametrize("batch_size", [2, 4])
def test_a_part_of_a_mini_batch_is_of_enough_rows_too(batch_size: int, tmp_path: Path) -> None:
    part = federation((30, 8)).select(["north"])
    method = methods.per_fedavg(line(), batch_size=batch_size)  # of three parts
    with pytest.raises(Forbidden, match=f"holds {batch_size} of the client's 30 rows"):
        lone(method, part, tmp_path)
    lone(methods.fola(common(), batch_size=None, fisher_rows=1), part, tmp_path)  # adds them up


def test_no_sums_of_a_class_of_few_rows_leave(tmp_path: Path) -> None:
    part = federation((30, 8)).select(["north"])
    part = part.with_fields(y=torch.arange(30).clamp(min=28) - 28)  # of one row, and of 29
    body = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    method = methods.fedpac(hierfl.models.HeadedNetwork(body, head="2"))
    (tmp_path / "policy.toml").write_text("min_count = 1")
    update = from_bytes(ask(lone(method, part, tmp_path), 0)).tree
    weights, rows_of = update["theta"]
    bias, slopes = sorted((v[0] / rows_of for v in weights.values()), key=torch.Tensor.dim)
    total = update["classes"][0]["total"][0, 1]
    x = torch.linalg.pinv(slopes) @ (total.atanh() - bias)
    assert torch.allclose(x, part.fields["x"][-1], atol=1e-4)  # it is that row
    (tmp_path / "policy.toml").write_text("")
    with pytest.raises(Forbidden, match="sums of each code of field 'y', and fewer than 5 rows"):
        lone(method, part, tmp_path)


def test_no_validation_rows_of_the_servers_choice_are_few(tmp_path: Path) -> None:
    """The server names the field; scores are losses of its rows at parameters that the server sends."""
    part = federation((30, 8)).select(["north"])
    few, some = torch.zeros(30), torch.zeros(30)
    few[7], some[:9] = 1.0, 1.0
    part = part.with_fields(few=few, some=some, many=torch.arange(30.0))
    made: Any = partial(methods.fedfomo, shared(), models=1, batch_size=None)
    for field in ("few", "many"):
        with pytest.raises(Forbidden, match=f"sums of each code of field '{field}', and fewer"):
            lone(made(validation=field), part, tmp_path / field)
    with pytest.raises(Forbidden, match="a mini-batch holds 1 of the client's 30 rows"):
        lone(made(validation="some", batch_size=6), part, tmp_path / "part")
    one = lone(made(validation="some"), part, tmp_path / "some")
    assert {"some", "y"} <= {*one.behind.every}  # who is a validation row is compared, too


def test_nothing_leaves_before_it_is_approved(tmp_path: Path) -> None:
    (name, frame), *_ = patients(rows=60).groupby("site")
    question = Question("rows").json().encode()
    for policy, why in (
        ('approve = "ask"', "waits for the approval"),
        ("methods = []", "no method"),
    ):
        (tmp_path / "policy.toml").write_text(policy)
        with pytest.raises(Forbidden, match=why):
            answer_schema(made(), {str(name): frame}, tmp_path, question)
        with pytest.raises(Forbidden, match=r"waits for the approval|does not allow"):
            introduce(plain(), rows().select(["east"]), tmp_path)


def test_an_error_that_leaves_holds_no_value(tmp_path: Path) -> None:
    (name, frame), *_ = patients(rows=60).groupby("site")
    frame = frame.assign(y=["secret 77"] * len(frame))
    with pytest.raises((Refused, NodeFailed)) as error:
        answer_schema(made(), {str(name): frame}, tmp_path, Question("columns", 5).json().encode())
    assert "secret" not in str(error.value)
    (line,) = entries(tmp_path)
    assert "secret" not in line["text"] and "secret" in json.dumps(line)


def test_code_of_the_owner_that_ends_is_refused_for_what_it_is(tmp_path: Path) -> None:
    def unread() -> Any:
        raise SystemExit("no file of secret 77")

    request = write_request("schema", Question("rows").json().encode())
    answer = Station(FitCall(made()), unread, tmp_path).answer(request)
    with pytest.raises(Refused, match="its own log says why"):
        read_answer(request, answer)
    assert entries(tmp_path)[-1]["detail"] == "SystemExit: no file of secret 77"


def test_other_formulas_ask_about_no_other_levels(tmp_path: Path) -> None:
    """One bit for each formula of the same columns would find the largest value in ten questions."""
    (name, frame), *_ = patients(rows=60).groupby("site")
    frame = frame.assign(z=range(len(frame)), gap=[None, *[1.0] * (len(frame) - 1)])

    def outside(text: str, *levels: str, missing: Any = "refuse") -> bytes:
        formula = hierfl.formula(text, clients="site", missing=missing)
        content = Question("outside", by=("sex",), levels=levels).json().encode()
        return answer_schema(formula, {str(name): frame}, tmp_path, content)

    first = outside("y ~ sex + (1 | site)", "f", "m")
    for text in ("y ~ sex + (1 | site)", "y ~ sex + z + (1 | site)"):
        assert outside(text, "f", "m") == first
    with pytest.raises(Refused, match="a node answers once"):
        outside("y ~ sex + (1 | site)", "f")
    for text in ("y ~ sex + z + (1 | site)", "y ~ sex + gap + (1 | site)", "z ~ sex + (1 | site)"):
        with pytest.raises(Refused, match="a node answers once"):
            outside(text, "f", missing="drop")
