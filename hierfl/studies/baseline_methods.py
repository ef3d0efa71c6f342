"""The methods that study files name, each built at a step size and a budget.

The budget of a round is a number of gradient evaluations: gradients of the likelihood of one model
on one mini-batch. Those of a client's copy of a prior are not counted, nor what has no gradient.

All else is at the defaults of `hierfl.methods`, which are the authors', but for: FedABML takes one
draw, K = 5, and a KL weight of 0.05; FedProx' weight is that of FedABML's paper; FedPA takes the
number of passes nearest to the budget; FedPop's server takes Adam with a tenth of the step size;
learned scales start at the study's, and so do FedHB's spread and FedWBA's five particles; fola,
fedivon, fald and qlsd have a Normal prior of scale 0.3, and the last two a step size of lr over the
pooled rows; QLSD takes one gradient, of all rows; pFedGP keeps 100 rows; FedAMP's sigma is the
number of clients; clustered_fl halves no cluster before round 20, or before half of fewer than 40
rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hierfl.method import Method
from hierfl.methods import over_relaxed
from hierfl.studies import baseline_builders as build
from hierfl.studies import hierarchy_builders as of_hierarchies


def _all(total: int) -> int:
    return total


@dataclass(frozen=True)
class Baseline:
    """A method `made` from a network, with the evaluations `spent` in a round.

    It `tunes` before a prediction, averages over `draws`, has an `adaptive` step size (Adam's),
    needs a layer below the last (`body`), or `everyone` in each of then fewer rounds.
    """

    made: build.Made
    spent: Callable[[int], int] = _all
    tunes: bool = False
    draws: bool = False
    adaptive: bool = False
    body: bool = False
    everyone: bool = False


def _times(evaluations: int) -> Callable[[int], int]:
    """Return what is spent by steps of `each` evaluations."""
    return lambda total: evaluations * build.nearest(total, evaluations)


def fine_tuning(plain: Baseline) -> Baseline:
    """Return a method "+FT": its clients tune before they are scored."""

    def made(net: nn.Sequential, lr: float, b: build.Budget, **settings: Any) -> Method:
        return build.tuning(plain.made(net, lr, b, **settings), lr, b)

    return replace(plain, made=made, tunes=True)


def over_relaxing(plain: Baseline) -> Baseline:
    """Return a method "+AM": its server goes twice as far."""

    def made(net: nn.Sequential, lr: float, b: build.Budget, **settings: Any) -> Method:
        return over_relaxed(plain.made(net, lr, b, **settings))

    return replace(plain, made=made)


SUFFIXES = {"FT": fine_tuning, "AM": over_relaxing}


def baseline(name: str) -> Baseline:
    """Return a method by the key of `BASELINES`, with "+FT" or "+AM" behind it or not."""
    if name in BASELINES:
        return BASELINES[name]
    plain, *suffixes = name.split("+")
    if plain not in BASELINES or not set(suffixes) <= set(SUFFIXES):
        raise KeyError(
            f"there is no method '{name}'; choose from {', '.join(BASELINES)}, with "
            f"{' or '.join(f'+{suffix}' for suffix in SUFFIXES)} behind it or not"
        )
    method = BASELINES[plain]
    for suffix in suffixes:
        method = SUFFIXES[suffix](method)
    return method


BASELINES: dict[str, Baseline] = {
    "local_only": Baseline(build.a_local_only),
    "fedavg": Baseline(build.a_fedavg),
    "fedprox": Baseline(build.a_fedprox),
    "fedavg+FT": fine_tuning(Baseline(build.a_fedavg)),
    "fedprox+FT": fine_tuning(Baseline(build.a_fedprox)),
    "fedavg+AM": over_relaxing(Baseline(build.a_fedavg)),
    "scaffold": Baseline(build.a_scaffold),
    "scaffold+FT": fine_tuning(Baseline(build.a_scaffold)),
    "fedpa": Baseline(build.a_fedpa),
    "per_fedavg": Baseline(build.a_per_fedavg, _times(2), tunes=True),
    "ditto": Baseline(build.a_ditto, _times(2)),
    "apfl": Baseline(build.an_apfl, _times(2)),
    "fedrep": Baseline(build.a_fedrep, body=True),
    "fedper": Baseline(build.a_fedper, body=True),
    "fedbabu": Baseline(build.a_fedbabu, tunes=True, body=True),
    "fedrecon": Baseline(build.a_fedrecon, tunes=True, body=True),
    "fedpac": Baseline(build.a_fedpac, body=True),
    "fedbn": Baseline(build.a_fedbn, body=True),
    "knn_per": Baseline(build.a_knn_per, tunes=True),
    "fedem": Baseline(build.a_fedem, _times(3)),
    "ifca": Baseline(build.an_ifca, tunes=True),
    "fedhb_mixture": Baseline(build.a_fedhb_mixture),
    "clustered_fl": Baseline(build.a_clustered_fl, everyone=True),
    "fedamp": Baseline(build.a_fedamp),
    "heur_fedamp": Baseline(build.a_heur_fedamp),
    "fedfomo": Baseline(build.a_fedfomo),
    "pfedhn": Baseline(build.a_pfedhn),
    "pfedme": Baseline(of_hierarchies.a_pfedme, _times(5)),
    "pfedbred": Baseline(of_hierarchies.a_pfedbred, _times(6)),
    "fedmap": Baseline(of_hierarchies.a_fedmap, adaptive=True),
    "pfedbayes": Baseline(of_hierarchies.a_pfedbayes, _times(5), draws=True, adaptive=True),
    "fedabml": Baseline(of_hierarchies.a_fedabml, _times(5), tunes=True, draws=True),
    "fedpop": Baseline(of_hierarchies.a_fedpop, draws=True, body=True),
    "fedvi": Baseline(of_hierarchies.a_fedvi, draws=True, body=True),
    "fedsvi": Baseline(of_hierarchies.a_fedsvi, draws=True, adaptive=True),
    "fedhb": Baseline(of_hierarchies.a_fedhb, tunes=True, draws=True),
    "pfedvem": Baseline(of_hierarchies.a_pfedvem, draws=True),
    "fola": Baseline(of_hierarchies.a_fola, draws=True),
    "fedivon": Baseline(of_hierarchies.a_fedivon, draws=True, adaptive=True),
    "fedwba": Baseline(
        of_hierarchies.a_fedwba, _times(of_hierarchies.PARTICLES), draws=True, adaptive=True
    ),
    "pfedgp": Baseline(of_hierarchies.a_pfedgp, body=True),
    "pfedhb": Baseline(of_hierarchies.a_pfedhb, tunes=True, draws=True, adaptive=True),
    "fald": Baseline(of_hierarchies.a_fald, draws=True),
    "qlsd": Baseline(of_hierarchies.a_qlsd, lambda total: 1, draws=True),
}
