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

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from hierfl import methods
from hierfl.core.arguments import NoSuchName
from hierfl.method import Method
from hierfl.optimizers import SGD, Adam
from hierfl.program.sites import Model
from hierfl.studies import baseline_parts as of
from hierfl.studies.baseline_parts import HELD, Budget, Options

PROX = 0.5  # FedProx' weight that FedABML's paper chose for its MNIST sets
PARTICLES = 5  # of FedWBA, whose step takes the gradient of each


@dataclass(frozen=True)
class Baseline:
    """A method of `hierfl.methods`, for studies."""

    method: str
    model: Callable[..., Model] = of.common  # of network, budget and own settings
    # of network, step size, budget and own settings: options in place of those of descent
    more: Callable[..., Options] = lambda net, lr, b: {}
    evaluations: int = 1  # gradients of a step; 0: one gradient of all rows a round
    momentum: float = 0.0
    tunes: bool = False  # do clients tune before a prediction?
    draws: bool = False  # do predictions average over draws?
    adaptive: bool = False  # is the step size Adam's?
    body: bool = False  # does it need a layer below the last?
    everyone: bool = False  # do all clients take part in each of then fewer rounds?
    # (method, step size, budget) -> method, from the inside out
    wrappers: tuple[Callable[[Method, float, Budget], Method], ...] = ()

    def made(self, net: nn.Sequential, lr: float, b: Budget, **settings: Any) -> Method:
        """Return the method; settings are options of it, and of its model."""
        builder = getattr(methods, self.method)
        optimizer = Adam(lr) if self.adaptive else SGD(lr, momentum=self.momentum)
        descent = local(b, max(1, self.evaluations), optimizer=optimizer)
        options = {k: v for k, v in descent.items() if k in inspect.signature(builder).parameters}
        options |= self.more(net, lr, b, **_taken(self.more, settings))
        model = self.model(net, b, **_taken(self.model, settings))
        foreign = {*_keywords(self.more), *_keywords(self.model)}
        options |= {name: value for name, value in settings.items() if name not in foreign}
        method: Method = builder(model, **options)
        for wrapper in self.wrappers:
            method = wrapper(method, lr, b)
        return method

    def options(self) -> list[str]:
        """Return the names of what a study may set."""
        builder = inspect.signature(getattr(methods, self.method)).parameters
        own = dict.fromkeys([*_keywords(self.more), *_keywords(self.model), *builder])
        return ["lr", *[name for name in own if name not in ("model", "lr")]]

    def spent(self, total: int) -> int:
        """Return the gradient evaluations of a round whose budget is `total`."""
        return self.evaluations * of.nearest(total, self.evaluations) if self.evaluations else 1


def _keywords(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]


def _taken(function: Callable[..., Any], settings: Options) -> Options:
    return {name: settings[name] for name in _keywords(function) if name in settings}


def local(b: Budget, evaluations: int = 1, **more: Any) -> Options:
    """Return most methods' options of descent, with so many gradient evaluations a step."""
    return {"steps": b.steps(evaluations), "unit": "step", "batch_size": b.rows, **more}


def tuning(method: Method, lr: float, b: Budget, *, own_steps: bool = True) -> Method:
    """Return a method with the budget's `tune_steps` of fine-tuning; `own_steps` as there."""
    options = local(b, optimizer=SGD(lr)) | {"steps": b.tune_steps or b.evaluations}
    return methods.fine_tuned(method, **options, own_steps=own_steps)


def fine_tuning(plain: Baseline) -> Baseline:
    """Return a method "+FT": its clients tune before they are scored."""
    return replace(plain, wrappers=(*plain.wrappers, tuning), tunes=True)


def _wrapped(wrapper: Callable[[Method], Method], plain: Baseline) -> Baseline:
    return replace(plain, wrappers=(*plain.wrappers, lambda method, lr, b: wrapper(method)))


# "+AM": the server goes twice as far; "+rows": clients count by their rows
SUFFIXES: dict[str, Callable[[Baseline], Baseline]] = {
    "FT": fine_tuning,
    "AM": partial(_wrapped, methods.over_relaxed),
    "rows": partial(_wrapped, methods.by_rows),
}


def baseline(name: str) -> Baseline:
    """Return a method by the key of `BASELINES`, with or without "+FT", "+AM" or "+rows"."""
    if name in BASELINES:
        return BASELINES[name]
    plain, *suffixes = name.split("+")
    if plain not in BASELINES or not set(suffixes) <= set(SUFFIXES):
        raise NoSuchName(
            f"there is no method '{name}'; choose from {', '.join(BASELINES)}, with or without "
            f"{', '.join(f'+{suffix}' for suffix in SUFFIXES)} behind it"
        )
    method = BASELINES[plain]
    for suffix in suffixes:
        method = SUFFIXES[suffix](method)
    return method


def _constant(**options: Any) -> Callable[..., Options]:
    return lambda net, lr, b: options


