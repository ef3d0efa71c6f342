"""The tables `[data]` and `[evaluation]` of study files: the rows, and what is measured."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hierfl.core.arguments import did_you_mean

Images = Literal["digits", "mnist", "fashion_mnist", "emnist", "cifar10"]
Clients = Literal["femnist", "heart_disease", "wisdm", "election88", "trauma", "lung_cancer"]
MoreClients = Literal["office_caltech10", "radon", "school_ilea"]
Drawn = Literal[
    "fedmap_feature", "fedmap_quantity", "fedmap_label", "fedabml_lines", "fedmap_lines"
]
Source = Literal[Images, Clients, MoreClients, Drawn]
TO_PARTITION, DRAWN = get_args(Images), get_args(Drawn)  # all others have clients of their own
LINES = ("fedabml_lines", "fedmap_lines")  # drawn about lines, of real labels in their own units
SHIPPED = (*DRAWN, "digits", "heart_disease", "radon")  # all others are read from HIERFL_DATA
REGRESSION = ("radon", "school_ilea", *LINES)  # real labels; all others have classes


class StudyTable(BaseModel):
    """A table of a study file."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known_keys_and_no_boolean_as_a_number(cls, table: Any) -> Any:
        for name, value in table.items() if isinstance(table, Mapping) else ():
            if name not in cls.model_fields:
                fix = did_you_mean(name, cls.model_fields) or f"use {', '.join(cls.model_fields)}"
                raise ValueError(f"{name}: unknown key: {fix}")
            yes_or_no = cls.model_fields[name].annotation is bool
            several = value if isinstance(value, list | tuple) else [value]
            if any(isinstance(v, bool | int) and isinstance(v, bool) != yes_or_no for v in several):
                kind = "true or false" if yes_or_no else "no boolean"
                raise ValueError(f"{name} is {value!r:.80}: it must be {kind}")
        return table

    def _mistakes(self) -> Iterator[str]:
        """Yield what is wrong with the table, whose keys and kinds of values are right."""
        yield from ()

    @model_validator(mode="after")
    def _right(self) -> Self:
        for mistake in self._mistakes():
            raise ValueError(mistake)
        return self


class Partition(StudyTable):
    """How rows are split among clients.

    Args:
        kind: "power_law" (PRIOR), "equal_classes" and "shared_classes" (FedABML), "dirichlet" (each
            class dealt in Dirichlet shares) or "class_mixes" (a Dirichlet mix and equally many rows
            for each client); see `hierfl.studies.image_splits` and `hierfl.data.partition`.
        clients: how many.
        classes: of a client; unused by "dirichlet" and "class_mixes".
        train: training rows of a client in each class; for "equal_classes".
        test: test rows of a client in each class; for "equal_classes".
        share: of all rows, in (0, 1]; for "shared_classes".
        concentration: of the Dirichlet distribution; smaller is more skewed.
        authors_labels: with the wrong labels of PRIOR's MNIST script; for "power_law".
    """

    kind: Literal["power_law", "equal_classes", "shared_classes", "dirichlet", "class_mixes"]
    clients: int = Field(gt=0, le=10**6)
    classes: int = Field(default=2, gt=0, le=10**6)
    train: int = Field(default=150, gt=0)
    test: int = Field(default=25, gt=0)
    share: float = Field(default=1.0, gt=0.0, le=1.0)
    concentration: float = Field(default=0.5, gt=0.0)
    authors_labels: bool = False

    def _mistakes(self) -> Iterator[str]:
        if self.authors_labels and self.kind != "power_law":
            yield f"authors_labels are of 'power_law', not of '{self.kind}': leave them out"


