"""Tables and figures of results: what is shown, what is bold, and the published numbers."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from hierfl.comparisons import printed_table, score_table
from hierfl.comparisons.figures import figure
from hierfl.comparisons.result_files import COSTS, CURVES, RESULTS, STUDY, TUNED
from hierfl.comparisons.score_means import Score
from hierfl.comparisons.score_table import published
from hierfl.comparisons.study_file import Study
from tests.comparisons.small import study

P = {"score": "P", "clients": "participating", "adapted": 0, "test": "local", "rounds": 1}
P |= {"metric": "accuracy"}
VALUES: dict[str, list[float | None]] = {
    "best": [90.0, 92.0, 91.0],
    "similar": [89.9, 92.2, 90.8],
    "worse": [80.0, 82.2, 80.9],
}
BESIDE = {"paper": "PRIOR", "table": "T1", "dataset": "FMNIST", "model": "MCLR"}


def written(out: Path, of: Study, values: dict[str, list[float | None]]) -> Path:
    """Write a folder of results; None is a run that diverged."""
    rows: list[dict[str, Any]] = []
    costs = []
    for method, each in values.items():
        for seed, value in enumerate(each):
            costs.append({"method": method, "seed": seed, "diverged": value is None})
            for weighting, shift in (("clients", 0.0), ("rows", 1.0)):
                if value is not None:
                    rows.append({"method": method, "seed": seed, **P, "weighting": weighting,
                                 "value": value + shift})  # fmt: skip
    columns = ["method", "seed", *Score._fields]
    pd.DataFrame(rows).reindex(columns=columns).to_csv(out / RESULTS, index=False)
    pd.DataFrame(costs).to_csv(out / COSTS, index=False)
    tuned = ["method", "options", "score", "chosen"]
    pd.DataFrame(columns=tuned).to_csv(out / TUNED, index=False)
    pd.DataFrame(columns=["method", "seed", "round", "P", "G"]).to_csv(out / CURVES, index=False)
    (out / STUDY).write_text(json.dumps(of.model_dump(mode="json")))
    return out


def three(**changes: Any) -> Study:
    methods = [{"name": "fedavg", "label": name} for name in VALUES]
    return study(methods=methods, run={"seeds": [0, 1, 2]}, **changes)


FEWER = "(of 3 seeds 1 not run)"
Values = list[list[float | None]]
# values of best, similar and worse by seed, and what is shown
SHOWN: list[tuple[Values, list[str]]] = [
    # mean and sd of 90, 92 and 91; a paired test does not tell the second from it
    ([*VALUES.values()], ["**91.00 ± 1.00**", "**90.97 ± 1.16**", "81.03 ± 1.11"]),
    # a small difference of every seed is significant
    (
        [[90.0, 80.0, 70.0], [89.0, 79.01, 69.0], [6.0, 5.0, 4.0]],
        ["**80.00 ± 10.00**", "79.00 ± 10.00", "5.00 ± 1.00"],
    ),
    # with two seeds the best alone is bold
    (
        [[90.0, 92.0], [89.9, 92.2], [80.0, 82.2]],
        [f"91.00 ± 1.41 {FEWER}", f"**91.05 ± 1.63 {FEWER}**", f"81.10 ± 1.56 {FEWER}"],
    ),
    (
        [[90.0, 92.0], [None, 92.0], [80.0, 80.5, 81.0]],
        [f"91.00 ± 1.41 {FEWER}", "92.00 (of 3 seeds 1 diverged, 1 not run)", "**80.50 ± 0.50**"],
    ),
    # a finite score of weights that ran away counts as diverged
    (
        [[90.0, -1e34, 92.0], [-1e34, None, 1e7], []],
        ["91.00 ± 1.41 (of 3 seeds 1 diverged)", "diverged", ""],
    ),
]


@pytest.mark.parametrize(("values", "shown"), SHOWN)
def test_what_is_shown_and_bold(values: Values, shown: list[str], tmp_path: Path) -> None:
    results = dict(zip(VALUES, values, strict=True))
    table = score_table.table_of(written(tmp_path, three(), results))["P, %"]
    assert [table[name] for name in VALUES] == shown


def test_a_caption_says_which_rounds_are_averaged() -> None:
    names = [{"name": "fedavg"}, {"name": "clustered_fl"}]
    assert "the same share of the run" in printed_table.caption(study(names, run={"cohort": 3}))
    assert "the same share" not in printed_table.caption(study(names[:1], run={"cohort": 3}))
    assert "the same share" not in printed_table.caption(study(names))


def test_the_weighting_of_the_study_is_shown(tmp_path: Path) -> None:
    own = three(evaluation={"weighting": "rows"})
    shown = score_table.table_of(written(tmp_path, own, VALUES))["P, %"]
    assert shown["best"] == "**92.00 ± 1.00**"
    assert "every row counts the same" in printed_table.markdown(tmp_path)


def test_published_numbers_stand_beside_ours(tmp_path: Path) -> None:
    entry = {"name": "fedavg", "label": "best", "published": {"P": ["pFedMe", "P"]}}
    own = study(methods=[entry, {"name": "ditto", "label": "similar"}], published=BESIDE,
                run={"seeds": [0, 1, 2]})  # fmt: skip
    known = published(own, own.methods[0], "P")
    assert known is not None and 95.0 < known < 100.0
    shown = score_table.table_of(written(tmp_path, own, VALUES))
    assert shown.loc["best", "published P, %"] == f"{known:.2f}"
    assert shown.loc["best", "difference of P"] == f"{91.0 - known:+.2f}"
    assert shown.loc["similar", "published P, %"] == ""
    assert f"best P {91.0 - known:+.1f}" in printed_table.markdown(tmp_path)


def test_a_published_number_that_is_not_there_is_refused() -> None:
    own = study(
        methods=[{"name": "fedavg", "published": {"P": ["pFedMee", "P"]}}], published=BESIDE
    )
    with pytest.raises(ValueError, match=r"no row of .*T1.*FMNIST.*, pFedMee, P"):
        published(own, own.methods[0], "P")


@pytest.mark.parametrize(
    ("rows", "beside", "numbers"),
    [
        # of several tables the first that has the number: T2 has 97.6 too, and 98.3 alone
        ([("pFedMe", "P"), ("pFedBreD-lg", "P")], {"table": ["T1", "T2"]}, [97.60, 98.3]),
        # an entry's own metric, whatever the column's
        ([("pFedBreD-mh", "G", f"acc_S{s}") for s in (10, 20)], {"table": "T3"}, [80.0, 82.6]),
        # a dash in the paper
        ([("pFedBayes", "P")], {"dataset": "FEMNIST", "model": "DNN"}, [None]),
    ],
)
def test_published_numbers_are_those_of_the_row_that_an_entry_names(
    rows: list[tuple[str, ...]], beside: dict[str, Any], numbers: list[float | None]
) -> None:
    entries: list[dict[str, Any]] = [
        {"name": "fedavg", "label": str(k), "published": {row[1]: [*row]}}
        for k, row in enumerate(rows)
    ]
    own = study(methods=entries, published={**BESIDE, **beside})
    for metric in (None, "acc"):
        found = [
            published(own, entry, row[1], metric)
            for entry, row in zip(own.methods, rows, strict=True)
        ]
        assert found == numbers


def test_published_numbers_of_new_clients_stand_beside_the_last_of_their_rounds() -> None:
    of = {"paper": "FedVI", "table": "T1", "dataset": "FEMNIST", "model": ["2-conv CNN", "MobileNet-V2"],
          "metric": "acc_participating", "new_metric": "acc_nonparticipating"}  # fmt: skip
    entries = [
        {"name": name, "published": {"P": [of, "P"]}}
        for name, of in (("fedvi", "FedVI"), ("apfl", "APFL"))
    ]
    own = study(methods=entries, published=of, evaluation={"new_clients": 1, "join_rounds": [1, 3]})
    new = [score_table.ScoreColumn("P", "new", "local", "accuracy", rounds) for rounds in (1, 3)]
    assert score_table.beside(own, new[0]) is None
    metric = score_table.beside(own, new[1])
    assert [published(own, entry, "P", metric) for entry in own.methods] == [90.6, 84.2]
    assert [published(own, entry, "P") for entry in own.methods] == [90.3, 84.1]


def test_new_clients_have_a_column_for_each_number_of_rounds() -> None:
    keys = [
        ("P", "participating", 0),
        ("P", "participating", 1),
        ("P", "new", 1),
        ("P", "new", 5),
        ("G", "new", 0),
    ]
    rows = [{**P, "score": s, "clients": c, "adapted": a, "metric": m}
            for s, c, a in keys for m in ("accuracy", "balanced_accuracy")]  # fmt: skip
    names = [
        column.heading for column in score_table.columns(pd.DataFrame(rows), "balanced_accuracy")
    ]
    assert names == ["balanced P, %", "balanced P of new clients after 1 round, %",
                     "balanced P of new clients after 5 rounds, %", "balanced G of new clients, %"]  # fmt: skip


def test_latex_and_markdown_have_the_same_cells(tmp_path: Path) -> None:
    written(tmp_path, three(title="50% of a & b"), VALUES)
    text = printed_table.latex(tmp_path)
    assert r"50\% of a \& b" in text and r"best & \textbf{91.00 $\pm$ 1.00} \\" in text
    assert "| best | **91.00 ± 1.00** |" in printed_table.markdown(tmp_path)


def test_the_figure_has_points_of_methods_and_published_diamonds(tmp_path: Path) -> None:
    entry = {"name": "fedavg", "label": "best", "published": {"P": ["pFedMe", "P"]}}
    own = study(methods=[entry, {"name": "ditto", "label": "similar"}], published=BESIDE)
    written(tmp_path, own, VALUES)
    (axes,) = figure(tmp_path).axes
    drawn = axes.containers[0].lines[0].get_xdata()  # type: ignore[attr-defined]
    assert list(drawn) == pytest.approx([91.0, 90.9666667])
    (diamonds,) = [c for c in axes.collections if c.get_label() == "P, published"]
    assert diamonds.get_offsets().data.shape == (1, 2)  # type: ignore[union-attr]
