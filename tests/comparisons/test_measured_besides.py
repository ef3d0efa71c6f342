"""What a study measures besides P and G: foreign images, curves, classes, lines; figures."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from matplotlib.image import imread
from typer.testing import CliRunner

from hierfl import ClientData, datasets
from hierfl.cli import app
from hierfl.comparisons import cells, federations, figures
from hierfl.comparisons.compare import compare
from hierfl.comparisons.federations import of_study
from hierfl.comparisons.score_means import by_client, means
from hierfl.comparisons.score_table import ScoreColumn, best, table_of
from hierfl.comparisons.study_file import Study
from hierfl.diagnostics import client_gradients, coherence
from hierfl.studies.drawn_clients import exact_posterior, least_squares, probes_of, served_weights
from tests.comparisons.small import study

Found = dict[str, Any]


def computed(name: str, **changes: Any) -> Found:
    own = study(methods=[{"name": name}], **changes)
    return cells.computed(own, own.methods[0], {}, 0)


# ----------------------------------------------------------------------------------- foreign images
@pytest.fixture
def strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put noise of 64 pixels in the place of an image set."""

    def noise(name: str, test: ClientData, data: Any, seed: int) -> ClientData:
        generator = torch.Generator().manual_seed(seed)
        x = 10.0 * torch.rand(test.num_rows, 64, generator=generator)
        return replace(test, fields={"x": x})

    monkeypatch.setattr(federations, "foreign_rows", noise)


def test_foreign_images_are_detected_by_entropy(strangers: None) -> None:
    found = computed("local_only", evaluation={"foreign": ["notmnist"]}, run={"rounds": 10})
    by = {s["weighting"]: s["value"] for s in found["scores"] if s["metric"] == "auroc"}
    assert set(by) == {"rows", "clients"} and all(0.0 <= v <= 1.0 for v in by.values())
    kept = pd.DataFrame(found["entropies"])
    higher, lower = (kept[kept["rows"] == of]["entropy"].to_numpy() for of in ("notmnist", "own"))
    assert len(higher) == len(lower) == 6 * 12  # every client of the small study
    more = (higher[:, None] > lower).mean() + 0.5 * (higher[:, None] == lower).mean()
    assert by["rows"] == pytest.approx(more, abs=1e-3)  # entropies are kept to four digits


def test_foreign_images_of_another_size_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Images:
        x = torch.rand(5, 1, 28, 28)

    monkeypatch.setattr(datasets, "notmnist", Images)
    with pytest.raises(ValueError, match="'notmnist' have 784 pixels, and rows 64"):
        of_study(study(evaluation={"foreign": ["notmnist"]}), 0)


def test_of_a_method_that_tunes_foreign_images_meet_the_tuned_model(strangers: None) -> None:
    asked = {"foreign": ["notmnist"]}
    plain, tuned = (computed(name, evaluation=asked) for name in ("fedavg", "fedavg+FT"))
    first, second = (
        next(s["value"] for s in found["scores"] if s["metric"] == "auroc")
        for found in (plain, tuned)
    )
    assert first != second


# ------------------------------------------------------------------------------------------- curves
def test_new_clients_and_coherence_stand_beside_the_curve() -> None:
    asked = {"every": 1, "new_clients": 2, "along": ["new_clients", "coherence", "clients"]}
    found = computed("ditto", evaluation=asked)
    last = found["curve"][-1]
    new = [s for s in found["scores"] if s["clients"] == "new" and s["score"] == "P"]
    accuracy = {(s["weighting"], s["metric"]): s["value"] for s in new}
    assert last["P, new"] == accuracy["clients", "accuracy"]
    own = study(methods=[{"name": "ditto"}], evaluation=asked)
    rows = of_study(own, 0)
    fit = cells.trained(own, own.methods[0], {}, rows, 3, 0)
    coherent = coherence(client_gradients(fit)).minus_log_det
    assert last["coherence"] == pytest.approx(coherent, rel=1e-3)
    clients = pd.DataFrame(found["clients"])
    assert len(clients) == 3 * 4 * 2  # rounds, clients, and P and G
    at_end = clients[(clients["round"] == 3) & (clients["score"] == "P")]
    assert at_end["value"].mean() == pytest.approx(last["P"])
    assert set(at_end["client"]) == set(rows.train.names)


def test_losses_by_class_are_of_the_first_client() -> None:
    found = computed("local_only", evaluation={"by_class": True, "global_rows": 60})
    parts = pd.DataFrame(found["classes"])
    assert set(parts["test"]) == {"local", "global"}
    first = of_study(study(), 0).train.select([0]).fields["y"].unique().tolist()
    shown = parts[parts["test"] == "global"].set_index("class")["deviation"]
    theirs = [c for c in shown.index if c not in first]
    # it knows its own classes better than the others do, and theirs worse
    assert shown[first].mean() < 0.0 < shown[theirs].mean()
    own_rows = parts[parts["test"] == "local"].set_index("class")["deviation"]
    assert all(own_rows[c] == 0.0 for c in own_rows.index if c not in first)


