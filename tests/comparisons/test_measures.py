"""Scores of a run: what P and G are of, and how clients and rounds are averaged."""

from typing import Any

import pytest
import torch

from hierfl import Fit
from hierfl.comparisons import cells, tuning
from hierfl.comparisons.federations import of_study
from hierfl.comparisons.measures import ScoreWatch, with_everyone
from hierfl.comparisons.score_means import Score, means
from hierfl.comparisons.study_file import Study
from hierfl.core.trees import tree_leaves, tree_map
from hierfl.studies.baseline_methods import baseline
from tests.comparisons.small import study


def found(
    name: str, **changes: object
) -> tuple[dict[tuple[str, ...], float], list[dict[str, float]]]:
    """Return scores by all but their value and rounds, and the curve, of one method and seed."""
    own = study(methods=[{"name": name}], **changes)
    result = cells.computed(own, own.methods[0], {}, 0)
    scores = [Score(**score) for score in result["scores"]]
    by: dict[tuple[str, ...], float] = {
        (s.score, s.clients, s.test, s.weighting, s.metric): s.value for s in scores
    }
    assert len(by) == len(scores)
    curve: list[dict[str, float]] = result["curve"]
    return by, curve


def test_g_of_a_common_model_is_its_p_and_that_of_an_own_model_is_not() -> None:
    common, _ = found("fedavg")
    own, _ = found("local_only")
    for metric in ("accuracy", "log_score"):
        key = ("participating", "local", "clients", metric)
        assert common["P", *key] == pytest.approx(common["G", *key])
    assert (
        own["P", "participating", "local", "clients", "accuracy"]
        > 20.0 + (own["G", "participating", "local", "clients", "accuracy"])
    )


@pytest.mark.parametrize(
    ("name", "run", "last"),
    [
        ("fedavg", {"rounds": 4}, 2),
        # 4 rounds of all clients in place of 8 of half of them, and 2 of them in place of the last 4
        ("clustered_fl", {"cohort": 3, "rounds": 8}, 4),
    ],
)
def test_last_rounds_are_averaged_and_points_of_the_curve_are_single_rounds(
    name: str, run: dict[str, int], last: int
) -> None:
    by, curve = found(name, run=run, evaluation={"last_rounds": last, "every": 1})
    assert [point["round"] for point in curve] == [1, 2, 3, 4]
    mean = (curve[2]["P"] + curve[3]["P"]) / 2.0
    assert by["P", "participating", "local", "clients", "accuracy"] == pytest.approx(mean)
    assert found("fedavg", evaluation={"every": 0})[1] == []


def test_a_round_of_all_clients_is_the_next_round_of_a_run_in_which_all_take_part() -> None:
    own = study(run={"rounds": 3}, methods=[{"name": "ditto"}])
    rows = of_study(own, 0)
    three, four = (cells.trained(own, own.methods[0], {}, rows, rounds, 0) for rounds in (3, 4))
    before = tree_map(torch.clone, three.progress.table)
    whole = with_everyone(three)
    assert whole.rounds == 4
    for one, other in (
        (whole.message, four.message),
        (whole.progress.table, four.progress.table),
        (three.progress.table, before),  # the fit goes on as if nothing had been scored
    ):
        pairs = list(zip(tree_leaves(one), tree_leaves(other), strict=True))
        assert pairs and all(torch.equal(a, b) for a, b in pairs)


def test_p_is_of_a_round_of_all_clients_where_it_is_asked_for() -> None:
    asked = {"last_rounds": 2, "round_of_all": True}
    changes = {"run": {"rounds": 4, "cohort": 1}, "methods": [{"name": "local_only"}]}
    own = study(evaluation=asked, **changes)  # type: ignore[arg-type]
    result = cells.computed(own, own.methods[0], {}, 0)
    rows = of_study(own, 0)
    fit = cells.trained(own, own.methods[0], {}, rows, 4, 0)
    predicted = means(with_everyone(fit).predict(rows.test, draws=1, seed=0))
    scores = [Score(**score) for score in result["scores"]]
    by = {(s.score, s.weighting, s.metric): (s.value, s.rounds) for s in scores}
    assert by["P", "clients", "accuracy"] == (predicted["clients", "accuracy"], 1)
    assert by["G", "clients", "accuracy"][1] == 2
    assert all("P" not in point for point in result["curve"])
    # with one client a round, most have trained in none of four
    stale, _ = found("local_only", run={"rounds": 4, "cohort": 1})
    assert predicted["clients", "accuracy"] > (
        5.0 + stale["P", "participating", "local", "clients", "accuracy"]
    )


