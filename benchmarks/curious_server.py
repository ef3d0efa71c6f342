"""What an honest-but-curious server learns from a default fit over four hospitals.

Run `python -m benchmarks.curious_server [--write]`.

Two formulas of heart disease with default settings and default policies: a Gaussian response
(one round) and a Bernoulli response (four rounds). The server keeps the factor that Cleveland's node
sends, and works with it:

cells   the four counts of sex by exercise angina, as the largest error; a Gaussian factor has them
        among its sums of products, a Bernoulli one has their odds ratio in weighted patients
row     the last patient's covariates, if the server has all other rows of the hospital, as the
        largest error in standard deviations: a sum in the schema's answers less the other rows
AUC     of a guess whether a patient, whose whole record the server has, is among the rows of the
        hospital; mean and sd over 20 random halves of Cleveland; 0.5 is a coin

With --write the table goes to docs/threat_model.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import mannwhitneyu

import hierfl
from benchmarks.page_tables import Titled, put_tables
from hierfl.core.trees import named_leaves
from hierfl.nodes import Answer, over, station
from hierfl.nodes.envelope import read_answer, read_request
from hierfl.nodes.messages import from_bytes

PAGE = Path(__file__).parents[1] / "docs" / "threat_model.md"
COVARIATES = ("age", "sex", "exang", "trestbps")
RESPONSES = {"gaussian": "thalach", "bernoulli": "y"}
HOSPITAL = "cleveland"
HALVES = 20
LARGEST = 1 << 30  # bytes of a message
Numbers = NDArray[np.float64]


class Received(NamedTuple):
    """What the server has of a hospital.

    precision: (P, P), in units of its columns; of a Gaussian response X'X.
    shift: (P,); of a Gaussian response X'y.
    numbers: scalars in all answers of the hospital.
    rounds: of the fit.
    totals: sums of the formula's columns, in the answers about the schema.
    """

    precision: Numbers
    shift: Numbers
    numbers: int
    rounds: int
    totals: dict[str, float]


def patients() -> pd.DataFrame:
    """Return the patients without missing values in the columns of the two formulas."""
    frame = hierfl.datasets.heart_disease("nan").frame("hospital")
    return frame[["hospital", *COVARIATES, *RESPONSES.values()]].dropna().reset_index(drop=True)


def received(family: str, frame: pd.DataFrame) -> Received:
    """Fit over the hospitals of a frame, and return what the server has of Cleveland."""
    terms = " + ".join(COVARIATES)
    formula = hierfl.formula(
        f"{RESPONSES[family]} ~ {terms} + (1 | hospital)", family, clients="hospital"
    )
    home = Path(tempfile.mkdtemp())
    rows = {name: part.reset_index(drop=True) for name, part in frame.groupby("hospital")}
    stations = {name: station(formula, part, home / name) for name, part in rows.items()}
    trees: list[dict[str, torch.Tensor]] = []
    totals: dict[str, float] = {}

    def ask(requests: Mapping[str, bytes]) -> Iterator[Answer]:
        for name, request in requests.items():
            answer = stations[name].answer(request)
            kind, content = read_request(request)[0], read_answer(request, answer)
            if name == HOSPITAL and kind == "round":
                trees.append(named_leaves(from_bytes(content, most=LARGEST).tree))
            if name == HOSPITAL and kind == "schema":
                totals.update(_totals(json.loads(content)["answer"]))
            yield Answer(name, answer)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit = hierfl.nodes.fit(formula, over(ask, list(stations)), seed=0)
    factors = [tree for tree in trees if any("precision" in key for key in tree)]
    size = 1 + len(COVARIATES)
    precision = _leaf(factors[-1], "precision")[0, :size, :size]
    shift = _leaf(factors[-1], "shift")[0, :size]
    numbers = sum(value.numel() for tree in trees for value in tree.values())
    return Received(precision, shift, numbers, len(fit.history), totals)


def _totals(answer: Any) -> dict[str, float]:
    """Return the totals of the columns in the answer to 'design'."""
    columns = answer.get("columns", {}) if isinstance(answer, dict) else {}
    return {name: sums["total"] for name, sums in columns.items()}


def _leaf(tree: Mapping[str, torch.Tensor], name: str) -> Numbers:
    return next(value for key, value in tree.items() if name in key).double().numpy()


def design(frame: pd.DataFrame, units: Numbers | float = 1.0) -> Numbers:
    """Return intercept and covariates of a frame in units, (N, P)."""
    columns = np.column_stack([np.ones(len(frame)), frame[list(COVARIATES)].to_numpy(float)])
    return columns / units


def units_of(got: Received, frame: pd.DataFrame, family: str) -> Numbers:
    """Return the units of a factor's columns, (P,): powers of two, which the schema tells the server."""
    if family == "bernoulli":
        return np.ones(1 + len(COVARIATES))
    exact = (design(frame) ** 2).sum(0)
    return np.exp2(np.round(np.log2(exact / np.diag(got.precision)) / 2))