# -------------------------------------------------------------------------------------------- lines
LINES: Found = {
    "title": "lines",
    "data": {"name": "fedabml_lines", "scaling": "none"},
    "net": {"bias": False},
    "run": {"rounds": 60, "evaluations": 10, "batch": 50, "lr": 0.1, "compiled": False},
    "evaluation": {"metric": "explained", "every": 1},
}


def lines(methods: Found, **changes: Any) -> Study:
    return Study.model_validate({**LINES, **changes, "methods": methods})


@pytest.mark.slow
def test_fedavg_ends_at_the_fixed_point_of_its_ten_steps() -> None:
    """In closed form, oracle O4: its distance from least squares on all rows is its bias."""
    own = lines({"fedavg": {}})
    for seed in range(1):
        rows, lr, pairs = of_study(own, seed).train, 0.1, []
        for name in rows.names:
            one = rows.select([name])
            x, y = one.fields["x"].double(), one.fields["y"].double()
            h = x.T @ x / len(y)
            left = torch.linalg.matrix_power(torch.eye(2, dtype=h.dtype) - lr * h, 10)
            weight = len(y) * (torch.eye(2) - left)
            pairs.append((weight, torch.linalg.solve(x.T @ x, x.T @ y)))
        fixed = torch.linalg.solve(sum(w for w, _ in pairs), sum(w @ b for w, b in pairs))
        bias = float((fixed - least_squares(rows, bias=False)).norm())
        found = cells.computed(own, own.methods[0], {}, seed)
        away = [s["value"] for s in found["scores"] if s["metric"] == "distance"]
        assert away == [pytest.approx(bias, abs=2e-3)] * 2 and bias > 0.003
        curve = [point["distance"] for point in found["curve"]]
        assert curve[0] > 5.0 * curve[-1] and curve[-1] == pytest.approx(away[0])


@pytest.mark.slow
def test_widths_are_beside_those_of_the_exact_posterior(tmp_path: Path) -> None:
    rows = of_study(lines({"fedavg": {}}), 0).train
    x, y = rows.fields["x"].double(), rows.fields["y"].double()
    mean, covariance = exact_posterior(rows, bias=False)
    torch.testing.assert_close(covariance @ x.T @ x, torch.eye(2, dtype=x.dtype))
    torch.testing.assert_close(x.T @ x @ mean, x.T @ y)
    own = lines({"fedavg": {}, "pfedbayes": {}}, run={**LINES["run"], "rounds": 5, "seeds": [0]})
    assert compare(own, tmp_path, processes=1, say=print) == []
    widths = table_of(tmp_path)["sd of P, of the exact one"]
    drawn = pd.read_csv(tmp_path / "lines.csv").query("score == 'P' and method == 'pfedbayes'")
    sds = drawn.groupby("client")[["w0", "w1"]].std().to_numpy()
    expected = (sds / covariance.diagonal().sqrt().numpy()).mean()
    assert widths["fedavg"] == ""
    assert float(widths["pfedbayes"].strip("*")) == pytest.approx(expected, abs=2e-3)
    assert (tmp_path / "lines.csv").is_file() and figures.draw(tmp_path)


@pytest.mark.parametrize(("widths", "closest"), [([0.5, 1.1], "b"), ([1.2, 3.0], "a")])
def test_a_width_near_1_is_the_best(widths: list[float], closest: str) -> None:
    values = pd.DataFrame({0: widths}, index=["a", "b"])
    assert best(ScoreColumn("P", "participating", "local", "width").merit(values)) == {closest}


def test_weights_are_read_off_predictions() -> None:
    own = lines({"fedavg": {}}, net={"bias": True})
    rows = of_study(own, 0)
    fit = cells.trained(own, own.methods[0], {}, rows, 3, 0)
    read = served_weights(fit.predict(probes_of(rows.train)), bias=True)
    message = fit.message
    for line in read:
        assert torch.allclose(line[:2].float(), message["theta.0.weight"].flatten(), atol=1e-5)
        assert float(line[2]) == pytest.approx(float(message["theta.0.bias"]), abs=1e-5)


def test_labels_about_lines_are_in_their_own_units_and_explained_by_their_variance() -> None:
    own = lines({"local_only": {}})
    rows = of_study(own, 0)
    y = rows.train.fields["y"].double()
    assert rows.variance == pytest.approx(float(y.var(correction=0))) and rows.variance > 2.0
    fit = cells.trained(own, own.methods[0], {}, rows, 20, 0)
    predicted = fit.predict(rows.test)
    each = by_client(predicted, rows.variance)["explained"]
    errors = (predicted.mean.double() - rows.test.fields["y"].double()).square()
    expected = [100.0 * (1.0 - float(e.mean()) / rows.variance) for e in errors.split([200, 200])]
    assert each.tolist() == pytest.approx(expected, rel=1e-4)
    assert means(predicted, rows.variance)["clients", "explained"] == pytest.approx(each.mean())


