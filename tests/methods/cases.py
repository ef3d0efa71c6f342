"""Small cases of every method and wrapper, from which tests over all methods are made.

A new method needs one entry here, named after it, with what a client sends. A further word in a
name is a setting: "fedsvi natural".
"""

from collections.abc import Callable, Iterable
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch

from hierfl import Method, methods, models
from hierfl.models.learned_priors import InputConvex, LearnedNormal
from hierfl.optimizers import SGD, Adam
from hierfl.program.sites import recipe_of
from tests.programs import FAMILIES, logistic, regression
from tests.sampled import sampled

Shapes = dict[str, tuple[int, ...]]
Make = Callable[[], Method]
COUNTS = (int, int | None, "int", "int | None")
SEED = 3  # of the networks' weights


class Case(NamedTuple):
    """A method in a small configuration, for `federation()` of tests.programs.

    Args:
        make: () -> method.
        up: share -> the shape of what one client sends of it, or leaf -> shape; None: a further
            setting of a method that another case lists.
        compiled: whether its steps can be compiled; otherwise each of its phases is `eager`.
    """

    make: Callable[[], Method]
    up: dict[str, Shapes | tuple[int, ...]] | None = None
    compiled: bool = True


def filled(*layers: torch.nn.Module) -> torch.nn.Module:
    """Return a network of these layers, always with the same weights."""
    generator, module = torch.Generator().manual_seed(SEED), torch.nn.Sequential(*layers)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return module


def net(outputs: int = 1) -> torch.nn.Module:
    """Return a network with one hidden layer of 3."""
    return filled(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, outputs))


def normalizing() -> torch.nn.Module:
    """Return a network with batch norm."""
    return filled(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))


def shared() -> Any:
    return models.network(net(), likelihood=models.likelihood.normal(1.0))


def common() -> Any:
    """Return a line whose weights are global sites."""
    return models.bayesian_network(
        filled(torch.nn.Linear(2, 1)),
        local="none",
        global_prior=dist.Normal(0.0, 1.0),
        likelihood=models.likelihood.normal(1.0),
    )


def personal(**options: Any) -> Any:
    return models.bayesian_network(
        net(), likelihood=models.likelihood.normal(1.0), prior_loc="learned", **options
    )


def units() -> Any:
    return personal(prior_scale=1.0)


def learned() -> Any:
    return personal(prior_scale="learned")


def personal_alone() -> Any:
    """Return a network whose weights are all local, with a known prior."""
    return models.bayesian_network(
        net(), likelihood=models.likelihood.normal(1.0), prior_loc="zero", prior_scale=1.0
    )


def process(**options: Any) -> Any:
    return models.GaussianProcessNetwork(net(), memory=4, **options)


def normed() -> Any:
    return models.network(normalizing(), likelihood=models.likelihood.normal(1.0))


def embedded() -> Any:
    how: dict[str, Any] = {"outputs": 1, "features": 7, "local_features": 2}
    body = filled(torch.nn.Linear(2, 7))[0]  # type: ignore[index]
    return models.PersonalHeads(body, **how, likelihood=models.likelihood.normal(1.0))


def mapped(**options: Any) -> Any:
    return models.learned_prior_network(net(), likelihood=models.likelihood.normal(1.0), **options)


