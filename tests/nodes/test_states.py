"""After the rounds a node answers under parameters of the run alone, and about enough rows."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import hierfl
from hierfl import methods
from hierfl.cli.officer_page import entries
from hierfl.core.trees import tree_map
from hierfl.formulas.disclosure import columns_of_scores, scores_of_few
from hierfl.nodes import Answer, FitOverNodes, in_process
from hierfl.nodes.messages import Ask, RoundRequest, StateRequest, from_bytes, to_bytes
from hierfl.nodes.run import fit_nodes
from hierfl.optimizers import SGD
from tests.methods.cases import CASES, shared
from tests.nodes.one_process import Machines, machines
from tests.nodes.test_local_answers import ALL
from tests.programs import federation, regression

ASKED = {"predictions": "predict", "scores": "scores", "summaries": "local_summary"}
MODELS: dict[str, Any] = {
    "fedavg": lambda: methods.fedavg(shared(), optimizer=SGD(0.05), steps=3, batch_size=5),
    "fedsvi": lambda: methods.fedsvi(regression),
    "two_stage": lambda: methods.two_stage(hierfl.models.regression("gaussian", centered=True)),
}
UNKNOWN = "asks under parameters that the node has not received"


def rows(counts: tuple[int, ...] = (9, 7, 8)) -> Any:
    data = federation(counts)
    return data.select(sorted(data.names))


def letting(folder: Path, names: Any, policy: str = ALL) -> Path:
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "policy.toml").write_text(policy)
    return folder


def fitted(method: Any, folder: Path, policy: str = ALL) -> FitOverNodes:
    data = rows()
    nodes = in_process(data, letting(folder, data.names, policy))
    return hierfl.nodes.fit(method, nodes, rounds=2)


def machines_and_fit(folder: Path, rounds: int) -> tuple[Machines, FitOverNodes]:
    """Return nodes that let everything leave, and a fit over them that has not told them its end."""
    method = methods.fedsvi(regression)
    around = machines(method, rows(), folder)
    for node in around.nodes.values():
        node.policy.write_text(ALL)
    return around, fit_nodes(method, around.agreement, around.ask, rounds=rounds)


def under(fit: FitOverNodes, change: Any, *, ends: bool = False) -> FitOverNodes:
    """Return the fit, whose questions hold other parameters."""

    def ask(contents: Any) -> Any:
        crafted = {}
        for name, content in contents.items():
            tree, about = from_bytes(content, most=1 << 30)
            message = tree_map(change, tree["message"])
            about = {**about, "ends": ends or about["ends"]}
            crafted[name] = to_bytes({**tree, "message": message}, about)
        return fit.ask(crafted)

    return replace(fit, ask=ask)


@pytest.mark.slow("two_stage")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_no_question_is_answered_under_other_parameters(name: str, tmp_path: Path) -> None:
    fit = fitted(MODELS[name](), tmp_path)
    site = "y" if "y" in fit.program.labels else None
    for kind, call in ASKED.items():
        options: Any = {"draws": 5} | ({} if kind == "summaries" else {"site": site})
        honest = getattr(fit, call)(**options)
        if kind == "summaries" and not honest.given:
            continue  # the model has nothing of a client's own
        assert not honest.withheld
        for change in (
            torch.zeros_like,
            lambda v: v + 1e-9,
            lambda v: torch.eye(1, v.numel(), dtype=v.dtype).reshape(v.shape),
        ):
            asked = under(fit, change)
            found = getattr(asked, call)(**options)
            assert not found.given and all(UNKNOWN in why for why in found.withheld.values())
        assert not getattr(fit, call)(**options).withheld


def test_a_node_takes_few_other_states(tmp_path: Path) -> None:
    """Those that say they are the run's last: one at its end, and as many as the policy allows."""
    fit = fitted(methods.fedsvi(regression), tmp_path)
    answers = [under(fit, lambda v, k=k: v + k, ends=True).local_summary(5) for k in range(1, 5)]
    assert [bool(one.given) for one in answers] == [True, True, False, False]
    assert all("(states_a_run)" in why for why in answers[2].withheld.values())
    assert not fit.local_summary(5).withheld
    letting(tmp_path, fit.clients, ALL + "states_a_run = 4\n")
    assert under(fit, lambda v: v + 3.0, ends=True).local_summary(5).given
    shorter = under(fit, lambda v: v[:1] if v.dim() else v, ends=True).local_summary(5)
    assert not shorter.given and "has shape" in str(shorter.withheld)