@pytest.mark.parametrize("metric", ["accuracy", "log_score"])
def test_a_trial_is_scored_after_a_round_of_all_clients_by_what_is_asked_for(metric: Any) -> None:
    tuned = {"rounds": 2, **({"metric": metric} if metric == "log_score" else {})}
    own = study(evaluation={"round_of_all": True}, run={"cohort": 2}, tuning=tuned)
    entry, rows = own.methods[1], of_study(own, 0)
    fitting, score = tuning.split(own, rows, baseline(entry.name), 0)
    fit = cells.trained(own, entry, {}, fitting, 2, 0)
    rest = rows.train.split(0.8, seed=0)[1]
    expected = means(with_everyone(fit).predict(rest, draws=1, seed=0))
    assert score(fit) == expected["clients", metric]


def test_a_method_that_tunes_has_p_of_the_end_alone() -> None:
    own = study(methods=[{"name": "fedavg+FT"}], evaluation={"last_rounds": 2})
    result = cells.computed(own, own.methods[0], {}, 0)
    rounds = {(s["score"], s["rounds"]) for s in result["scores"]}
    assert rounds == {("G", 2), ("P", 1)} and "P" not in result["curve"][0]


def test_scores_weigh_rows_clients_and_classes_as_by_hand() -> None:
    own = study()
    rows = of_study(own, 0)
    fit = cells.trained(own, own.methods[0], {}, rows, 2, 0)
    keep = torch.ones(rows.test.num_rows, dtype=torch.bool)
    # four rows of one class: clients differ in size, and a client's classes are not equally many
    keep[:4] = False
    test = rows.test.where(keep)
    prediction = fit.predict(test, draws=1, seed=0)
    right = (prediction.mean.argmax(-1) == test.fields["y"]).double()
    by_client = []
    for own_right, y in zip(right.split(test.counts.tolist()),
                            test.fields["y"].split(test.counts.tolist()), strict=True):  # fmt: skip
        by_client.append(sum(float(own_right[y == c].mean()) for c in y.unique()) / len(y.unique()))
    scores = means(prediction)
    assert scores["rows", "accuracy"] == pytest.approx(100.0 * float(right.mean()))
    plain = [float(r.mean()) for r in right.split(test.counts.tolist())]
    assert scores["clients", "accuracy"] == pytest.approx(100.0 * sum(plain) / len(plain))
    expected = 100.0 * sum(by_client) / len(by_client)
    assert scores["clients", "balanced_accuracy"] == pytest.approx(expected)
    assert scores["clients", "accuracy"] != pytest.approx(expected)


def test_fine_tuning_is_scored_beside_and_training_does_not_depend_on_it() -> None:
    both = study(methods=[{"name": "fedavg", "fine_tune": True}], evaluation={"tune_steps": 3})
    beside = {s["score"]: s["value"] for s in local_accuracy(both)}
    plain = {s["score"]: s["value"] for s in local_accuracy(study(methods=[{"name": "fedavg"}]))}
    tuned = study(methods=[{"name": "fedavg+FT"}], evaluation={"tune_steps": 3})
    own = {s["score"]: s["value"] for s in local_accuracy(tuned)}
    assert beside == {**plain, "P+FT": own["P"]} and own["P"] > plain["P"]
    with pytest.raises(ValueError, match=r"compare with 'per_fedavg\+FT'"):
        study(methods=[{"name": "per_fedavg", "fine_tune": True}])


def local_accuracy(own: Study) -> list[dict[str, Any]]:
    """Return accuracies of participating clients on their own rows, by clients."""
    found = cells.computed(own, own.methods[0], {}, 0)["scores"]
    return [s for s in found if (s["metric"], s["weighting"]) == ("accuracy", "clients")]


def test_new_clients_are_scored_after_as_many_rounds_as_are_asked_for() -> None:
    evaluation = {"new_clients": 2, "join_rounds": [1, 4], "tune_steps": 2}
    own = study(methods=[{"name": "fedavg", "fine_tune": True}], evaluation=evaluation)
    new = {
        (s["score"], s["adapted"]): s["value"] for s in local_accuracy(own) if s["clients"] == "new"
    }
    assert set(new) == {("G", 0), ("P+FT", 1), ("P+FT", 4)}
    assert new["P+FT", 4] > new["G", 0]