FEDAVG = Baseline("fedavg")
FEDPROX = Baseline("fedavg", more=_constant(prox=PROX))
SCAFFOLD = Baseline("scaffold")
BASELINES: dict[str, Baseline] = {
    "local_only": Baseline("local_only"),
    "fedavg": FEDAVG,
    "fedprox": FEDPROX,
    "fedavg+FT": fine_tuning(FEDAVG),
    "fedprox+FT": fine_tuning(FEDPROX),
    "fedavg+AM": SUFFIXES["AM"](FEDAVG),
    "scaffold": SCAFFOLD,
    "scaffold+FT": fine_tuning(SCAFFOLD),
    "fedpa": Baseline(
        "fedpa",
        more=lambda net, lr, b: {"epochs": b.passes, "burn_in": min(1, b.passes - 1)},
        momentum=0.9,
    ),
    "per_fedavg": Baseline(
        "per_fedavg",
        more=lambda net, lr, b: {"inner_optimizer": SGD(lr)},
        evaluations=2,
        tunes=True,
    ),
    "ditto": Baseline("ditto", evaluations=2),  # half of the steps are the common model's
    "apfl": Baseline("apfl", evaluations=2),  # as Ditto's
    "fedrep": Baseline(
        "fedrep",
        more=lambda net, lr, b: of.in_two(b, 10, 1) | of.head_of(net),
        momentum=0.5,
        body=True,
    ),
    "fedper": Baseline("fedrep", more=of.fedper_options, momentum=0.5, body=True),
    "fedbabu": Baseline(  # clients tune by as many steps as a round has
        "fedbabu",
        more=lambda net, lr, b: {"tune_steps": b.evaluations, **of.head_of(net)},
        momentum=0.9,
        tunes=True,
        body=True,
    ),
    "fedrecon": Baseline("fedrecon", more=of.fedrecon_options, tunes=True, body=True),
    "fedpac": Baseline("fedpac", of.with_head, of.fedpac_options, body=True),
    "fedbn": Baseline("fedbn", of.with_batch_norm, body=True),
    "knn_per": Baseline("knn_per", of.with_memory, tunes=True),
    "fedem": Baseline(
        "fedem", more=_constant(components=3), evaluations=3
    ),  # a step is of all three
    "ifca": Baseline("ifca", tunes=True),
    "fedhb_mixture": Baseline("fedhb_mixture"),
    "clustered_fl": Baseline(
        "clustered_fl",
        more=lambda net, lr, b: {"warmup_rounds": min(20, b.rounds // 2)},
        momentum=0.9,
        everyone=True,
    ),
    "fedamp": Baseline("fedamp", more=lambda net, lr, b: {"sigma": float(b.clients)}),
    "heur_fedamp": Baseline("heur_fedamp"),
    "fedfomo": Baseline("fedfomo", more=_constant(validation=HELD)),  # rows of `held_out`
    "pfedhn": Baseline("pfedhn", momentum=0.9),
    "pfedme": Baseline("pfedme", of.about_a_mean, _constant(inner_steps=5), evaluations=5),
    "pfedbred": Baseline(  # 5 of the client's model, and one that moves the mean
        "pfedbred", of.about_a_mean, _constant(inner_steps=5, strategy="mh"), evaluations=6
    ),
    "fedmap": Baseline("fedmap", of.mapped, of.fedmap_options, adaptive=True),
    "pfedbayes": Baseline(
        "pfedbayes",
        of.hierarchy,
        lambda net, lr, b: {"inner_steps": 5, "global_optimizer": Adam(lr)},
        evaluations=5,
        draws=True,
        adaptive=True,
    ),
    "fedabml": Baseline(
        "fedabml",
        of.hierarchy,
        _constant(kl_weight=0.05, inner_steps=5, draws=1),
        evaluations=5,
        tunes=True,
        draws=True,
    ),
    "fedpop": Baseline("fedpop", of.heads_about_a_mean, of.fedpop_options, draws=True, body=True),
    "fedvi": Baseline("fedvi", of.personal_heads, draws=True, body=True),
    "fedsvi": Baseline("fedsvi", of.hierarchy, of.fedsvi_options, draws=True, adaptive=True),
    "fedhb": Baseline("fedhb", of.hierarchy, of.fedhb_options, tunes=True, draws=True),
    "pfedvem": Baseline("pfedvem", of.heads_of_own_scale, of.pfedvem_options, draws=True),
    "fola": Baseline("fola", of.common_posterior, of.fola_options, draws=True),
    "fedivon": Baseline(
        "fedivon", of.common_posterior, lambda net, lr, b: {"lr": lr}, draws=True, adaptive=True
    ),
    "fedwba": Baseline(
        "fedwba",
        of.about_the_module,
        _constant(particles=PARTICLES),
        evaluations=PARTICLES,
        draws=True,
        adaptive=True,
    ),
    "pfedgp": Baseline("pfedgp", of.process, momentum=0.9, body=True),
    "pfedhb": Baseline(
        "pfedhb", of.hierarchy, _constant(draws=1), tunes=True, draws=True, adaptive=True
    ),
    "fald": Baseline(
        "fald",
        of.common_posterior,
        lambda net, lr, b: {"step_size": b.pooled(lr), "draws": 20},
        draws=True,
    ),
    "qlsd": Baseline(
        "qlsd",
        of.common_posterior,
        lambda net, lr, b: {"step_size": b.pooled(lr), "draws": 20, "batch_size": None},
        evaluations=0,
        draws=True,
    ),
}
