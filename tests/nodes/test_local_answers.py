"""Draws, predictions and scores at the nodes are those of `hierfl.Fit`, and leave only where the policy says so."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from hierfl import Fit, Method, methods
from hierfl.nodes import local_fit
from hierfl.nodes.client_state import kept
from hierfl.nodes.fit_over_nodes import FitOverNodes
from hierfl.nodes.messages import Refused, from_bytes, last_counted, to_bytes
from hierfl.nodes.node import answer
from hierfl.nodes.run import fit_nodes
from hierfl.optimizers import SGD
from tests.methods.cases import METHODS
from tests.methods.cases import shared as _shared
from tests.methods.test_batch_normed import regression as normed_network
from tests.nodes.one_process import Machines, machines, rows
from tests.nodes.test_choosing import counts
from tests.nodes.test_every_method import EACH
from tests.programs import assert_close, federation, fit, regression
from tests.sampled import sampled

# of clients with 2 rows and more
ALL = 'may_leave = ["summaries", "draws", "predictions", "scores", "rows"]\nmin_count = 1\n'
FEW = ("fedsvi", "fedfomo", "batch_normed")
OWN: dict[str, Any] = {
    **EACH,
    "batch_normed": lambda: methods.batch_normed(
        methods.fedavg(normed_network(), optimizer=SGD(0.1), steps=3, batch_size=5)
    ),
}


def pair(method: Method, folder: Path, policy: str = ALL) -> tuple[FitOverNodes, Fit, Machines]:
    """Fit over nodes and here; every node has the policy."""
    data = rows()
    around = machines(method, data, folder, seed=4, policy=policy)
    cohort = None if method.everyone else 3
    over = fit_nodes(method, around.agreement, around.ask, rounds=3, seed=4, cohort=cohort)
    return over, fit(method, data, rounds=3, seed=4, cohort=cohort), around


@pytest.mark.slow("fedsvi", "batch_normed")
@pytest.mark.parametrize("name", sampled(OWN, FEW))
def test_answers_are_those_of_the_vectorized_engine(name: str, tmp_path: Path) -> None:
    over, here, _ = pair(OWN[name](), tmp_path)
    if here.program.latents.sites or here.program.derived:
        drawn, expected = over.local_draws(20, seed=7), here.draws(20, seed=7)
        assert set(drawn.given) | set(drawn.withheld) == set(here.clients)
        for k, client in enumerate(here.clients):
            for site, value in drawn.given.get(client, {}).items():
                torch.testing.assert_close(value, expected.own[site][:, k], rtol=0.0, atol=1e-9)
        assert bool(expected.own) == bool(drawn.given)
    new = rows((2, 4, 3, 6))
    observed = "y" if "y" in here.program.labels else None
    for asked in (None, new):
        given = rows() if asked is None else asked
        expected_rows = here.predict(given, site=observed, draws=20, seed=7)
        found = over.predict(asked, site=observed, draws=20, seed=7).table
        means = found[[c for c in found if str(c).startswith("mean")]].to_numpy()
        np.testing.assert_allclose(
            means, expected_rows.mean.reshape(len(means), -1).numpy(), rtol=0.0, atol=1e-9
        )
        scores = over.scores(asked, site=observed, draws=20, seed=7).table.set_index("client")
        pd.testing.assert_frame_equal(
            scores, expected_rows.scores().astype(float), rtol=0.0, atol=1e-9
        )


@pytest.mark.filterwarnings("ignore")  # of so few clients
def test_a_secret_cohort_is_asked_for_the_states_of_its_rounds(tmp_path: Path) -> None:
    """Each round's cohort is drawn by a seed that is not kept."""
    over, _, around = pair(METHODS["differentially_private"](), tmp_path)
    rounds = {name: kept(node).round for name, node in around.nodes.items()}
    counted = {name: at for name, at in rounds.items() if at >= 0}
    assert last_counted(over.federation, over.progress.history) == counted


