"""Study files: a comparison of methods on one federation, declared in TOML.

    title = "PRIOR, Table 1: Fashion-MNIST, logistic regression"
    published = { paper = "PRIOR", table = "T1", dataset = "FMNIST", model = "MCLR" }

    [data]
    name = "fashion_mnist"
    partition = { kind = "power_law", clients = 100, classes = 2 }

    [run]
    rounds = 200
    cohort = 20

    [methods.pfedme]

    [methods."pFedBreD, lg"]
    name = "pfedbred"
    settings = { strategy = "lg" }

Every table has a class here or in `study_data`, whose docstring says what its keys mean. `[quick]`
holds what `--quick` changes, table by table, and `[variants.NAME]` what is changed in a study of
that name: a file with variants is as many studies. Unknown keys and values are errors.
"""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from hierfl.comparisons.study_data import (
    LINES,
    REGRESSION,
    TO_PARTITION,
    Data,
    Evaluation,
    StudyTable,
)
from hierfl.core.arguments import did_you_mean
from hierfl.studies.baseline_methods import BASELINES, baseline

CLASSIFIERS = ("fedpac", "knn_per", "fedvi")  # models of classes alone
MOST_POINTS = 6  # of a method's grid
RATES = (1e-3, 1e-2, 10**-1.5, 1e-1, 10**-0.5)  # step sizes in FedABML, section 5
Seed = Annotated[int, Field(ge=0, lt=2**31)]


class Net(StudyTable):
    """The network of every method.

    Args:
        conv: channels of convolutions on the image, each followed by the activation and 2 x 2
            maximum pooling.
        kernel: pixels along a side of each convolution's kernel.
        hidden: units of each hidden layer; none, and no convolution: logistic regression.
        activation: between layers; "leaky_relu" has the slope 0.1.
        bias: of dense layers.
    """

    conv: tuple[Annotated[int, Field(gt=0)], ...] = ()
    kernel: int = Field(default=3, gt=0)
    hidden: tuple[Annotated[int, Field(gt=0)], ...] = ()
    activation: Literal["relu", "leaky_relu"] = "relu"
    bias: bool = True


class Run(StudyTable):
    """A run of a method.

    Args:
        rounds: of training.
        cohort: clients of a round; None: all.
        everyone_trains: all clients train in each round, and a share of cohort / N is averaged.
        evaluations: gradient evaluations of a client in a round, on one mini-batch each.
        counts_steps: `evaluations` are steps, of which some methods take several evaluations each.
        batch: rows of a mini-batch.
        scale: standard deviation at which learned prior scales start.
        lr: step size of gradient descent, where it is not tuned.
        adam: step size of Adam, where it is not tuned.
        seeds: one run of each; a seed fixes partition, initial weights and noise.
        start: seed of the initial weights of all runs; None: that of the run.
        compiled: whether steps are compiled; runs of a method share its graphs.
    """

    rounds: int = Field(default=100, gt=0)
    cohort: int | None = Field(default=None, gt=0)
    everyone_trains: bool = False
    evaluations: int = Field(default=20, gt=0)
    counts_steps: bool = False
    batch: int = Field(default=20, gt=0)
    scale: float = Field(default=0.0067, gt=0.0)
    lr: float = Field(default=0.1, gt=0.0)
    adam: float = Field(default=0.01, gt=0.0)
    seeds: tuple[Seed, ...] = Field(default=(0, 1, 2), min_length=1)
    start: Seed | None = None
    compiled: bool = True

    def _mistakes(self) -> Iterator[str]:
        if len(set(self.seeds)) < len(self.seeds):
            yield f"seeds: {list(self.seeds)} has one twice: leave it out"


class Tuning(StudyTable):
    """How options are chosen: by grids of equal size, on rows or clients kept from the fit.

    Args:
        rounds: of a trial; 0: nothing is tuned.
        on: "rows": a share of each client's training rows; "clients": a share of the clients, who
            join at the end.
        share: that share.
        lr: the grid of step sizes, of methods without a grid of their own.
        metric: by which options are chosen: that of `[evaluation]`, or "log_score". By accuracy a
            step size may be chosen with which probabilities, and log scores, are far off.
    """

    rounds: int = Field(default=0, ge=0)
    on: Literal["rows", "clients"] = "rows"
    share: float = Field(default=0.2, gt=0.0, lt=1.0)
    lr: tuple[float, ...] = Field(default=RATES, min_length=1)
    metric: Literal["evaluation", "log_score"] = "evaluation"


class StudyEntry(StudyTable):
    """A method of the comparison.

    Args:
        name: a key of `hierfl.studies.baseline_methods.BASELINES`, with "+FT", "+AM" or "+rows"
            behind it or not. Default: the label.
        label: in tables. In a file it is the name of the entry's table.
        settings: options of the method in `hierfl.methods`, by name. An option that ends in
            `optimizer` is "sgd" or "adam" with the chosen step size, or a step size of SGD; "lr" as
            the value of another option is the chosen step size. FedMAP has its prior's `variance`.
        grid: option -> its values, searched together; default: the step sizes of `[tuning]`.
        averages_all: all clients are averaged where `run.everyone_trains`; for servers that do more
            than average.
        fine_tune: clients are scored after fine-tuning as well, "P+FT"; training does not depend on
            it. Behind a name, "+FT" lets clients that adapt take the method's own steps first.
        cohort: in place of the run's.
        published: {score of ours, "P", "P+FT" or "G": (method, variant)} of the published numbers
            that stand beside it, or (method, variant, metric) for another metric.
    """

    name: str
    label: str
    settings: dict[str, Any] = Field(default_factory=dict)
    grid: dict[str, Annotated[tuple[float, ...], Field(min_length=1)]] = Field(default_factory=dict)
    averages_all: bool = False
    fine_tune: bool = False
    cohort: int | None = Field(default=None, gt=0)
    published: dict[Literal["P", "P+FT", "G"], tuple[str, str] | tuple[str, str, str]] = Field(
        default_factory=dict
    )

    def _mistakes(self) -> Iterator[str]:
        plain = self.name.split("+")[0]
        try:
            tunes = baseline(self.name).tunes
        except KeyError as error:
            yield did_you_mean(plain, BASELINES, error.args[0])
            return
        if self.fine_tune and tunes:
            what = f"fine_tune: clients of '{self.name}' tune for 'P' already"
            yield f"{what}: compare with '{plain}+FT' in its place"
        options = BASELINES[plain].options()
        for option in (*self.settings, *self.grid):
            if option not in options:
                fix = did_you_mean(option, options) or f"it has {', '.join(options)}"
                yield f"'{plain}' has no option '{option}': {fix}"