def test_rounds_between_them_allow_no_more_final_states(tmp_path: Path) -> None:
    around, fit = machines_and_fit(tmp_path, 2)
    answered = 0
    for k in range(1, 5):
        of = [under(fit, lambda v, a=k + j: v + a, ends=True) for j in (0.0, 0.25, 0.5)]
        answered += sum(bool(asking.local_summary(5).given) for asking in of)
        tree = {"message": tree_map(lambda v, a=k: v + 1e-3 * a, fit.message), "mail": {}}
        run = next(iter(around.nodes.values())).run
        for counted in (1, 99):  # an honest round, and one that fails
            about = {"kind": "round", "run": run, "round": 100 * k, "counted": counted}
            list(around.ask({n: to_bytes(tree, about) for n in fit.clients}))
    assert answered == 3


def test_rounds_of_a_servers_choice_allow_no_more_questions(tmp_path: Path) -> None:
    """By a round under each unit vector, and predictions under it, a server would read the covariates."""
    around, fit = machines_and_fit(tmp_path, 1)
    counts = []
    for k in range(1, 6):
        message = tree_map(lambda v, a=k: v + 0.1 * a, fit.message)
        about = asdict(RoundRequest(fit.run, k, k - 1))
        content = to_bytes({"message": message, "mail": {}}, about)
        answers = [*around.ask(dict.fromkeys(fit.clients, content))]
        assert all(answer.content for answer in answers)
        at = {"message": message, "mail": {}, "rows": {}}
        asked = asdict(StateRequest("predictions", fit.run, k + 1, k, ends=False, site="y"))
        answers = [*around.ask(dict.fromkeys(fit.clients, to_bytes(at, asked)))]
        counts.append(sum(bool(answer.content) for answer in answers))
    assert counts == [3, 3, 3, 0, 0]
    assert all("(states_a_run)" in answer.reason for answer in answers)


def test_a_run_without_a_round_answers_nothing(tmp_path: Path) -> None:
    """Else each new seed would have states of the server's choice, and cost it nothing."""
    first, second = (machines(methods.fedsvi(regression), rows(), tmp_path, seed=k) for k in (0, 1))
    for node in first.nodes.values():
        node.policy.write_text(ALL)
    fit = fit_nodes(methods.fedsvi(regression), first.agreement, first.ask, rounds=1)
    other = replace(fit, ask=second.ask, run=next(iter(second.nodes.values())).run)
    for ends in (True, False):
        found = under(other, lambda v: v, ends=ends).local_summary(5)
        assert not found.given and all("no round" in why for why in found.withheld.values())
    assert not fit.local_summary(5).withheld


def test_a_fit_that_is_saved_and_loaded_asks_as_before(tmp_path: Path) -> None:
    fit = fitted(methods.fedsvi(regression), tmp_path, f"{ALL}states_a_run = 1\n")
    fit.save(tmp_path / "saved")
    for _ in range(2):
        again = hierfl.nodes.load(tmp_path / "saved", in_process(rows(), tmp_path))
        assert not again.local_summary(5).withheld


def test_a_node_that_was_away_at_the_end_learns_of_it_by_a_question(tmp_path: Path) -> None:
    fit = machines_and_fit(tmp_path, 2)[1]
    assert not fit.ended and not fit.local_summary(5).withheld


def test_predictions_of_a_nodes_own_rows_are_rows(tmp_path: Path) -> None:
    policy = 'may_leave = ["predictions", "scores"]\n'
    fit = fitted(methods.fedsvi(regression), tmp_path, policy)
    found = fit.predict(site="y", draws=5)
    assert not found.given and all("lets no rows leave" in why for why in found.withheld.values())
    assert not fit.predict(rows((2, 2, 2)), site="y", draws=5).withheld  # rows of the server
    assert not fit.scores(site="y", draws=5).withheld  # a mean over the rows
    assert "predictions" not in [line["what"] for line in entries(tmp_path / "east")][:-2]