def test_convolutions_are_below_the_dense_layers() -> None:
    own = study(net={"conv": [2, 3], "hidden": [5]})
    net = cells.net_of(own, 784, 10, 0)
    assert net(torch.zeros(4, 784)).shape == (4, 10)
    sizes = [tuple(p.shape) for p in net.parameters() if p.dim() > 1]
    assert sizes == [(2, 1, 3, 3), (3, 2, 3, 3), (5, 75), (10, 5)]
    by, _ = found("fedavg", net={"conv": [2]}, run={"rounds": 2})
    assert 0.0 <= by["P", "participating", "local", "clients", "accuracy"] <= 100.0
    with pytest.raises(ValueError, match="too many"):
        cells.net_of(study(net={"conv": [2, 2]}), 64, 10, 0)
    with pytest.raises(ValueError, match="rows have 65 features"):
        cells.net_of(own, 65, 10, 0)


def test_fedabmls_cnn_for_color_images_has_the_sizes_of_the_paper() -> None:
    own = study(net={"conv": [64, 64], "kernel": 5, "hidden": [120, 64]})
    net = cells.net_of(own, 3 * 32 * 32, 10, 0)
    sizes = [tuple(p.shape) for p in net.parameters() if p.dim() > 1]
    assert sizes == [(64, 3, 5, 5), (64, 64, 5, 5), (120, 1600), (64, 120), (10, 64)]
    image = torch.rand(1, 3, 32, 32)
    assert torch.equal(net[0](image.flatten(1)), image)


def test_real_labels_are_scored_by_the_share_of_their_variance() -> None:
    data = {"name": "radon", "scaling": "pixel"}
    given = study(run={"rounds": 10, "evaluations": 20, "lr": 0.05}).model_dump(
        exclude={"data", "evaluation"}
    )
    own = Study.model_validate({**given, "data": data, "evaluation": {"metric": "explained"}})
    rows = of_study(own, 0)
    y = rows.train.fields["y"].double()
    assert abs(float(y.mean())) < 1e-6 and float(y.std()) == pytest.approx(1.0, abs=1e-6)
    fit = cells.trained(own, own.methods[0], {}, rows, 10, 0)
    prediction = fit.predict(rows.test, draws=1, seed=0)
    scores = means(prediction)
    assert set(metric for _, metric in scores) == {"explained", "log_score"}
    error = (prediction.mean - rows.test.fields["y"]).double().square().mean()
    assert scores["rows", "explained"] == pytest.approx(100.0 * (1.0 - float(error)), abs=1e-4)
    assert scores["rows", "explained"] > 5.0  # floors and uranium explain some of it


def test_new_clients_and_everyones_rows_have_scores_of_their_own() -> None:
    by, _ = found("fedavg", evaluation={"new_clients": 2, "global_rows": 20})
    kinds = {key[:3] for key in by}
    assert kinds == {(s, *rest) for s in "PG" for rest in (
        ("participating", "local"), ("participating", "global"), ("new", "local"))}  # fmt: skip
    # one common model on the same rows, whoever is asked
    assert by["P", "participating", "global", "rows", "accuracy"] == pytest.approx(
        by["G", "participating", "global", "clients", "accuracy"]
    )


def test_a_method_that_needs_everyone_takes_fewer_rounds() -> None:
    entries: list[dict[str, Any]] = [
        {"name": "clustered_fl"},
        {"name": "fedavg"},
        {"name": "fedavg", "label": "two", "cohort": 2},
    ]
    own = study(methods=entries, run={"cohort": 3, "rounds": 8})
    plans = [cells.plan_of(own, entry, 6, 8) for entry in own.methods]
    assert plans == [(4, None), (8, 3), (8, 2)]


def test_all_clients_train_and_a_share_is_averaged_where_the_server_can() -> None:
    entries: list[dict[str, Any]] = [{"name": "fedavg"}, {"name": "fedamp", "averages_all": True}]
    own = study(methods=entries, run={"cohort": 3, "everyone_trains": True})
    rows = of_study(own, 0)
    for entry, name in zip(own.methods, ("fedavg averaging 0.5", "fedamp"), strict=True):
        fit = cells.trained(own, entry, {}, rows, 2, 0)
        assert fit.method.name == name and fit.history["clients"].tolist() == [6, 6]
    assert cells.plan_of(own, own.methods[0], 6, 8) == (8, None)


def test_a_watch_looks_at_the_rounds_that_are_asked_for() -> None:
    own = study(evaluation={"last_rounds": 1, "every": 2}, run={"rounds": 5})
    rows, seen = of_study(own, 0), []
    watch = ScoreWatch(own, own.methods[0], rows, 5, 0)

    def look(fit: Fit) -> None:
        before = len(watch.curve) + len(watch.last)
        watch.look(fit)
        if len(watch.curve) + len(watch.last) > before:
            seen.append(fit.progress.round)

    cells.trained(own, own.methods[0], {}, rows, 5, 0, look)
    assert seen == [2, 4, 5]