FIRST: Shapes = {"theta.0.weight": (3, 2), "theta.0.bias": (3,)}
THETA: Shapes = {**FIRST, "theta.2.weight": (1, 3), "theta.2.bias": (1,)}
KERNEL: Shapes = {"gp.length": (), "gp.scale": (), "gp.noise": ()}
LINE: Shapes = {"theta.0.weight": (1, 2), "theta.0.bias": (1,)}  # of `common`
SCALE: Shapes = {name.replace("theta", "scale"): shape for name, shape in THETA.items()}
TWO: Shapes = {f"{m}.{name}": shape for m in (0, 1) for name, shape in THETA.items()}
HEADS: Shapes = {
    "embedding.weight": (7, 2),
    "embedding.bias": (7,),
    "head.weight": (5, 1),
    "head.bias": (1,),
    "constructor.1.weight": (5, 4),
    "constructor.1.bias": (4,),
    "constructor.2.weight": (4, 4),
    "constructor.2.bias": (4,),
    "constructor.last.weight": (4, 5),
    "constructor.last.bias": (5,),
}
LOC: Shapes = {"_shared.loc": (4,), "_shared.scale": (4,)}
GUIDE: Shapes = {**LOC, "_shared.lower": (4, 4)}
SITES: Shapes = {"loc": (2,), "spread": (), "lift": ()}
ENCODER: Shapes = {
    "_encoder.row1.weight": (5, 4),
    "_encoder.row1.bias": (4,),
    "_encoder.row2.weight": (4, 4),
    "_encoder.row2.bias": (4,),
    "_encoder.set.weight": (5, 4),
    "_encoder.set.bias": (4,),
    "_encoder.last.weight": (4, 4),
    "_encoder.last.bias": (4,),
}
# what fedsvi sends of `regression`, K = 4 and D = 2, in either direction, under each guide
CROSSES: dict[str, Shapes] = {
    "delta": {f"{site}.at": shape for site, shape in SITES.items()},
    "mean_field": {f"{site}.{p}": shape for site, shape in SITES.items() for p in ("loc", "scale")},
    "low_rank": {**LOC, "_shared.factor": (4, 2)},
    "structured": GUIDE,
    "conditional": GUIDE,
    "amortized": {**GUIDE, **ENCODER},
}


def of(make: Callable[..., Method], model: Any, *given: Any, **options: Any) -> Make:
    """Return what makes a method of a program, or of a model, which is made with it."""
    is_program = "batch" in signature(model).parameters
    return lambda: make(model if is_program else model(), *given, **options)


def around(wrap: Callable[..., Method], make: Make, **options: Any) -> Make:
    return lambda: wrap(make(), **options)


def sent(**shares: Any) -> dict[str, Any]:
    """Return what a client sends with its loss."""
    return {**shares, "loss": ()}


def last(outputs: int) -> Shapes:
    """Return the shapes of the last layer of `net`."""
    return {"theta.2.weight": (outputs, 3), "theta.2.bias": (outputs,)}


MODEL, BODY, PRIOR = sent(theta=THETA), sent(theta=FIRST), sent(theta={**THETA, **SCALE})
FACTOR: dict[str, Any] = {"shift": (2,), "precision": (2, 2)}  # of `logistic`, K = 2
MOMENTS = {**FACTOR, "improper": (), "effective": ()}
PRODUCT: dict[str, Any] = {"shift": LINE, "precision": LINE, "rows": ()}
CHOSEN = sent(mine={**{name: (2, *shape) for name, shape in THETA.items()}, "share": (2,)})
ROWS_OF_NORMAL = {"num_rows": (), "square": ()}
GAUSSIAN = {"precision": (2, 2), "shift": (2,), "height": (), **ROWS_OF_NORMAL}

SMALL: dict[str, Any] = {"optimizer": SGD(0.05), "batch_size": 2}
THREE, PAIR = {**SMALL, "steps": 3}, {**SMALL, "steps": 2}
BY_STEP = {"steps": 3, "batch_size": 2}
LAST: dict[str, Any] = {"head": "theta.2", "batch_size": 2}
ABML: dict[str, Any] = {"optimizer": SGD(0.02), "draws": 2, "steps": 1, "batch_size": 4}
BRED: dict[str, Any] = {"prox": 2.0, "steps": 3, "batch_size": 2}
NONE: dict[str, Any] = {"mean_norm": 10.0, "client_norm": 0.0, "warmup_rounds": 0}
TWO_ADAMS: dict[str, Any] = {"optimizer": Adam(0.01), "global_optimizer": Adam(0.01)}
STARTED = {"inner_optimizer": SGD(0.1), "optimizer": SGD(0.05), "steps": 2, "batch_size": 2}
CHAIN: dict[str, Any] = {"steps": 4, "burn_in": 1, "kept_draws": 5}
FIXED: dict[str, Any] = {"settle_draws": 8, "draws": 64, "target_ess": 8, "weighting_rounds": 1}
NOISY: dict[str, Any] = {"noise_multiplier": 0.5, "secret": 1}
TUNED: dict[str, Any] = {"unit": "step", "batch_size": 2, "when": "every round", "mirror": True}

