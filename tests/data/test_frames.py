"""`from_frame`: strings and categories become codes whose levels are kept; client fields are constant."""

import re
from collections.abc import Callable
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch

import hierfl
from hierfl import ClientBatch, ClientData
from hierfl.data.consistency import OF_A_BATCH
from tests.programs import fit, three

read = ClientData.from_frame


def table() -> pd.DataFrame:
    """Three rows of v and two of u, mixed."""
    return pd.DataFrame(
        {
            "who": ["v", "u", "v", "u", "v"],
            "size": pd.Categorical(["s", "l", "m", "s", "l"], categories=["s", "m", "l", "xl"]),
            "sex": ["f", "m", "m", "f", "f"],
            "beds": [5, 9, 5, 9, 5],
            "kind": ["town", "city", "town", "city", "town"],
            "grade": pd.Categorical([10, 20, 10, 10, 20]),
            "y": [1.0, 2.0, 3.0, 4.0, 5.0],
        },
        index=[3, 3, 1, 0, 3],
    )


def test_strings_and_categories_are_coded_and_their_levels_kept() -> None:
    data = read(table(), "who", size="size", sex="sex", grade="grade", x=["y", "sex"])
    assert data.names == ("u", "v")
    assert data.levels == {"size": ("s", "m", "l", "xl"), "sex": ("f", "m"), "x[sex]": ("f", "m")}
    assert data.fields["size"].tolist() == [2, 0, 0, 1, 2]
    assert data.fields["sex"].tolist() == [1, 0, 0, 1, 0]
    assert data.fields["grade"].tolist() == [20, 10, 10, 10, 20]
    assert data.fields["x"].tolist() == [[2, 1], [4, 0], [1, 0], [3, 1], [5, 0]]
    assert data.features == {"x": ("y", "sex")}


def test_rows_come_back_as_the_frame_that_they_were_read_from() -> None:
    frame = pd.DataFrame({"who": ["v", "u", "v"], "smokes": ["no", "yes", "no"], "age": [9, 5, 7]})
    data = ClientData.from_frame(
        frame.assign(beds=[2, 8, 2]), "who", client_fields={"beds": "beds"}, x=["age"], y="smokes"
    )
    expected = frame.assign(beds=[2, 8, 2]).iloc[[1, 0, 2]].reset_index(drop=True)
    assert data.frame("who").rename(columns={"y": "smokes"})[expected.columns].equals(expected)


def test_without_fields_every_column_is_one() -> None:
    data = read(table(), "who", client_fields={"own": ["beds", "kind"]})
    assert list(data.fields) == ["size", "sex", "grade", "y"]
    assert data.levels["sex"] == ("f", "m") and data.client_fields["own"].shape == (2, 2)


def test_no_field_is_hidden_by_a_batch() -> None:
    parts = {name for name in dir(ClientBatch) if not name.startswith("_")}
    assert parts | {part.name for part in dataclass_fields(ClientBatch)} == OF_A_BATCH
    with pytest.raises(ValueError, match=r"field 'counts' .* batch.counts: rename it"):
        read(table().assign(counts=1), "who")


def by_age(batch: ClientBatch) -> None:
    mu, slope = (pyro.sample(name, dist.Normal(0.0, 2.0)) for name in ("mu", "slope"))
    with batch.clients():
        own = pyro.sample("own", dist.Normal(mu, 1.0))
        with batch.data():
            loc = own + slope * batch.age + 0.5 * batch.sex
            pyro.sample("y", dist.Normal(loc, 1.0), obs=batch.y)


