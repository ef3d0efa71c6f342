"""The table `[evaluation]` of study files: what is measured."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from hierfl.comparisons.study_data import Table

Foreign = Literal["mnist", "fashion_mnist", "notmnist", "unseen_classes", "shuffled_pixels"]


class Evaluation(Table):
    """What is measured.

    Args:
        last_rounds: the scores of so many last rounds are averaged; of a method that takes fewer
            rounds, with all clients in each, as many as are the same share of its run. Scores of
            methods that tune for a prediction, and of new clients, are of the last round alone.
        round_of_all: P is scored after one more round, in which all clients train. Without it, a
            client is scored by what it kept of the last round that it was in, which is long ago for
            most where `run.cohort` is small. G is scored before that round, and curves have G
            alone.
        every: rounds between the points of a curve; 0: no curve.
        weighting: "rows": every test row counts the same; "clients": every client. Results have
            both; this one is shown, and tuned by.
        metric: "accuracy"; "balanced_accuracy", the mean over a client's classes of its accuracy in
            each; or, of real labels, "explained", 1 minus the mean squared error over the variance
            of all training labels. Results have all that there are; this one is shown, and tuned
            by.
        new_clients: so many clients take no part in training, and join at the end.
        join_rounds: rounds of training on their own rows, or for methods with "+FT" of tuning,
            after which new clients are scored.
        tune_steps: steps of fine-tuning, of "P+FT" and of methods with "+FT"; 0: as many as a round
            has.
        draws: of a posterior, for a prediction.
        global_rows: test rows of all clients together on which each client's model is scored as
            well; 0: none.
        calibration: P gets the calibration error of its predicted classes, over all test rows.
        foreign: images that each client predicts, as many as it has test rows; P gets the AUROC of
            the entropy (FedABML, Figures 5 and 6), and entropies.csv the entropies. An image set;
            "unseen_classes", images of `data.unseen_classes`; or "shuffled_pixels", the test rows
            with pixels in random order.
        along: what is measured at the points of curves besides. "new_clients": P of new clients
            after the first of `join_rounds`; "coherence": of the gradients in the global params of
            clients that have trained, -log det (PRIOR, Figure 2); "clients": every client's score,
            in clients.csv.
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

    @model_validator(mode="after")
    def _along_curves(self) -> Evaluation:
        if self.along and not self.every:
            raise ValueError(
                "along: there are no curves: put in 'every', rounds between their points"
            )
        if "new_clients" in self.along and not self.new_clients:
            raise ValueError("along: there are no new clients: put in 'new_clients', how many join")
        return self