_fedavg = of(methods.fedavg, shared, **SMALL, steps=4)
_ditto = of(methods.ditto, shared, batch_size=2)
_pfedme = of(methods.pfedme, units, **BRED, inner_steps=2)
_pfedbred = of(methods.pfedbred, units, "meg", **BRED)
_pvi = of(methods.pvi, logistic, draws=2, steps=1)
convex = partial(mapped, prior=InputConvex(hidden=2))
normal_prior = partial(mapped, prior=LearnedNormal())
confident = partial(personal, local=["2"], prior_scale="client")
process_of_classes = partial(process, classes=2, y="ill")
headed = partial(models.HeadedNetwork, head="2", y="ill")
remembering = partial(models.MemoryNetwork, features="2", memory=4, y="ill")

CASES: dict[str, Case] = {
    "apfl": Case(
        of(methods.apfl, shared, steps=4, batch_size=5, optimizer=SGD(0.05, 0.5), adaptive=True),
        MODEL,
    ),
    "bfi": Case(of(methods.bfi, logistic, steps=1), FACTOR),
    "clustered_fl": Case(
        of(methods.clustered_fl, shared, **NONE, optimizer=SGD(0.05, 0.9), batch_size=None),
        sent(away={**THETA, "rows": ()}),
    ),
    "ditto": Case(_ditto, MODEL),
    "fald": Case(
        of(methods.fald, common, **BY_STEP, step_size=0.003, common_noise=0.6, draws=4),
        sent(z=(3,)),
    ),
    "fedabml": Case(of(methods.fedabml, learned, **ABML, inner_steps=2), PRIOR),
    "fedabml full": Case(of(methods.fedabml, learned, **ABML, inner_steps=2, meta="full")),
    "fedabml exact": Case(of(methods.fedabml, learned, **ABML, inner_steps=2, server="exact")),
    "fedamp": Case(of(methods.fedamp, shared, **SMALL, sigma=20.0), sent(w=THETA)),
    "fedavg": Case(_fedavg, MODEL),
    "fedavg epochs": Case(
        of(methods.fedavg, shared, optimizer=Adam(0.05), steps=2, unit="epoch", batch_size=2)
    ),
    "fedavg prox": Case(
        of(methods.fedavg, shared, optimizer=SGD(0.05), steps=4, batch_size=None, prox=0.7)
    ),
    "fedbabu": Case(of(methods.fedbabu, shared, **LAST, optimizer=SGD(0.05, 0.5)), BODY),
    "fedbn": Case(of(methods.fedbn, normed), sent(theta={**FIRST, **last(1)})),
    "fedem": Case(of(methods.fedem, shared, **SMALL, components=2), sent(theta=TWO)),
    "fedep": Case(of(methods.fedep, logistic, draws=2, steps=1), MOMENTS),
    "fedep shared": Case(
        of(methods.fedep, logistic, draws=2, steps=1, shared_factor=True), MOMENTS
    ),
    "fedfomo": Case(
        of(methods.fedfomo, shared, **SMALL, models=2, steps=1),
        sent(model={**THETA, "scores": (2,)}),
    ),
    "fedhb": Case(of(methods.fedhb, learned, **ABML), sent(moments=THETA)),
    "fedhb_mixture": Case(of(methods.fedhb_mixture, shared, **THREE, spread=0.5), CHOSEN),
    "fedivon": Case(of(methods.fedivon, common, **BY_STEP, draws=2), sent(**PRODUCT)),
    "fedlaplace": Case(
        of(methods.fedlaplace, logistic, **FIXED),
        {"log_marginal": (), "gradient": (2,), "hessian": (2, 2), "lost": ()},
    ),
    "fedmap": Case(of(methods.fedmap, mapped, steps=2, batch_size=2), sent(clients=THETA)),
    "fedmap convex": Case(
        of(methods.fedmap, convex, steps=2, server="gradient", server_optimizer=SGD(0.01))
    ),
    "fedmap normal": Case(
        of(
            methods.fedmap,
            normal_prior,
            steps=2,
            server=LearnedNormal().best,
            weights="rows",
            init="client",
        )
    ),
    "fedmap newton": Case(of(methods.fedmap, mapped, newton_steps=1)),
    "fedpa": Case(
        of(methods.fedpa, shared, epochs=3, shrinkage=0.2, batch_size=2), sent(moved=THETA)
    ),
    "fedpac": Case(
        lambda: methods.fedpac(headed(net(2)), body_steps=2, batch_size=2),
        sent(
            theta=FIRST,
            classes={"total": (2, 3), "count": (2,)},
            head={**last(2), "h": (2, 3), "v": ()},
        ),
    ),
    "fedpop": Case(
        of(methods.fedpop, units, **CHAIN, step_size=1e-3, batch_size=2),
        sent(gradient=THETA, stiffness=()),
    ),
    "fedpop corrected": Case(of(methods.fedpop, units, **CHAIN, step_size=0.02, metropolis=True)),
    "fedrecon": Case(
        of(
            methods.fedrecon,
            shared,
            **LAST,
            head_steps=2,
            body_optimizer=SGD(0.05),
            server_optimizer=Adam(0.05),
        ),
        BODY,
    ),
    "fedrep": Case(of(methods.fedrep, shared, **LAST, head_steps=2), BODY),
    "fedrep joint": Case(of(methods.fedrep, shared, **LAST, head_steps=2, joint=True), BODY),
    **{
        f"fedsvi {guide}": Case(
            of(methods.fedsvi, regression, FAMILIES[guide]), {"gradient": shapes, "elbo": ()}
        )
        for guide, shapes in CROSSES.items()
    },
    "fedsvi natural": Case(
        of(methods.fedsvi, regression, merge="natural", global_steps=2, batch_size=2)
    ),
    "fedsvi wasserstein": Case(
        of(methods.fedsvi, regression, FAMILIES["mean_field"], merge="wasserstein")
    ),
    "fedvi": Case(of(methods.fedvi, embedded, hidden=4), sent(move=HEADS, kl=())),
    "fola": Case(of(methods.fola, common, **THREE, fisher_rows=2), sent(**PRODUCT)),
    "fedwba": Case(
        of(methods.fedwba, personal_alone, particles=3, steps=2, batch_size=2),
        sent(particles=(3, 13)),
    ),
    "heur_fedamp": Case(of(methods.heur_fedamp, shared, **SMALL), sent(w=THETA)),
    "ifca": Case(of(methods.ifca, shared, clusters=2, optimizer=SGD(0.05), steps=3), CHOSEN),
    "knn_per": Case(
        lambda: methods.knn_per(remembering(net(2)), batch_size=2),
        sent(theta={**FIRST, **last(2)}),
    ),
    "local_only": Case(of(methods.local_only, shared, steps=3, batch_size=2), sent()),
    **{
        f"per_fedavg {meta}": Case(of(methods.per_fedavg, shared, **STARTED, meta=meta), MODEL)
        for meta in ("first", "hessian-free", "full")
    },
    "pfedbayes": Case(
        of(methods.pfedbayes, learned, **BY_STEP, **TWO_ADAMS, inner_steps=2, draws=2), PRIOR
    ),
    "pfedbred": Case(_pfedbred, MODEL),
    **{
        f"pfedbred {strategy}": Case(of(methods.pfedbred, units, strategy, **BRED))
        for strategy in ("lg", "mh24", "mh-code")
    },
    "pfedgp": Case(
        of(methods.pfedgp, process, steps=2, batch_size=2),
        sent(theta={**FIRST, **last(1), **KERNEL}),
    ),
    "pfedgp classes": Case(
        of(methods.pfedgp, process_of_classes, steps=1, unit="epoch", batch_size=2)
    ),
    "pfedhb": Case(
        of(methods.pfedhb, learned, **SMALL, steps=1, draws=2, mean_penalty=0.5),
        sent(moments=THETA),
    ),
    "pfedhn": Case(
        of(methods.pfedhn, shared, **BY_STEP, optimizer=SGD(0.05, 0.9)), sent(away=THETA)
    ),
    "pfedme": Case(_pfedme, MODEL),
    "pfedvem": Case(
        of(methods.pfedvem, confident, **PAIR, base_optimizer=SGD(0.05), head_steps=2, draws=2),
        sent(head=last(1), base=FIRST, rho=()),
    ),
    "pvi": Case(_pvi, {**FACTOR, "improper": ()}),
    "pvi renyi": Case(of(methods.pvi, logistic, draws=2, steps=1, divergence="renyi")),
    "pvi beta": Case(of(methods.pvi, common, draws=2, steps=1, loss="beta")),
    "qlsd": Case(of(methods.qlsd, common, levels=None, burn_in=0.0, draws=2), sent(gradient=(3,))),
    "qlsd rounded": Case(of(methods.qlsd, common, batch_size=2, draws=5)),
    "scaffold": Case(
        of(methods.scaffold, shared, **THREE),
        sent(moved=THETA, corrected=THETA, joined={"clients": (), "weight": ()}),
    ),
    "scaffold rows": Case(of(methods.scaffold, shared, **THREE, weights="rows")),
    "two_stage": Case(  # D = 2, U = 0, and inductor lowers no step of it
        of(methods.two_stage, regression, draws=100),
        {"factor": GAUSSIAN, "raised": (), "misread": ()},
        compiled=False,
    ),
    # wrappers
    "averaging_some": Case(around(methods.averaging_some, _pfedbred, share=0.5)),
    "batch_normed": Case(around(methods.batch_normed, of(methods.ditto, normed, batch_size=2))),
    "by_rows": Case(around(methods.by_rows, _pfedme)),
    "differentially_private": Case(
        around(methods.differentially_private, _fedavg, **NOISY, clipping_norm=0.1)
    ),
    "differentially_private pvi": Case(
        around(methods.differentially_private, _pvi, **NOISY, clipping_norm=0.5)
    ),
    **{
        f"fine_tuned {strategy}": Case(
            around(
                methods.fine_tuned,
                of(methods.pfedbred, units, strategy, **BRED, inner_steps=2),
                **TUNED,
            )
        )
        for strategy in ("none", "mh", "mh-code")
    },
    "over_relaxed": Case(
        around(
            methods.over_relaxed, of(methods.fedavg, shared, **BY_STEP, optimizer=SGD(0.05, 0.9))
        )
    ),
    "quantized": Case(around(methods.quantized, _ditto)),
    "robust": Case(around(methods.robust, _pfedme, rule="clipped")),
    "server_optimized": Case(around(methods.server_optimized, _fedavg, optimizer=SGD(0.5, 0.9))),
}
METHODS: dict[str, Callable[[], Method]] = {name: case.make for name, case in CASES.items()}


def counted_options(method: Method) -> list[str]:
    """Return the options of a method's builder that are counts, but for seeds and sizes of mini-batches."""
    recipe = recipe_of(method)
    assert recipe is not None
    kinds = {name: of.annotation for name, of in signature(recipe.factory).parameters.items()}
    others = {"secret", *(name for name in kinds if "batch_size" in name)}
    return [name for name, kind in kinds.items() if kind in COUNTS and name not in others]


def cohort(method: Method, size: int) -> int | None:
    """Return the size of a cohort, where the method takes one."""
    return None if method.everyone else size


def first_word(name: str) -> str:
    """Return the name of the method of a case."""
    return name.split()[0]


# Of these there are quick tests: test_ten_rounds.py, test_fedep.py, test_two_stage.py.
HARD = ("bfi", "fedep", "fedep shared", "fedlaplace", "pvi", "two_stage")
QUICK = frozenset({first_word(n): n for n in reversed(METHODS) if n not in HARD}.values())


def one_of_each(names: Iterable[str], *besides: str) -> list[Any]:
    """Return cases as parameters of a test: the first quick one of each method and `besides`; others are slow."""
    return sampled(names, {*QUICK, *besides})
