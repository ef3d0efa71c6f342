"""The methods that `ood_entropy` and `new_clients_fashion` compare, with equally many local steps each.

In a round, of training or of adaptation, every client takes `LOCAL` gradient steps on its own model: FedAvg
and FedProx on 30 mini-batches; pFedBayes and FedABML K = 5 on each of 6, with one step of the client's copy
of the prior after each K (in training). K = 5 is what FedABML's paper settles on, for itself and for
pFedBayes. Mini-batches have 50 rows. All methods start from the same weights.

Step sizes and weights come from `tuning.tuned`, for every method from the same two grids. FedABML's paper
searches one grid for lr and eta, and so does this: they are equal. pFedBayes' step sizes are those of Adam.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from torch import nn

import hierfl
from hierfl.data.clients import ClientData
from hierfl.method import Method
from hierfl.methods.fedabml import fedabml
from hierfl.methods.fedavg import fedavg
from hierfl.methods.fine_tuned import fine_tuned
from hierfl.methods.pfedbayes import pfedbayes
from hierfl.models import bayesian_network, network
from hierfl.optimisers import SGD
from hierfl.runs.result import Fit
from hierfl.studies import image_splits as images
from hierfl.studies.tuning import RATES, WEIGHTS, Choice

FEDAVG, FEDPROX, PFEDBAYES, FEDABML = ("FedAvg+FT", "FedProx+FT", "pFedBayes", "FedABML")
POINTS = (FEDAVG, FEDPROX)  # point estimates: one draw is all
INNER, BATCHES, ROWS = 5, 6, 50
LOCAL = INNER * BATCHES
GRIDS: Mapping[str, Mapping[str, Sequence[float]]] = {
    FEDAVG: {"lr": RATES},
    FEDPROX: {"lr": RATES, "prox": WEIGHTS},
    PFEDBAYES: {"lr": RATES, "zeta": WEIGHTS},
    FEDABML: {"lr": RATES, "lam": WEIGHTS},
}


def method_of(name: str, net: nn.Module, options: Choice) -> Method:
    """Return a method by name.

    Args:
        name: one of the keys of `GRIDS`.
        net: maps rows to logits; every method starts at its weights.
        options: a value for each option of the method's grid.
    """
    lr = options["lr"]
    if name in POINTS:
        prox = options.get("prox", 0.0)
        plain = fedavg(network(net), optimiser=SGD(lr), steps=LOCAL, batch_size=ROWS, prox=prox)
        return fine_tuned(plain, optimiser=SGD(lr), steps=LOCAL, unit="step", batch_size=ROWS)
    hierarchy = bayesian_network(net, prior_scale="learned", scale_start=0.0067)  # exp(-5)
    if name == PFEDBAYES:
        return pfedbayes(
            hierarchy,
            zeta=options["zeta"],
            lr=lr,
            eta=lr,
            inner_steps=INNER,
            steps=BATCHES,
            batch_size=ROWS,
        )
    return fedabml(
        hierarchy,
        lam=options["lam"],
        lr=lr,
        inner_steps=INNER,
        steps=BATCHES,
        unit="step",
        batch_size=ROWS,
        draws=1,
    )


class Setting(Protocol):
    """What a study's settings say of a run."""

    @property
    def cohort(self) -> int:
        """Clients in a round."""

    @property
    def draws(self) -> int:
        """Posterior draws of a prediction."""


def trained(
    name: str, seed: int, setting: Setting, options: Choice, train: ClientData, rounds: int
) -> Fit:
    """Train one method on some clients."""
    net = images.started(partial(images.mclr, train.fields["x"].shape[-1]), seed)
    method = method_of(name, net, options)
    run_of: dict[str, Any] = {"cohort": setting.cohort, "seed": seed, "progress": False}
    return hierfl.fit(method, train, rounds=rounds, compile=False, **run_of)


def accuracy(name: str, fitted: Fit, rows: ClientData, seed: int, setting: Setting) -> float:
    """Return the clients' mean accuracy in %."""
    draws = 1 if name in POINTS else setting.draws
    return 100.0 * float(fitted.predict(rows, draws=draws, seed=seed).scores().accuracy.mean())