class Data(StudyTable):
    """The rows.

    Args:
        name: of the data set; `hierfl.studies.drawn_clients` has "fedmap_..." and "..._lines".
        partition: of the image sets, which have no clients of their own.
        clients: so many of the data set's own clients take part, the first ones; None: all.
        scaling: "pixel": each column by its mean and sd over the training rows of participating
            clients; "one": all columns by one mean and sd; "none".
        unseen_classes: so many last classes of the data set are no client's; with a partition.
        test_share: share of each client's rows that are test rows, where neither the partition nor
            the data say so.
        noise: standard deviation of real labels about what the model predicts: in standard
            deviations of the training labels, but of "..._lines" in their own units.
    """

    name: Source
    partition: Partition | None = None
    scaling: Literal["pixel", "one", "none"] = "one"
    test_share: float = Field(default=0.25, gt=0.0, lt=1.0)
    unseen_classes: int = Field(default=0, ge=0)
    clients: int | None = Field(default=None, gt=0)
    noise: float = Field(default=1.0, gt=0.0)

    def _mistakes(self) -> Iterator[str]:
        if self.partition is None and self.name in TO_PARTITION:
            yield f"'{self.name}' needs a partition: put in 'partition'"
        if self.partition is not None and self.name not in TO_PARTITION:
            yield f"'{self.name}' has clients of its own: leave 'partition'"
        if self.partition is not None and self.clients is not None:
            yield "clients: the partition says how many: leave it out"
        if self.partition is None and self.unseen_classes:
            yield f"unseen_classes: '{self.name}' has clients of its own: leave it out"


Foreign = Literal["mnist", "fashion_mnist", "notmnist", "unseen_classes", "shuffled_pixels"]


class Evaluation(StudyTable):
    """What is measured.

    Args:
        last_rounds: the scores of so many last rounds are averaged, or the same share of a run that
            takes fewer rounds. Scores of methods that tune for a prediction, and of new clients,
            are of the last round alone.
        round_of_all: P is scored after one more round, in which all clients train. Without it, a
            client is scored by what it kept of its last round, which is long ago for most where
            `run.cohort` is small. G is scored before that round, and curves have G alone.
        every: rounds between the points of a curve; 0: no curve.
        weighting: "rows": every test row counts the same; "clients": every client. Results have
            both; this one is shown, and tuned by.
        metric: "accuracy"; "balanced_accuracy", the mean over a client's classes of its accuracy in
            each; or, of real labels, "explained", 1 minus the mean squared error over the variance
            of all training labels. Results have all; this one is shown, and tuned by.
        new_clients: so many clients take no part in training, and join at the end.
        join_rounds: rounds of training on their own rows, or for methods with "+FT" of tuning,
            after which new clients are scored.
        tune_steps: steps of fine-tuning, of "P+FT" and of methods with "+FT"; 0: those of a round.
        draws: of a posterior, for a prediction.
        global_rows: test rows of all clients together on which each client's model is scored as
            well; 0: none.
        calibration: P gets the calibration error of its predicted classes, over all test rows.
        foreign: images that each client predicts, as many as it has test rows: an image set;
            "unseen_classes", images of `data.unseen_classes`; or "shuffled_pixels", the test rows
            with pixels in random order. P gets the AUROC of the entropy (FedABML, Figures 5 and 6).
        along: what is measured at the points of curves besides. "new_clients": P of new clients
            after the first of `join_rounds`; "coherence": of the gradients in the global params of
            clients that have trained, -log det (PRIOR, Figure 2); "clients": every client's score.
        by_class: the first client's loss on each class minus the mean over clients (PRIOR, Figure
            3), in classes.csv.
    """

    last_rounds: int = Field(default=1, gt=0)
    round_of_all: bool = False
    every: int = Field(default=0, ge=0)
    weighting: Literal["rows", "clients"] = "clients"
    metric: Literal["accuracy", "balanced_accuracy", "explained"] = "accuracy"
    new_clients: int = Field(default=0, ge=0)
    join_rounds: tuple[Annotated[int, Field(gt=0)], ...] = Field(default=(1,), min_length=1)
    tune_steps: int = Field(default=0, ge=0)
    draws: int = Field(default=20, gt=0)
    global_rows: int = Field(default=0, ge=0)
    calibration: bool = False
    foreign: tuple[Foreign, ...] = ()
    along: tuple[Literal["new_clients", "coherence", "clients"], ...] = ()
    by_class: bool = False

    def _mistakes(self) -> Iterator[str]:
        if self.along and not self.every:
            yield "along: there are no curves: put in 'every', rounds between their points"
        if "new_clients" in self.along and not self.new_clients:
            yield "along: there are no new clients: put in 'new_clients', how many join"