def test_answers_take_no_more_of_the_disk_than_they_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that the policy keeps; the newest is there, and questions of a day are few."""
    monkeypatch.setattr(local_fit, "MOST_KEPT", 20_000)
    over, _, around = pair(methods.fedsvi(regression), tmp_path, "questions_a_day = 9")
    for seed in range(9):
        assert not over.local_draws(100, seed=seed).given
    for node in around.nodes.values():
        files = list((node.folder / "answers").iterdir())
        assert sum(path.stat().st_size for path in files) <= 20_000 and len(files) > 2
        assert any(path.name.endswith("draws-100-8.safetensors") for path in files)
    refused = over.local_draws(100, seed=9).withheld
    assert all("allows 9 questions a day" in why for why in refused.values())


def test_an_answer_stays_at_the_node_that_does_not_release_it(tmp_path: Path) -> None:
    over, here, around = pair(methods.fedsvi(regression), tmp_path, "")
    around.nodes["east"].policy.write_text('may_leave = ["summaries"]\n')
    already = len(around.sent)
    found = over.local_summary(50, seed=1)
    assert list(found.given) == ["east"]
    assert (
        found.withheld["north"]
        == "the node's policy lets no summaries leave: may_leave lacks 'summaries'"
    )
    slope = here.draws(50, seed=1).own["slope"][:, 0]
    table = found.table.set_index("site")
    assert table["mean"].tolist() == pytest.approx(slope.mean(0).tolist())
    assert table["sd"].tolist() == pytest.approx(slope.std(0).tolist())
    assert table["5%"].tolist() == pytest.approx(slope.quantile(0.05, dim=0).tolist())
    assert list(table.index) == ["slope[0]", "slope[1]"]
    for what in (over.local_draws, over.predict, over.scores):
        assert not what(draws=10).given
    for client, content in around.sent[already:]:
        leaves = from_bytes(content, most=1 << 20).tree
        assert leaves == {} or (client == "east" and set(leaves) == {"slope"})
    for name, node in around.nodes.items():  # it is in the folder all the same, for the owner alone
        files = {path.name.split("-", 1)[1]: path for path in (node.folder / "answers").iterdir()}
        assert set(files) == {
            "summaries-50-1.csv",
            "draws-10-0.safetensors",
            "predictions-10-0.csv",
            "scores-10-0.csv",
        }
        assert all(path.stat().st_mode & 0o077 == 0 for path in files.values())
        mean = pd.read_csv(files["predictions-10-0.csv"])["mean"]
        expected = here.predict(rows().select([name]), draws=10).mean
        assert mean.tolist() == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_crafted_answer_is_its_nodes_alone(tmp_path: Path) -> None:
    """One node sends tensors that make no table; those of the others are given all the same."""
    over, _, around = pair(methods.fedsvi(regression), tmp_path)
    ones = torch.ones
    crafted: dict[str, Any] = {
        "summaries": {"slope": {"mean": ones(2), "sd": ones(2), "quantiles": ones(5)}},
        "predictions": {"mean": ones(3), "sd": ones(2)},
        "scores": {"log_score": ones(2)},
    }

    def ask(contents: Any) -> Any:
        for one in around.ask(contents):
            about = from_bytes(one.content or b"", most=1 << 20).about
            wrong = to_bytes(crafted[str(about["kind"])], about)
            yield one._replace(content=wrong) if one.client == "east" else one

    from_all = replace(over, ask=ask)
    for what in (from_all.local_summary, from_all.predict, from_all.scores):
        found: Any = what(draws=10)
        assert set(found.given) == {"north", "south", "west"} and "east" in found.withheld


def test_sites_of_single_numbers_are_summarized(tmp_path: Path) -> None:
    over, here, _ = pair(methods.fedsvi(counts), tmp_path)
    table, own = over.local_summary(50).table, here.draws(50).own["own"]
    assert table["site"].tolist() == ["own"] * 4
    assert table["mean"].tolist() == pytest.approx(own.mean(0).tolist())
    assert table["95%"].tolist() == pytest.approx(own.quantile(0.95, dim=0).tolist())


def stateful() -> Method:
    return methods.apfl(_shared(), optimizer=SGD(0.05), steps=3, batch_size=5)


@pytest.mark.slow("2")
@pytest.mark.parametrize("last", [1, 2])
def test_a_lost_answer_leaves_no_trace_in_the_state_of_its_client(
    last: int, tmp_path: Path
) -> None:
    """South's answer of round 1 is computed and lost, or south is never asked: the same afterwards."""
    found = []
    for reached in (True, False):
        around = machines(stateful(), rows(), tmp_path / str(reached))
        around.nodes["south"].policy.write_text(ALL)

        def ask(contents: Any, around: Any = around, reached: bool = reached) -> Any:
            abouts = (from_bytes(c, most=1 << 20).about for c in contents.values())
            gone = next(abouts).get("round") == 1
            some = {k: v for k, v in contents.items() if k != "south" or reached or not gone}
            for one in around.ask(some):
                if not gone or one.client != "south":
                    yield one

        over = fit_nodes(stateful(), around.agreement, ask, rounds=last + 1)
        assert over.history["clients"].tolist() == [4, 3, 4][: last + 1]
        found.append((over.message, over.predict(draws=1).given["south"]))
    (one, here), (two, there) = found
    assert_close(one, two, 0.0)
    pd.testing.assert_frame_equal(here, there)


def test_a_node_that_has_lost_its_state_says_so(tmp_path: Path) -> None:
    around = machines(stateful(), rows(), tmp_path)
    over = fit_nodes(stateful(), around.agreement, around.ask, rounds=2)
    north = around.nodes["north"]
    (state,) = north.folder.glob("*.state")
    state.unlink()
    assert (
        "no state of round 1, in which the server counted it"
        in over.predict(draws=1).withheld["north"]
    )
    with pytest.raises(Refused, match="restore the node's folder from its newest backup"):
        answer(north, next(c for n, c in reversed(around.asked) if n == "north"))


def test_a_question_that_cannot_be_answered_is_said(tmp_path: Path) -> None:
    over, _, around = pair(methods.fedsvi(regression), tmp_path)
    found = over.predict(draws=10, site="nothing")
    assert not found.given and "nothing" in found.withheld["east"]
    with pytest.raises(KeyError, match="unknown client 'mid'"):
        over.predict(federation((5, 3, 7, 2, 4)))
    with pytest.raises(ValueError, match="no node gave a table"):
        _ = found.table
    question = around.asked[-1][1]
    with pytest.raises(Refused, match="nothing"):
        answer(around.nodes["west"], question)
    for change in ({"kind": "rows"}, {"draws": 0}, {"draws": True}, {"seed": "0"}, {"site": 3}):
        asked = from_bytes(question, most=1 << 20)
        with pytest.raises(Refused, match=r"asks for|not a request of|no observed site"):
            answer(around.nodes["west"], to_bytes(asked.tree, {**asked.about, **change}))