def test_a_program_reads_a_frame_as_a_formula_does(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    columns = {"h": rng.choice([*"cab"], 30), "age": rng.normal(size=30), "y": rng.normal(size=30)}
    frame = pd.DataFrame(columns, index=rng.permutation(30) + 100)
    frame["sex"] = rng.choice(["f", "m"], 30)
    fitted = hierfl.fit(by_age, frame, clients="h", rounds=1)
    data = read(frame, "h", y="y", age="age", sex="sex")
    means = hierfl.fit(by_age, data, rounds=1).predict(data, draws=9).mean
    scores = [
        hierfl.fit(
            hierfl.methods.fedsvi(by_age),
            rows,
            clients=clients,
            validation=rows,
            rounds=1,
            eval_every=1,
        ).history["validation_log_score"]
        for rows, clients in ((frame, "h"), (data, None))
    ]
    assert scores[0].equals(scores[1])
    order = frame.h.argsort(kind="stable").to_numpy().copy()
    fitted.save(tmp_path / "fit", with_data=True)
    for again in (fitted, hierfl.load(tmp_path / "fit", method=fitted.method)):
        predicted = again.predict(frame, draws=9)
        assert torch.equal(predicted.mean[order], means)
        assert predicted.frame().index.tolist() == frame.index.tolist()
        men = frame[frame.sex == "m"].drop(columns="y")  # coded as those that were fitted
        alone = again.predict(men, draws=9).mean
        assert torch.allclose(alone, predicted.mean[torch.tensor((frame.sex == "m").to_numpy())])
        assert again.personalize(frame.assign(h="new")).clients == ("new",)


def test_a_frame_needs_its_column_of_clients_once() -> None:
    frame = pd.DataFrame({"h": ["a", "b"], "age": [1.0, 2.0], "sex": [0, 1], "y": [1.0, 2.0]})
    formula = hierfl.formula("y ~ age + (1 | h)", clients="h")
    for model, data, clients, message in (
        (by_age, frame, None, r"or name the column, hierfl.fit\(..., clients='client'\)"),
        (by_age, read(frame, "h"), "h", "data is a ClientData: leave clients= out"),
        (formula, frame, "sex", "clients is 'sex', and 'h' of the formula"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            hierfl.fit(model, data, clients=clients, rounds=1)


def test_client_fields_have_one_value_per_client() -> None:
    own = {"beds": "beds", "kind": "kind", "both": ["beds", "kind"]}
    data = read(table(), "who", y="y", client_fields=own)
    assert {k: v.tolist() for k, v in data.client_fields.items()} == {
        "beds": [9, 5],
        "kind": [0, 1],
        "both": [[9, 0], [5, 1]],
    }
    assert data.levels["kind"] == ("city", "town")


def test_new_data_are_coded_by_the_levels_of_old() -> None:
    train = read(table(), "who", sex="sex")
    new = table().assign(sex="m")
    assert read(new, "who", sex="sex").fields["sex"].tolist() == [0] * 5
    coded = read(new, "who", levels=train.levels, sex="sex")
    assert coded.fields["sex"].tolist() == [1] * 5
    assert coded.levels == train.levels


def test_levels_stay_with_their_fields() -> None:
    data = read(table(), "who", y="y", sex="sex", x=["y", "sex"])
    for part in (data.select(["v"]), data.where(data.fields["y"] > 1), *data.split(0.5, seed=0)):
        assert part.levels == data.levels
    assert data.without("x").levels == {"sex": ("f", "m")}
    assert data.with_fields(sex=torch.ones(5)).levels == {"x[sex]": ("f", "m")}


F = table()
CASES: dict[str, tuple[Callable[[], object], str]] = {
    "unknown level": (
        lambda: read(F.assign(sex=[*"fmmf", "x"]), "who", sex="sex", levels={"sex": ("f", "m")}),
        "column 'sex' has the level 'x' in row 4, which is not one of f, m: leave its rows out"
    ),
    "levels for numbers": (lambda: read(F, "who", y="y", levels={"y": ("f",)}), "column 'y' holds no strings"),
    "missing string": (
        lambda: read(F.assign(sex=[None, *"fmmf"]), "who", sex="sex"),
        "column 'sex' is missing 1 of 5 values, the first in row 0: drop these rows, or give them a level of their own"
    ),
    "missing category": (
        lambda: read(F.assign(size=F["size"].cat.remove_categories("m")), "who", s="size"),
        "column 'size' is missing 1 of 5 values"
    ),
    "case alone": (
        lambda: read(F.assign(sex=[*"fmmf", "M"]), "who", sex="sex"),
        "levels 'M' and 'm' of column 'sex' differ only in case"
    ),
    "numbers as text": (
        lambda: read(F.assign(y=["1", "2", "10", "9", "?"]), "who", y="y"),
        "column 'y' holds the number '1' as a string: convert it with pandas.to_numeric"
    ),
    "text and numbers": (
        lambda: read(F.assign(sex=["f", 1, 2, "m", 3]), "who", s="sex"), "column 'sex' holds strings and 1"
    ),
    "levels that look alike": (
        lambda: read(F.assign(sex=["f", "f ", "m", "m", "m"]), "who", s="sex"),
        "levels 'f' and 'f ' of column 'sex' differ only"
    ),
    "codes as amounts": (
        lambda: read(F, "who", x=["y", "size"]),
        "column 'size' of field 'x' has 4 levels, and their codes are not quantities: read it"
    ),
    "not constant": (
        lambda: read(F, "who", sex="sex", client_fields={"own": "y"}),
        "client field 'own' has the values 2.0 and 4.0 in rows of client 'u': it must be constant"
    ),
    "field and client field": (
        lambda: read(F, "who", y="y", client_fields={"y": "beds"}), "'y' is both a field and a client field: rename"
    ),
    "two columns of a name": (
        lambda: read(pd.concat([F, F["y"]], axis=1), "who", y="y"), "the frame has 2 columns 'y': rename all but one"
    ),
    "no frame": (lambda: read({"who": [1]}, "who", y="y"), "frame is a dict: give a pandas frame"),
    "swapped": (lambda: read("who", F, y="y"), "frame is a str: give a pandas frame"),
    "no columns": (lambda: read(F, "who", x=[]), "field 'x' is given an empty list of columns: name at least one"),
    "missing client": (lambda: read(F.assign(who=[*"uvuv", None]), "who", y="y"), "client_id is nan in row 4"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_refused_by_name(case: str) -> None:
    make, message = CASES[case]
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        make()


def test_a_constant_that_is_missing_is_constant() -> None:
    frame = table().assign(beds=[np.nan, 9.0, np.nan, 9.0, np.nan])
    beds = read(frame, "who", y="y", client_fields={"beds": "beds"}).client_fields["beds"]
    assert beds[0] == 9.0 and bool(beds[1].isnan())


# ------------------------------------------------------------------ rows to predict
def coded(words: list[str], **options: Any) -> ClientData:
    frame = pd.DataFrame({"who": ["a", "a", "b"], "x": words, "y": [1.0, 2.0, 3.0]})
    return read(frame, "who", x="x", y="y", **options)


def test_rows_of_other_codes_are_not_predicted(tmp_path: Path) -> None:
    train = coded(["no", "yes", "no"])
    fitted = fit(hierfl.methods.fedsvi(hierfl.models.regression()), train, rounds=1)
    other = coded(["yes", "yes", "yes"])
    with pytest.raises(ValueError, match="the codes of 'x' stand for yes, but for no, yes when"):
        fitted.predict(other)
    with pytest.raises(ValueError, match="the codes of 'x' stand for yes"):
        fitted.personalize(other)
    assert fitted.predict(coded(["yes"] * 3, levels=train.levels)).mean.shape == (3,)
    fitted.save(tmp_path / "fit", with_data=True)
    assert hierfl.load(tmp_path / "fit").federation.data.levels == train.levels


def test_data_without_levels_have_none() -> None:
    assert three().levels == {}