@pytest.mark.parametrize("name", ["knn_per", "pfedgp"])
def test_predictions_by_rows_that_a_client_keeps_are_rows(name: str, tmp_path: Path) -> None:
    """The label of the nearest row alone, under features that the server scales."""
    policy = 'may_leave = ["predictions", "scores"]\nmin_count = 1\n'
    fit = fitted(CASES[name].make(), tmp_path, policy)
    for found in (fit.predict(rows((2, 2, 2)), draws=5), fit.scores(draws=5)):
        assert not found.given and all(
            "tell of single rows" in of for of in found.withheld.values()
        )


def test_no_answer_is_about_few_rows(tmp_path: Path) -> None:
    fit = fitted(methods.fedsvi(regression), tmp_path, ALL.replace("= 1", "= 8"))
    for found in (fit.local_summary(5), fit.scores(site="y", draws=5), fit.local_draws(5)):
        assert len(found.withheld) == 1 and len(found.given) == 2
        assert "fewer rows than the 8 on which an answer must rest" in str(found.withheld)


def saying_of_few(ask: Ask, few: Any, contents: Any) -> Iterator[Answer]:
    """Let client a say which groups have few rows."""
    for answer in ask(contents):
        tree, about = from_bytes(answer.content, most=1 << 24)
        said = {**about, "few": few} if answer.client == "a" else about
        yield answer._replace(content=to_bytes(tree, said))


@pytest.mark.filterwarnings("ignore")
def test_groups_of_few_rows_are_hidden(tmp_path: Path) -> None:
    g = np.random.default_rng(0)
    parts = {}
    for name in ("a", "b", "c"):
        wards = [*"x" * 40, *"y" * 30, *"z" * (3 if name == "a" else 20)]
        parts[name] = pd.DataFrame({"ward": wards, "y": g.normal(size=len(wards))})
    text = "y ~ 1 + (1 | site) + (1 | site:ward)"
    policy = 'may_leave = ["summaries", "draws", "predictions", "scores"]\n'
    nodes = in_process(parts, letting(tmp_path, parts, policy))
    made = hierfl.formula(text, clients="site")
    fit = hierfl.nodes.fit(made, nodes, rounds=2, disclose="sums")
    table = fit.local_summary(50).table.set_index(["client", "site"])["mean"]
    hidden = table[table.isna()].index.tolist()
    assert hidden == [("a", "site:ward[2]")] and len(table) == 12
    draws = fit.local_draws(50).given["a"]["site:ward"]
    assert draws[:, 2].isnan().all() and draws[:, :2].isfinite().all()
    for kind in ("summaries", "draws"):  # nor can a node hide others, or numbers of these
        for few in ({"site:ward": [0]}, {"site": [0]}, {"ward": [0]}):
            lying = replace(fit, ask=partial(saying_of_few, fit.ask, few))
            found = lying.local_summary(50) if kind == "summaries" else lying.local_draws(50)
            assert [*found.withheld] == ["a"] and {*found.given} == {"b", "c"}, few
    own = next((tmp_path / "a" / "answers").glob("*summaries*.csv"))
    assert not pd.read_csv(own)["mean"].isna().any()  # its owner reads all of it
    model: Any = fit.method.model
    for rows_of, is_small in (
        (slice(70), False),
        (slice(None), True),
    ):  # nor by a prediction for a row of the group
        new = replace(model).data({"a": parts["a"][rows_of]})
        for answers in (fit.predict(new, draws=5), fit.scores(new, draws=5)):
            assert bool(answers.withheld) is is_small, answers.withheld
            assert not is_small or "fewer than 5 rows" in answers.withheld["a"]
    codes: dict[str, Any] = {
        "-1": lambda v: v.new_full(v.shape, -1),
        "beyond": lambda v: v.new_full(v.shape, 5),
        "mask": lambda v: torch.tensor([False, False, True]),
        "bytes": lambda v: torch.tensor([0, 0, 1], dtype=torch.uint8),
    }
    for change in codes.values():  # which torch takes for the group, or for what lies behind it
        new = replace(model).data({"a": parts["a"][:3]})
        asking = replace(fit, ask=partial(asking_of_codes, fit.ask, change))
        for answers in (asking.predict(new, draws=5), asking.scores(new, draws=5)):
            assert not answers.given and "agreed on, 0 to 2" in answers.withheld["a"]


