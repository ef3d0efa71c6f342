"""Study files: a comparison of methods on one federation, declared in TOML.

    title = "PRIOR, Table 1: Fashion-MNIST, logistic regression"
    published = { paper = "PRIOR", table = "T1", dataset = "FMNIST", model = "MCLR" }

    [data]
    name = "fashion_mnist"
    partition = { kind = "power_law", clients = 100, classes = 2 }

    [run]
    rounds = 200
    cohort = 20

    [[methods]]
    name = "pfedme"

Every table has a class here, whose docstring says what its keys mean. `[quick]` holds what `--quick` changes, table by
table. Unknown keys and values are errors that name the key and the nearest known one.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hierfl import methods as published_methods
from hierfl.studies.baseline_methods import BASELINES, baseline
from hierfl.studies.tuning import RATES

Source = Literal["digits", "mnist", "fashion_mnist", "emnist", "femnist", "heart_disease", "wisdm"]
MOST_POINTS = 6  # of a method's grid
SAME_METHOD = {"fedprox": "fedavg", "fedper": "fedrep"}  # built from a method of another name


class Table(BaseModel):
    """A table of a study file."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Partition(Table):
    """How rows are split among clients.

    Args:
        kind: "power_law" (PRIOR), "equal_classes" and "shared_classes" (FedABML), "dirichlet" (label skew);
            `hierfl.studies.image_splits` and `hierfl.data.partition` have the rules.
        clients: how many.
        classes: of a client; unused by "dirichlet".
        train: training rows of a client in each class; for "equal_classes".
        test: test rows of a client in each class; for "equal_classes".
        share: of all rows, in (0, 1]; for "shared_classes".
        concentration: of the Dirichlet distribution; smaller is more skewed.
    """

    kind: Literal["power_law", "equal_classes", "shared_classes", "dirichlet"]
    clients: int = Field(gt=0)
    classes: int = Field(default=2, gt=0)
    train: int = Field(default=150, gt=0)
    test: int = Field(default=25, gt=0)
    share: float = Field(default=1.0, gt=0.0, le=1.0)
    concentration: float = Field(default=0.5, gt=0.0)


class Data(Table):
    """The rows.

    Args:
        name: of the data set. Those of `NATURAL` have clients of their own, and no partition.
        partition: of all others.
        scaling: "pixel": each column by its mean and sd over the training rows of participating clients; "one": all
            columns by one mean and sd; "none".
        test_share: share of each client's rows that are test rows, where neither the partition nor the data say so.
    """

    name: Source
    partition: Partition | None = None
    scaling: Literal["pixel", "one", "none"] = "one"
    test_share: float = Field(default=0.25, gt=0.0, lt=1.0)

    @model_validator(mode="after")
    def _complete(self) -> Data:
        if (self.partition is None) != (self.name in NATURAL):
            needs = (
                "has clients of its own: leave" if self.partition else "needs a partition: put in"
            )
            raise ValueError(f"'{self.name}' {needs} 'partition'")
        return self


NATURAL = ("femnist", "heart_disease", "wisdm")


class Net(Table):
    """The network of every method.

    Args:
        hidden: units of each hidden layer; none: multinomial logistic regression.
        activation: between layers; "leaky_relu" has the slope 0.1.
    """

    hidden: tuple[int, ...] = ()
    activation: Literal["relu", "leaky_relu"] = "relu"


class Run(Table):
    """A run of a method.

    Args:
        rounds: of training.
        cohort: clients of a round; None: all.
        everyone_trains: all clients train in each round, and a share of cohort / N of them is averaged.
        evaluations: gradient evaluations of a client in a round, on one mini-batch each.
        batch: rows of a mini-batch.
        scale: standard deviation at which learned prior scales start.
        lr: step size of gradient descent, where it is not tuned.
        adam: step size of Adam, where it is not tuned.
        seeds: one run of each; a seed fixes partition, initial weights and noise.
        compiled: whether steps may be compiled.
    """

    rounds: int = Field(default=100, gt=0)
    cohort: int | None = Field(default=None, gt=0)
    everyone_trains: bool = False
    evaluations: int = Field(default=20, gt=0)
    batch: int = Field(default=20, gt=0)
    scale: float = Field(default=0.0067, gt=0.0)
    lr: float = Field(default=0.1, gt=0.0)
    adam: float = Field(default=0.01, gt=0.0)
    seeds: tuple[int, ...] = Field(default=(0, 1, 2), min_length=1)
    compiled: bool = True