def test_the_smallest_distance_is_the_best(tmp_path: Path) -> None:
    own = lines({"fedavg": {}, "ditto": {}}, run={**LINES["run"], "rounds": 5, "seeds": [0]})
    assert compare(own, tmp_path, processes=1, say=print) == []
    shown = table_of(tmp_path)["distance of G from least squares"]
    bold = [cell for cell in shown if cell.startswith("**")]
    assert len(bold) == 1
    assert float(bold[0].strip("*")) == min(float(cell.strip("*")) for cell in shown)


# ----------------------------------------------------------------------------------- data, builders
def test_the_first_clients_of_a_data_set_are_taken() -> None:
    data = {"name": "heart_disease", "scaling": "pixel", "clients": 2}
    own = Study.model_validate({"title": "two", "data": data, "methods": {"fedavg": {}}})
    assert of_study(own, 0).train.names == ("cleveland", "hungarian")
    with pytest.raises(ValueError, match="clients is 9, and there are 4"):
        of_study(own.model_copy(update={"data": own.data.model_copy(update={"clients": 9})}), 0)
    with pytest.raises(ValueError, match="the partition says how many"):
        study(data={"clients": 2})


@pytest.mark.slow
def test_fedmaps_priors_are_chosen_by_name() -> None:
    def weights(**settings: Any) -> torch.Tensor:
        own = study(methods=[{"name": "fedmap", "settings": settings}], net={"hidden": [5]})
        rows = of_study(own, 0)
        fit = cells.trained(own, own.methods[0], {}, rows, 2, 0)
        found: torch.Tensor = fit.progress.table.params["w.0.weight.at"]
        return found.flatten(1)

    plain, first, again = weights(), weights(first_variance=1e-4), weights(first_variance=15.0)
    assert float((first - first.mean(0)).norm()) < 0.2 * float((plain - plain.mean(0)).norm())
    assert torch.equal(plain, again)
    convex = weights(prior="convex", hidden=[4, 3])
    assert torch.isfinite(convex).all() and not torch.equal(convex, plain)
    with pytest.raises(ValueError, match="must be one of 'isotropic', 'variance', 'convex'"):
        weights(prior="flat")
    with pytest.raises(ValueError, match="'convex' has no exact minimizer"):
        weights(prior="convex", server="best")


def test_of_fedvi_without_own_heads_all_clients_are_served_the_same() -> None:
    def spread(*, own_heads: bool) -> float:
        settings = {"own_heads": own_heads, "kl_weight": 0.0}
        own = study(methods=[{"name": "fedvi", "settings": settings}], net={"hidden": [5]})
        rows = of_study(own, 0)
        fit = cells.trained(own, own.methods[0], {}, rows, 3, 0)
        probes = probes_of(rows.train)
        served = fit.predict(probes, draws=20).mean.unflatten(0, (6, -1))
        return float((served - served[:1]).abs().max())

    assert spread(own_heads=False) < 1e-5 < spread(own_heads=True)


# ------------------------------------------------------------------------------------------ figures
@pytest.mark.slow
def test_all_that_is_measured_is_drawn(
    strangers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluation = {
        **{"every": 1, "foreign": ["notmnist", "mnist"], "by_class": True, "global_rows": 40},
        **{"along": ["clients", "coherence"]},
    }
    own = study(methods=[{"name": "ditto"}], evaluation=evaluation, run={"seeds": [0]})
    found = cells.computed(own, own.methods[0], {}, 0)
    monkeypatch.setattr(cells, "computed", lambda *_: found)
    file, key = cells.cell_file(tmp_path, own, own.methods[0], 0)
    cells.keep(file, key, found)
    assert compare(own, tmp_path, processes=1, say=print) == []
    done = CliRunner().invoke(app, ["plot", str(tmp_path)])
    assert done.exit_code == 0, done.output
    names = {"figure.png"} | {f"figure-{n}.png" for n in ("clients", "classes", "entropies")}
    assert {path.name for path in tmp_path.glob("*.png")} == names
    for name in names:
        assert imread(tmp_path / name)[..., :3].std() > 0.05, "a figure with something in it"


def test_an_auroc_below_one_is_not_drawn_as_one() -> None:
    own = study(methods=[{"name": "ditto"}])
    entropies = pd.DataFrame(
        {
            "method": "ditto",
            "client": ["a", "a", "b", "b"] * 2,
            "rows": ["own"] * 4 + ["shuffled_pixels"] * 4,
            "entropy": [0.1, 0.2, 0.1, 0.3, 1.0, 2.0, 1.5, 1.2],
        }
    )
    score = {"method": "ditto", "metric": "auroc", "weighting": own.evaluation.weighting}
    scores = pd.DataFrame([{**score, "test": "shuffled_pixels", "value": 0.9961}])
    (panel,) = figures.entropies(own, entropies, scores).axes
    assert panel.get_title("left") == "ditto, shuffled pixels: AUROC 0.996"
    legend = panel.get_legend()
    assert legend is not None and legend.get_title().get_text() == "thin: one client"