def asking_of_codes(ask: Ask, change: Any, contents: Any) -> Iterator[Answer]:
    """Ask about rows of other groups than the fit does."""
    crafted = {}
    for name, content in contents.items():
        tree, about = from_bytes(content)
        codes = {k: change(v) if k == "g_site_ward" else v for k, v in tree["rows"].items()}
        crafted[name] = to_bytes({**tree, "rows": codes}, about)
    yield from ask(crafted)


def test_no_score_tells_of_few_outcomes_beside_those_of_a_group() -> None:
    """Rounds sum outcomes by ward: those of a ward and of all its rows but one are those of one row."""
    ward, x = np.repeat([3, 4, 7, 9], 8), np.random.default_rng(0).normal(size=32)
    chosen = {
        "ward": ward == 4,
        "but one": (ward == 4) & (np.arange(32) != 8),
        "half": np.arange(32) % 2 == 0,
    }
    few = {
        name: bool(scores_of_few({"accuracy": rows[:, None] * 1.0}, [ward, x], [], 5)[0])
        for name, rows in chosen.items()
    }
    assert few == {"ward": False, "but one": True, "half": False}


@pytest.mark.parametrize(("times", "hidden"), [(1.0, False), (10.0, True)])
def test_no_score_tells_one_outcome_from_the_sum_of_many(times: float, hidden: bool) -> None:
    """Log odds of one row, beside those of 59: large ones tell its outcome, whatever the others are."""
    rng, right = np.random.default_rng(0), 0
    for _ in range(100):
        odds, y = rng.normal(size=60), rng.integers(0, 2, 60)
        odds[0] = 2.0 * times
        p = 1.0 / (1.0 + np.exp(-odds))
        columns = columns_of_scores("binary", p[:, None], None, None)
        few = scores_of_few(columns, [], [], 5)[0]
        assert ("log_score" in few) == hidden
        rest = odds[1:].sum() / 2.0
        right += int((odds @ y > rest + times) == bool(y[0]))
    assert (right > 95) == hidden


def test_no_score_tells_of_few_outcomes(tmp_path: Path) -> None:
    """Parameters that predict 1 for the first k of a client's rows, by a covariate, and 0 for its others."""
    data = federation((24, 24, 24, 24))
    own = data.select([name := data.names[0]]).fields
    order = own["x"][:, 0].argsort(descending=True)
    line = hierfl.models.network(
        torch.nn.Linear(2, 1), likelihood=hierfl.models.likelihood.bernoulli(), y="ill"
    )
    nodes = in_process(
        data, letting(tmp_path, data.names, 'may_leave = ["scores"]\nstates_a_run = 9')
    )
    fit = hierfl.nodes.fit(methods.fedavg(line, optimizer=SGD(0.1), steps=2), nodes, rounds=1)

    def accuracy(k: int) -> float:
        between = own["x"][order[k - 1 : k + 1], 0].mean() if k else own["x"][:, 0].max() + 1.0
        values = {2: torch.tensor([50.0, 0.0]), 1: -50.0 * between.reshape(1)}
        asked = under(fit, lambda v: values[v.numel()].reshape(v.shape), ends=True)
        return float(asked.scores(draws=1).given[name]["accuracy"].iloc[0])

    def right(k: int) -> float:
        ill = own["ill"][order]
        return float((ill[:k].sum() + (1.0 - ill[k:]).sum()) / len(ill))

    assert accuracy(0) == pytest.approx(right(0))
    assert all(np.isnan(accuracy(k)) for k in (1, 4, 23))  # of few rows by itself
    assert accuracy(10) == pytest.approx(right(10))
    assert np.isnan(accuracy(11)) and np.isnan(accuracy(9))  # beside the one before
    assert accuracy(10) == pytest.approx(right(10)) and accuracy(16) == pytest.approx(right(16))