def cells(got: Received, frame: pd.DataFrame, family: str) -> float:
    """Return the largest error of the four counts of sex by exercise angina."""
    first, second = 1 + COVARIATES.index("sex"), 1 + COVARIATES.index("exang")
    units = units_of(got, frame, family)
    products = got.precision * np.outer(units, units)
    table = _table(products[0, 0], products[0, first], products[0, second], products[first, second])
    if family == "bernoulli":  # sums of weights: their odds ratio, with the schema's margins
        odds = table[0, 0] * table[1, 1] / (table[0, 1] * table[1, 0])
        margins = len(frame), got.totals["sex"], got.totals["exang"]
        low, high = max(0.0, margins[1] + margins[2] - margins[0]), min(margins[1:])

        def excess(both: float) -> float:
            t = _table(*margins, both)
            return float(t[0, 0] * t[1, 1] - odds * t[0, 1] * t[1, 0])

        table = _table(*margins, brentq(excess, low, high))
    exact = pd.crosstab(frame["sex"], frame["exang"]).to_numpy()
    return float(np.abs(table - exact).max())


def _table(count: float, a: float, b: float, both: float) -> Numbers:
    return np.array([[count - a - b + both, b - both], [a - both, both]])


def last_row(got: Received, frame: pd.DataFrame) -> float:
    """Return the error of the last patient's covariates, in sds, read by whoever has all other rows."""
    x = frame[list(COVARIATES)]
    read = pd.Series(got.totals)[list(COVARIATES)] - x.iloc[:-1].sum()
    return float(((read - x.iloc[-1]).abs() / x.std()).max())


def recognized(family: str, frame: pd.DataFrame) -> tuple[float, float]:
    """Return mean and sd of the AUC of guesses whether patients are among the hospital's rows."""
    hospital, others = frame[frame.hospital == HOSPITAL], frame[frame.hospital != HOSPITAL]
    scores = []
    for seed in range(HALVES):
        order = np.random.default_rng(seed).permutation(len(hospital))
        inside = hospital.iloc[order[: len(order) // 2]]
        outside = hospital.iloc[order[len(order) // 2 :]]
        got = received(family, pd.concat([inside, others], ignore_index=True))
        score = _score(got, family, inside, outside)
        split = len(inside)
        wins: Any = mannwhitneyu(score[:split], score[split:]).statistic
        scores.append(wins / split / len(outside))
    return float(np.mean(scores)), float(np.std(scores))


def _score(got: Received, family: str, inside: pd.DataFrame, outside: pd.DataFrame) -> Numbers:
    """Return the log density of each patient's response at the hospital's own estimate."""
    x = design(pd.concat([inside, outside]), units_of(got, inside, family))
    y = np.concatenate([part[RESPONSES[family]].to_numpy(float) for part in (inside, outside)])
    linear = x @ np.linalg.solve(got.precision, got.shift)
    if family == "bernoulli":
        return y * linear - np.logaddexp(0.0, linear)
    scale = float(np.polyfit(linear[: len(inside)], y[: len(inside)], 1)[0])
    return -((y - y.mean() - scale * (linear - linear.mean())) ** 2)


def line(family: str, frame: pd.DataFrame) -> dict[str, str]:
    """Return the line of a family."""
    hospital = frame[frame.hospital == HOSPITAL]
    got = received(family, frame)
    mean, sd = recognized(family, frame)
    return {
        "fit": f"{family}, {got.rounds} round{'s' * (got.rounds > 1)}",
        "values of rows": f"{len(hospital)} x {1 + len(COVARIATES)}",
        "numbers sent in rounds": f"{got.numbers:,}",
        "error of four cells, patients": f"{cells(got, hospital, family):.2g}",
        "error of the last row, sd": f"{last_row(got, hospital):.2g}",
        "AUC, patients recognized": f"{mean:.3f} ± {sd:.3f}",
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and write it to the page with --write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="into docs/threat_model.md")
    chosen = parser.parse_args(arguments)
    torch.set_default_dtype(torch.float64)
    frame = patients()
    table = pd.DataFrame([line(family, frame) for family in RESPONSES]).set_index("fit")
    titled = Titled("What the server computes about Cleveland", table)
    print(titled.as_markdown())
    if chosen.write:
        put_tables(PAGE, "curious server", titled)


if __name__ == "__main__":
    main()