class Evaluation(Table):
    """What is measured.

    Args:
        last_rounds: the scores of so many last rounds are averaged. Scores of methods that tune for a prediction, and
            of new clients, are of the last round alone.
        every: rounds between the points of a curve; 0: no curve.
        weighting: "rows": every test row counts the same; "clients": every client. Results have both; this one is
            shown, and tuned by.
        new_clients: so many clients take no part in training, and join at the end.
        tune_steps: steps of "+FT" on a client's rows; 0: as many as a round has.
        draws: of a posterior, for a prediction.
        global_rows: test rows of all clients together on which each client's model is scored as well; 0: none.
    """

    last_rounds: int = Field(default=1, gt=0)
    every: int = Field(default=0, ge=0)
    weighting: Literal["rows", "clients"] = "clients"
    new_clients: int = Field(default=0, ge=0)
    tune_steps: int = Field(default=0, ge=0)
    draws: int = Field(default=20, gt=0)
    global_rows: int = Field(default=0, ge=0)


class Tuning(Table):
    """How options are chosen: by grids of equal size, on rows or clients that are kept from the fit.

    Args:
        rounds: of a trial, if it is not ended early; 0: nothing is tuned.
        on: "rows": a share of each client's training rows; "clients": a share of the clients, who join at the end.
        share: that share.
        lr: the grid of step sizes, of methods without a grid of their own.
        halving: end trials that are below the better half of the trials before them (optuna's
            SuccessiveHalvingPruner).
    """

    rounds: int = Field(default=0, ge=0)
    on: Literal["rows", "clients"] = "rows"
    share: float = Field(default=0.2, gt=0.0, lt=1.0)
    lr: tuple[float, ...] = Field(default=RATES, min_length=1)
    halving: bool = True


class Entry(Table):
    """A method of the comparison.

    Args:
        name: a key of `hierfl.studies.baseline_methods.BASELINES`, with "+FT" or "+AM" behind it or not.
        label: in tables; default: the name. Labels differ.
        settings: options of the method in `hierfl.methods`, by name.
        grid: option -> its values, searched together; default: the step sizes of `[tuning]`.
        averages_all: all clients are averaged where `run.everyone_trains`; for servers that do more than average.
        published: {score of ours, "P" or "G": (method, variant)} of the published numbers that stand beside it.
    """

    name: str
    label: str = ""
    settings: dict[str, Any] = {}
    grid: dict[str, tuple[float, ...]] = {}
    averages_all: bool = False
    published: dict[Literal["P", "G"], tuple[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _labelled(cls, given: Any) -> Any:
        return {"label": given.get("name", ""), **given} if isinstance(given, Mapping) else given

    @model_validator(mode="after")
    def _known(self) -> Entry:
        plain = self.name.split("+")[0]
        try:
            baseline(self.name)
        except KeyError as error:
            raise ValueError(f"{error.args[0]}{nearest(plain, BASELINES)}") from error
        known = options_of(plain)
        for option in (*self.settings, *self.grid):
            if option not in known:
                raise ValueError(f"'{plain}' has no option '{option}'{nearest(option, known)}")
        return self


class Published(Table):
    """Which published numbers stand beside ours: a table of `hierfl/comparisons/published.csv`."""

    paper: str
    table: str
    dataset: str
    model: str


class Study(Table):
    """A study file.

    Args:
        title: of tables and figures.
        data: the rows.
        net: the network.
        run: of each method.
        evaluation: what is measured.
        tuning: how options are chosen.
        methods: what is compared.
        published: numbers of a paper.
        notes: sentences that stand under the table.
    """

    title: str
    data: Data
    net: Net = Net()
    run: Run = Run()
    evaluation: Evaluation = Evaluation()
    tuning: Tuning = Tuning()
    methods: tuple[Entry, ...] = Field(min_length=1)
    published: Published | None = None
    notes: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _comparable(self) -> Study:
        labels = [entry.label for entry in self.methods]
        if twice := sorted({label for label in labels if labels.count(label) > 1}):
            raise ValueError(f"methods: {twice[0]!r} is there twice: give them labels that differ")
        if self.tuning.rounds:
            sizes = {e.label: prod(len(v) for v in self.grid_of(e).values()) for e in self.methods}
            if len(set(sizes.values())) > 1:
                raise ValueError(f"methods: grids have unequal sizes, {sizes}: make them equal")
            if max(sizes.values()) > MOST_POINTS:
                raise ValueError(
                    f"tuning: grids of {max(sizes.values())} points; at most {MOST_POINTS}"
                )
        if self.evaluation.last_rounds > self.run.rounds:
            raise ValueError("evaluation.last_rounds: more than run.rounds")
        return self

    def grid_of(self, entry: Entry) -> dict[str, tuple[float, ...]]:
        """Return option -> the values that are tried for a method."""
        return entry.grid or {"lr": self.tuning.lr}


def options_of(name: str) -> list[str]:
    """Return the options of the method behind a key of `BASELINES`, without its model."""
    function = getattr(published_methods, SAME_METHOD.get(name, name))
    return ["lr", *[o for o in inspect.signature(function).parameters if o not in ("model", "lr")]]


def nearest(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" of the nearest known word, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else ""