class Published(StudyTable):
    """Which published numbers stand beside ours, of `hierfl/comparisons/published.csv`.

    Args:
        paper: "PRIOR", "FedABML", "FedMAP" or "FedVI".
        table: such as "T1"; of several, the first that has the method's number.
        dataset: as the paper calls it.
        model: as the paper calls it; of several, the first that has the method's number.
        classes: of a client, where the paper has several splits of a data set.
        metric: of the paper's.
        new_metric: of the paper's for new clients, after the last of `join_rounds`; "": none.
    """

    paper: str
    table: str | tuple[str, ...]
    dataset: str
    model: str | tuple[str, ...]
    classes: int | None = None
    metric: str = "acc"
    new_metric: str = ""


class Study(StudyTable):
    """A study file.

    Args:
        title: of tables and figures.
        data: the rows.
        net: the network.
        run: of each method.
        evaluation: what is measured.
        tuning: how options are chosen.
        methods: what is compared, by label.
        leave_out: labels of methods that are not; for variants.
        published: numbers of a paper.
        costs: the table has bytes, seconds and gradient evaluations of a client and a round.
        notes: sentences that stand under the table.
        see: what to see in the figures and the table, in a sentence or two.
    """

    title: str
    data: Data
    net: Net = Net()
    run: Run = Run()
    evaluation: Evaluation = Evaluation()
    tuning: Tuning = Tuning()
    methods: tuple[StudyEntry, ...] = Field(min_length=1)
    leave_out: tuple[str, ...] = ()
    published: Published | None = None
    costs: bool = False
    notes: tuple[str, ...] = ()
    see: str = ""

    @model_validator(mode="before")
    @classmethod
    def _labeled(cls, tables: Any) -> Any:
        """Make the methods of a file, tables by label, a tuple of those that are not left out."""
        methods = tables.get("methods") if isinstance(tables, Mapping) else None
        if not isinstance(methods, Mapping):
            return tables
        out = tables.get("leave_out", ())
        for mistake in _mistakes_of_labels(methods, out):
            raise ValueError(mistake)
        entries = [
            {"label": label, "name": label, **entry}
            for label, entry in methods.items()
            if label not in out
        ]
        return {**tables, "methods": entries}

    def _mistakes(self) -> Iterator[str]:
        if self.tuning.rounds:
            yield from self._mistakes_of_grids()
        name, seen = self.data.name, self.evaluation
        real = name in REGRESSION
        if real != (seen.metric == "explained"):
            kind = "real labels: use 'explained'" if real else "classes: use another one"
            yield f"evaluation.metric is '{seen.metric}', and '{name}' has {kind}"
        for entry in self.methods:
            if real and entry.name.split("+")[0] in CLASSIFIERS:
                yield f"methods.{entry.label}: '{entry.name}' needs classes: leave it out"
        if name in LINES and (self.net.hidden or self.net.conv):
            yield f"net: '{name}' is of lines: leave out 'hidden' and 'conv'"
        if real and (seen.foreign or seen.by_class or seen.calibration):
            yield "evaluation: 'foreign', 'by_class' and 'calibration' are of classes: leave them out"
        if "shuffled_pixels" in seen.foreign and name not in (*TO_PARTITION, "femnist"):
            yield f"evaluation.foreign: '{name}' has no pixels to shuffle"
        if "unseen_classes" in seen.foreign and not self.data.unseen_classes:
            yield "evaluation.foreign: put in 'data.unseen_classes', how many there are"
        if seen.last_rounds > self.run.rounds:
            yield "evaluation.last_rounds: more than run.rounds"

    def _mistakes_of_grids(self) -> Iterator[str]:
        sizes = {e.label: prod(len(v) for v in self.grid_of(e).values()) for e in self.methods}
        if len(set(sizes.values())) > 1:
            yield f"methods: grids have unequal sizes, {sizes}: make them equal"
        if max(sizes.values()) > MOST_POINTS:
            yield f"tuning: grids of {max(sizes.values())} points; at most {MOST_POINTS}"

    def grid_of(self, entry: StudyEntry) -> dict[str, tuple[float, ...]]:
        """Return option -> the values that are tried for a method."""
        return entry.grid or {"lr": self.tuning.lr}


def _mistakes_of_labels(methods: Mapping[str, Any], out: Any) -> Iterator[str]:
    if not isinstance(out, list | tuple) or not all(isinstance(label, str) for label in out):
        yield f"leave_out must be a list of labels, and is {out!r}"
        return
    for label in out:
        if label not in methods:
            fix = did_you_mean(label, methods) or f"use {', '.join(methods)}"
            yield f"leave_out: there is no method '{label}': {fix}"
    for label, entry in methods.items():
        if not isinstance(entry, Mapping):
            yield f"methods.{label} must be a table, and is {entry!r}"
