"""The settings of `baselines`: image set, clients, network, budget."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from hierfl.studies.baseline_methods import BASELINES


@dataclass(frozen=True)
class Setting:
    """Settings of every run.

    Args:
        images: the image set.
        clients: how many.
        classes: of a client.
        train: training rows of a client in each of its classes; 0: its part of `share`.
        test: test rows of a client in each of its classes; unused where `train` is 0.
        share: of all rows, where clients share the rows of a class.
        hidden: units of each hidden layer.
        rounds: of a run.
        averaged: how many of the last rounds P and G are means of.
        cohort: clients in a round.
        evaluations: gradient evaluations in a round; in full those of 5 passes.
        batch: rows of a mini-batch.
        scale: standard deviation at which learned prior scales start; FedABML's is exp(-5).
        draws: posterior draws of a prediction.
        tuning_rounds: rounds of a trial; 0: step sizes are not tuned, but are the next two.
        lr: of gradient descent.
        adam: of Adam.
        compiled: whether steps may be compiled.
    """

    images: Literal["fashion", "emnist", "digits"]
    clients: int
    classes: int
    train: int
    test: int
    hidden: tuple[int, ...]
    share: float = 1.0
    rounds: int = 100
    averaged: int = 10
    cohort: int = 20
    evaluations: int = 30
    batch: int = 50
    scale: float = 0.0067
    draws: int = 20
    tuning_rounds: int = 25
    lr: float = 0.1
    adam: float = 0.01
    compiled: bool = True


FASHION = Setting("fashion", 200, 2, 150, 25, ())
EMNIST = Setting("emnist", 150, 3, 0, 0, (100,), share=0.7, cohort=15, evaluations=45)
DIGITS = Setting("digits", 20, 3, 20, 9, (32,), evaluations=20, batch=20, scale=0.05)
QUICK = replace(DIGITS, rounds=20, averaged=1, tuning_rounds=0, compiled=False)


def of_method(name: str, setting: Setting) -> Setting:
    """Return the setting of a method: with all clients in each of fewer rounds where it needs them."""
    if not BASELINES[name].everyone or setting.cohort == setting.clients:
        return setting
    share = setting.cohort / setting.clients
    return replace(
        setting,
        cohort=setting.clients,
        rounds=max(1, round(setting.rounds * share)),
        averaged=max(1, round(setting.averaged * share)),
        tuning_rounds=max(1, round(setting.tuning_rounds * share)),
    )
