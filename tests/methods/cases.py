"""Small cases of every method and wrapper, from which tests over all methods are made.

A new method needs one entry here, named after it, with what a client sends. A further word in a
name is a setting: "fedsvi natural".
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch

from hierfl import methods, models
from hierfl.method import Method
from hierfl.models.learned_priors import InputConvex, LearnedNormal
from hierfl.optimizers import SGD, Adam
from tests.programs import FAMILIES, logistic, regression
from tests.sampled import sampled

Shapes = dict[str, tuple[int, ...]]
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


# ------------------------------------------------------------------------------------------- models
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


# ------------------------------------------------------------------------------------- what is sent
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
MODEL: dict[str, Any] = {"theta": THETA, "loss": ()}
BODY: dict[str, Any] = {"theta": FIRST, "loss": ()}
PRIOR: dict[str, Any] = {"theta": {**THETA, **SCALE}, "loss": ()}
FACTOR: dict[str, Any] = {"shift": (2,), "precision": (2, 2)}  # of `logistic`, K = 2

# ---------------------------------------------------------------------------------------- the cases
SMALL: dict[str, Any] = {"optimizer": SGD(0.05), "batch_size": 2}
LAST: dict[str, Any] = {"head": "theta.2", "batch_size": 2}
ABML: dict[str, Any] = {
    "optimizer": SGD(0.02),
    "inner_steps": 2,
    "draws": 2,
    "steps": 1,
    "batch_size": 4,
}
BRED: dict[str, Any] = {"prox": 2.0, "steps": 3, "batch_size": 2}
CLUSTERS: dict[str, Any] = {
    "mean_norm": 10.0,
    "client_norm": 0.0,
    "warmup_rounds": 0,
    "batch_size": 2,
}


def _fedavg(**options: Any) -> Method:
    return methods.fedavg(shared(), **{**SMALL, "steps": 4, **options})


def _ditto() -> Method:
    return methods.ditto(shared(), batch_size=2)


def _pfedme() -> Method:
    return methods.pfedme(personal(prior_scale=1.0), prox=2.0, steps=3, batch_size=2, inner_steps=2)


def _pfedbred(strategy: Any = "meg", **options: Any) -> Method:
    return methods.pfedbred(personal(prior_scale=1.0), strategy, **BRED, **options)


def _tuned(strategy: Any) -> Method:
    return methods.fine_tuned(
        _pfedbred(strategy, inner_steps=2),
        unit="step",
        batch_size=2,
        when="every round",
        mirror=True,
    )


def _fedabml(**options: Any) -> Method:
    return methods.fedabml(personal(prior_scale="learned"), **ABML, **options)


def _fedpac() -> Method:
    model = models.HeadedNetwork(net(outputs=2), head="2", y="ill")
    return methods.fedpac(model, body_steps=2, batch_size=2)


def _knn_per() -> Method:
    model = models.MemoryNetwork(net(outputs=2), features="2", memory=4, y="ill")
    return methods.knn_per(model, batch_size=2)


def _pfedbayes() -> Method:
    how: dict[str, Any] = {"steps": 3, "batch_size": 2, "inner_steps": 2, "draws": 2}
    model = personal(prior_scale="learned")
    return methods.pfedbayes(model, **how, optimizer=Adam(0.01), global_optimizer=Adam(0.01))


def _fedpop(**options: Any) -> Method:
    model = personal(prior_scale=1.0)
    return methods.fedpop(model, **{"steps": 4, "burn_in": 1, "kept_draws": 5, **options})


CASES: dict[str, Case] = {
    "apfl": Case(
        lambda: methods.apfl(
            shared(), adaptive=True, optimizer=SGD(0.05, 0.5), steps=4, batch_size=2
        ),
        MODEL,
    ),
    "bfi": Case(lambda: methods.bfi(logistic, steps=1), FACTOR),
    "clustered_fl": Case(
        lambda: methods.clustered_fl(shared(), **CLUSTERS, optimizer=SGD(0.05, 0.9)),
        {"away": {**THETA, "rows": ()}, "loss": ()},
    ),
    "ditto": Case(_ditto, MODEL),
    "fald": Case(
        lambda: methods.fald(
            common(), step_size=0.003, steps=3, batch_size=2, common_noise=0.6, draws=4
        ),
        {"z": (3,), "loss": ()},
    ),
    "fedabml": Case(_fedabml, PRIOR),
    "fedabml full": Case(partial(_fedabml, meta="full")),
    "fedabml exact": Case(partial(_fedabml, server="exact")),
    "fedamp": Case(lambda: methods.fedamp(shared(), sigma=20.0, **SMALL), {"w": THETA, "loss": ()}),
    "fedavg": Case(_fedavg, MODEL),
    "fedavg epochs": Case(partial(_fedavg, optimizer=Adam(0.05), steps=2, unit="epoch")),
    "fedavg prox": Case(partial(_fedavg, batch_size=None, prox=0.7)),
    "fedbabu": Case(lambda: methods.fedbabu(shared(), optimizer=SGD(0.05, 0.5), **LAST), BODY),
    "fedbn": Case(
        lambda: methods.fedbn(normed()),
        {"theta": {**FIRST, "theta.2.weight": (1, 3), "theta.2.bias": (1,)}, "loss": ()},
    ),
    "fedem": Case(
        lambda: methods.fedem(shared(), components=2, **SMALL), {"theta": TWO, "loss": ()}
    ),
    "fedep": Case(
        lambda: methods.fedep(logistic, draws=2, steps=1),
        {**FACTOR, "improper": (), "effective": ()},
    ),
    "fedep shared": Case(
        lambda: methods.fedep(logistic, draws=2, steps=1, shared_factor=True),
        {**FACTOR, "improper": (), "effective": ()},
    ),
    "fedfomo": Case(
        lambda: methods.fedfomo(shared(), models=2, steps=1, **SMALL),
        {"model": {**THETA, "scores": (2,)}, "loss": ()},
    ),
    "fedhb": Case(
        lambda: methods.fedhb(
            personal(prior_scale="learned"), optimizer=SGD(0.02), draws=2, steps=1, batch_size=4
        ),
        {"moments": THETA, "loss": ()},
    ),
    "fedhb_mixture": Case(
        lambda: methods.fedhb_mixture(shared(), spread=0.5, steps=3, **SMALL),
        {
            "mine": {**{name: (2, *shape) for name, shape in THETA.items()}, "share": (2,)},
            "loss": (),
        },
    ),
    "fedivon": Case(
        lambda: methods.fedivon(common(), steps=3, batch_size=2, draws=2),
        {"shift": LINE, "precision": LINE, "rows": (), "loss": ()},
    ),
    "fedlaplace": Case(
        lambda: methods.fedlaplace(
            logistic, settle_draws=8, draws=64, target_ess=8, weighting_rounds=1
        ),
        {"log_marginal": (), "gradient": (2,), "hessian": (2, 2), "lost": ()},
    ),
    "fedmap": Case(lambda: methods.fedmap(mapped(), batch_size=2), {"clients": THETA, "loss": ()}),
    "fedmap convex": Case(
        lambda: methods.fedmap(
            mapped(prior=InputConvex(hidden=2)), server="gradient", server_optimizer=SGD(0.01)
        )
    ),
    "fedmap normal": Case(
        lambda: methods.fedmap(
            mapped(prior=LearnedNormal()),
            server=LearnedNormal().best,
            weights="rows",
            init="client",
        )
    ),
    "fedmap newton": Case(lambda: methods.fedmap(mapped(), newton_steps=1)),
    "fedpa": Case(
        lambda: methods.fedpa(shared(), epochs=3, shrinkage=0.2, batch_size=2),
        {"moved": THETA, "loss": ()},
    ),
    "fedpac": Case(
        _fedpac,
        {
            "theta": FIRST,
            "classes": {"total": (2, 3), "count": (2,)},
            "head": {"theta.2.weight": (2, 3), "theta.2.bias": (2,), "h": (2, 3), "v": ()},
            "loss": (),
        },
    ),
    "fedpop": Case(
        partial(_fedpop, step_size=1e-3, batch_size=2),
        {"gradient": THETA, "loss": (), "stiffness": ()},
    ),
    "fedpop corrected": Case(partial(_fedpop, step_size=0.02, metropolis=True)),
    "fedrecon": Case(
        lambda: methods.fedrecon(
            shared(), **LAST, body_optimizer=SGD(0.05), server_optimizer=Adam(0.05)
        ),
        BODY,
    ),
    "fedrep": Case(lambda: methods.fedrep(shared(), **LAST, head_steps=2), BODY),
    "fedrep joint": Case(lambda: methods.fedrep(shared(), **LAST, joint=True), BODY),
    **{
        f"fedsvi {name}": Case(
            partial(methods.fedsvi, regression, FAMILIES[name]),
            {"gradient": CROSSES[name], "elbo": ()},
        )
        for name in CROSSES
    },
    "fedsvi natural": Case(
        lambda: methods.fedsvi(regression, merge="natural", global_steps=2, batch_size=2)
    ),
    "fedsvi wasserstein": Case(
        lambda: methods.fedsvi(regression, FAMILIES["mean_field"], merge="wasserstein")
    ),
    "fedvi": Case(
        lambda: methods.fedvi(embedded(), hidden=4), {"move": HEADS, "loss": (), "kl": ()}
    ),
    "fola": Case(
        lambda: methods.fola(common(), **SMALL, steps=3, fisher_rows=2),
        {"shift": LINE, "precision": LINE, "rows": (), "loss": ()},
    ),
    "fedwba": Case(
        lambda: methods.fedwba(personal_alone(), particles=3, steps=2, batch_size=2),
        {"particles": (3, 13), "loss": ()},
    ),
    "heur_fedamp": Case(lambda: methods.heur_fedamp(shared(), **SMALL), {"w": THETA, "loss": ()}),
    "ifca": Case(
        lambda: methods.ifca(shared(), clusters=2, optimizer=SGD(0.05), steps=3),
        {
            "mine": {**{name: (2, *shape) for name, shape in THETA.items()}, "share": (2,)},
            "loss": (),
        },
    ),
    "knn_per": Case(
        _knn_per, {"theta": {**FIRST, "theta.2.weight": (2, 3), "theta.2.bias": (2,)}, "loss": ()}
    ),
    "local_only": Case(lambda: methods.local_only(shared(), batch_size=2), {"loss": ()}),
    **{
        f"per_fedavg {meta}": Case(
            lambda meta=meta: methods.per_fedavg(  # type: ignore[misc]
                shared(),
                inner_optimizer=SGD(0.1),
                optimizer=SGD(0.05),
                meta=meta,
                steps=2,
                batch_size=2,
            ),
            MODEL,
        )
        for meta in ("first", "hessian-free", "full")
    },
    "pfedbayes": Case(_pfedbayes, PRIOR),
    "pfedbred": Case(_pfedbred, MODEL),
    **{f"pfedbred {s}": Case(partial(_pfedbred, s)) for s in ("lg", "mh24", "mh-code")},
    "pfedgp": Case(
        lambda: methods.pfedgp(process(), steps=2, batch_size=2),
        {"theta": {**FIRST, "theta.2.weight": (1, 3), "theta.2.bias": (1,), **KERNEL}, "loss": ()},
    ),
    "pfedgp classes": Case(
        lambda: methods.pfedgp(process(classes=2, y="ill"), steps=1, unit="epoch", batch_size=2)
    ),
    "pfedhb": Case(
        lambda: methods.pfedhb(
            personal(prior_scale="learned"), **SMALL, steps=1, draws=2, mean_penalty=0.5
        ),
        {"moments": THETA, "loss": ()},
    ),
    "pfedhn": Case(
        lambda: methods.pfedhn(shared(), optimizer=SGD(0.05, 0.9), steps=3, batch_size=2),
        {"away": THETA, "loss": ()},
    ),
    "pfedme": Case(_pfedme, MODEL),
    "pfedvem": Case(
        lambda: methods.pfedvem(
            personal(local=["2"], prior_scale="client"),
            **SMALL,
            base_optimizer=SGD(0.05),
            head_steps=2,
            steps=2,
            draws=2,
        ),
        {
            "head": {"theta.2.weight": (1, 3), "theta.2.bias": (1,)},
            "base": FIRST,
            "loss": (),
            "rho": (),
        },
    ),
    "pvi": Case(lambda: methods.pvi(logistic, draws=2, steps=1), {**FACTOR, "improper": ()}),
    "pvi renyi": Case(lambda: methods.pvi(logistic, draws=2, steps=1, divergence="renyi")),
    "pvi beta": Case(lambda: methods.pvi(common(), draws=2, steps=1, loss="beta")),
    "qlsd": Case(
        lambda: methods.qlsd(common(), levels=None, burn_in=0.0, draws=2),
        {"gradient": (3,), "loss": ()},
    ),
    "qlsd rounded": Case(lambda: methods.qlsd(common(), batch_size=2, draws=5)),
    "scaffold": Case(
        lambda: methods.scaffold(shared(), optimizer=SGD(0.05), steps=3, batch_size=2),
        {"moved": THETA, "corrected": THETA, "joined": {"clients": (), "weight": ()}, "loss": ()},
    ),
    "scaffold rows": Case(
        lambda: methods.scaffold(
            shared(), optimizer=SGD(0.05), steps=3, batch_size=2, weights="rows"
        )
    ),
    "two_stage": Case(
        lambda: methods.two_stage(regression, draws=100),
        {
            "factor": {
                **{"precision": (2, 2), "shift": (2,), "height": ()},
                **{"num_rows": (), "square": ()},  # its likelihood is Normal
            },
            "raised": (),
            "misread": (),
        },  # D = 2, U = 0
        compiled=False,  # inductor lowers no step of it
    ),
    # wrappers
    "averaging_some": Case(lambda: methods.averaging_some(_pfedbred(), share=0.5)),
    "batch_normed": Case(
        lambda: methods.batch_normed(
            methods.ditto(
                models.network(normalizing(), likelihood=models.likelihood.normal(1.0)),
                batch_size=2,
            )
        )
    ),
    "by_rows": Case(lambda: methods.by_rows(_pfedme())),
    "differentially_private": Case(
        lambda: methods.differentially_private(
            _fedavg(), clipping_norm=0.1, noise_multiplier=0.5, secret=1
        )
    ),
    "differentially_private pvi": Case(
        lambda: methods.differentially_private(
            methods.pvi(logistic, draws=2, steps=1),
            clipping_norm=0.5,
            noise_multiplier=0.5,
            secret=1,
        )
    ),
    **{
        f"fine_tuned {strategy}": Case(partial(_tuned, strategy))
        for strategy in ("none", "mh", "mh-code")
    },
    "over_relaxed": Case(lambda: methods.over_relaxed(_fedavg(optimizer=SGD(0.05, 0.9), steps=3))),
    "quantized": Case(lambda: methods.quantized(_ditto())),
    "robust": Case(lambda: methods.robust(_pfedme(), rule="clipped")),
    "server_optimized": Case(lambda: methods.server_optimized(_fedavg(), SGD(0.5, 0.9))),
}
METHODS: dict[str, Callable[[], Method]] = {name: case.make for name, case in CASES.items()}


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
