"""Write the numbers of small fits of every method to a file, or compare two such files bit for bit.

    python tests/same_numbers.py write before.npz    in a checkout of the old code
    python tests/same_numbers.py write after.npz     in one of the new code, on the same machine
    python tests/same_numbers.py compare before.npz after.npz

The file uses public names only, so one copy runs in both checkouts (put the checkout first on
PYTHONPATH). Fits are in float64, seeded, and eager unless their name ends in "compiled". For each
fit these are compared: the server's state, every client's state, the history (without seconds),
draws of the posterior, predictions, and clients that join afterwards.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

import hierfl
from hierfl import ClientBatch, ClientData, Method, guides, methods, models


def regression(batch: ClientBatch) -> None:
    """Slopes by client with an unknown spread; their mean depends on a client field."""
    loc = pyro.sample("loc", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    spread = pyro.sample("spread", dist.HalfNormal(1.0))
    lift = pyro.sample("lift", dist.Normal(0.0, 1.0))
    with batch.clients():
        slope = pyro.sample(
            "slope", dist.Normal(loc + lift * batch.height[..., None], spread).to_event(1)
        )
        with batch.data():
            pyro.sample("y", dist.Normal((batch.x * slope).sum(-1), 1.0), obs=batch.y)


def clients(counts: tuple[int, ...], prefix: str, seed: int) -> ClientData:
    """Return clients of unequal row counts with x (2,), y and a client field."""
    generator = torch.Generator().manual_seed(seed)
    n = sum(counts)
    x = torch.randn(n, 2, generator=generator)
    return ClientData.from_arrays(
        torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)),
        names=tuple(f"{prefix}{i}" for i in range(len(counts))),
        client_fields={"height": torch.randn(len(counts), generator=generator)},
        x=x,
        y=x.sum(-1) + torch.randn(n, generator=generator),
    )


def net() -> torch.nn.Module:
    """Return a small network, with the same weights at each call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))


def batch_normed() -> torch.nn.Module:
    """Return a small network with batch norm."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return torch.nn.Sequential(
            torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)
        )


def embedding() -> Any:
    """Return a model with personal heads."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        body = torch.nn.Linear(2, 7)
        return models.PersonalHeads(
            body, outputs=1, features=7, local_features=2, likelihood=models.likelihood.normal(1.0)
        )


def common() -> Any:
    """Return a network that all clients share."""
    return models.network(net(), likelihood=models.likelihood.normal(1.0))


def personal(scale: Any = 1.0) -> Any:
    """Return a network per client; the prior mean of its weights is learned."""
    return models.bayesian_network(
        net(), prior_loc="learned", prior_scale=scale, likelihood=models.likelihood.normal(1.0)
    )


def mapped(prior: Any = None) -> Any:
    """Return FedMAP's network."""
    options = {} if prior is None else {"prior": prior}
    return models.learned_prior_network(net(), likelihood=models.likelihood.normal(1.0), **options)


SMALL: dict[str, Any] = {"steps": 3, "batch_size": 2}
TUNED: dict[str, Any] = {**SMALL, "unit": "step"}
FAMILIES = {
    "delta": guides.delta,
    "mean_field": guides.mean_field,
    "low_rank": guides.low_rank(rank=2),
    "structured": guides.structured,
    "structured_flow": guides.structured(shared=guides.spline_flow, full=False),
    "conditional": guides.conditional,
    "amortized": guides.amortized(hidden=4),
    "unrolled": guides.unrolled(steps=2),
}
BREDS = ("none", "lg", "meg", "mh", "mh24", "mh-code")


def bred(strategy: Any) -> Method:
    """Return pFedBreD with one of its strategies."""
    return methods.pfedbred(personal(), strategy, **SMALL)


def mirror_tuned(method: Method, steps: int) -> Method:
    """Return a method of pFedBreD with its fine-tuning, "+FT" of the paper."""
    return methods.fine_tuned(
        method, steps=steps, unit="step", batch_size=2, when="every round", mirror=True
    )


CASES: dict[str, Callable[[], Method]] = {
    **{
        f"fedsvi {name}": partial(methods.fedsvi, regression, guide=guide)
        for name, guide in FAMILIES.items()
    },
    "fedsvi local steps": lambda: methods.fedsvi(
        regression, batch_size=2, local_steps=1, global_steps=2, draws=2
    ),
    "fedlaplace": lambda: methods.fedlaplace(
        regression, settle_draws=8, draws=64, target_ess=8, weighting_rounds=1
    ),
    "pvi": lambda: methods.pvi(regression, draws=2, steps=2),
    "bfi": lambda: methods.bfi(regression, steps=2),
    "fedavg": lambda: methods.fedavg(common(), **SMALL),
    "fedavg epochs": lambda: methods.fedavg(common(), steps=2, unit="epoch", batch_size=2),
    "fedavg +FT": lambda: methods.fine_tuned(methods.fedavg(common(), **SMALL), **TUNED),
    "fedavg +AM": lambda: methods.over_relaxed(methods.fedavg(common(), **SMALL), 2.0),
    "fedprox +AM +FT": lambda: methods.over_relaxed(
        methods.fine_tuned(methods.fedavg(common(), prox=0.1, **SMALL), **TUNED), 1.5
    ),
    "fedbn": lambda: methods.fedbn(
        models.batch_norm_network(batch_normed(), likelihood=models.likelihood.normal(1.0))
    ),
    "ditto": lambda: methods.ditto(common(), prox=0.5, **SMALL),
    "local_only": lambda: methods.local_only(common(), **SMALL),
    "pfedme": lambda: methods.pfedme(personal(), **SMALL),
    "pfedme +AM": lambda: methods.over_relaxed(methods.pfedme(personal(), **SMALL), 2.0),
    "pfedbayes": lambda: methods.pfedbayes(personal("learned"), draws=2, **SMALL),
    "pfedbayes +AM": lambda: methods.over_relaxed(
        methods.pfedbayes(personal("learned"), **SMALL), 2.0
    ),
    "fedabml": lambda: methods.fedabml(
        personal("learned"), steps=2, batch_size=2, draws=2, inner_steps=2
    ),
    "fedabml by rows": lambda: methods.over_relaxed(
        methods.by_rows(methods.fedabml(personal("learned"), **SMALL)), 1.5
    ),
    "fedabml first": lambda: methods.fedabml(personal("learned"), meta="first", draws=1, **SMALL),
    "fedabml full": lambda: methods.fedabml(personal("learned"), meta="full", draws=1, **SMALL),
    "fedabml exact": lambda: methods.fedabml(personal("learned"), server="exact", **SMALL),
    "fedabml exact +AM": lambda: methods.over_relaxed(
        methods.by_rows(methods.fedabml(personal("learned"), server="exact", **SMALL)), 1.5
    ),
    **{f"pfedbred {name}": partial(bred, name) for name in BREDS},
    "pfedbred exact jacobian": lambda: methods.pfedbred(
        personal(), "mh", jacobian="exact", **SMALL
    ),
    "pfedbred global prox": lambda: methods.pfedbred(
        personal(), "meg", inner_start="global", **SMALL
    ),
    "pfedbred moved prox": lambda: methods.pfedbred(personal(), "lg", inner_start="moved", **SMALL),
    "pfedbred +FT": lambda: mirror_tuned(bred("mh"), 2),
    "pfedbred +AM by rows": lambda: methods.over_relaxed(methods.by_rows(bred("mh")), 2.0),
    "pfedbred averaged": lambda: methods.averaging_some(bred("mh"), share=0.5),
    "pfedbred averaged by rows +FT": lambda: mirror_tuned(
        methods.averaging_some(methods.by_rows(bred("mh-code")), share=0.5), 1
    ),
    "fedmap": lambda: methods.fedmap(mapped(), steps=2, batch_size=2),
    "fedmap gradient": lambda: methods.fedmap(
        mapped(models.learned_priors.LearnedVariance()), server="gradient", steps=2
    ),
    "fedmap likelihood": lambda: methods.fedmap(
        mapped(), weights="mean-likelihood", init="client", restart="global", steps=2
    ),
    "fedvi": lambda: methods.fedvi(embedding(), hidden=4, batch_size=4),
}
WAYS: dict[str, dict[str, Any]] = {
    "": {"compile": False},
    "cohort": {"compile": False, "cohort": 3},
    "sequential": {"compile": False, "engine": "sequential", "cohort": 3},
    "compiled": {"compile": True},
}
COMPILED = (
    "fedavg",
    "fedavg +FT",
    "pfedme +AM",
    "pfedbred averaged",
    "fedsvi structured",
    "fedabml by rows",
)


def leaves(where: str, tree: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every tensor of a nested tree with its path."""
    for path, leaf in tree_flatten_with_path(tree)[0]:
        if isinstance(leaf, torch.Tensor):
            yield where + keystr(path), leaf.detach().numpy()


def numbers(name: str, method: Method, options: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every number that a fit of a method produces."""
    train, new = clients((5, 3, 7, 4), "a", 0), clients((4, 2), "b", 8)
    if method.everyone and "cohort" in options:
        options = {**options, "cohort": None}
    if hasattr(hierfl, "Settings"):  # an old checkout has no such class
        flat = {k: options[k] for k in options if k != "cohort"}
        options = {"cohort": options.get("cohort"), "settings": hierfl.Settings(**flat)}
    fit = hierfl.fit(method, train, rounds=3, seed=4, progress=False, **options)
    yield from leaves("server", fit.progress.server)
    yield from leaves("clients", fit.progress.table)
    for column in fit.history:
        if column != "seconds":
            yield f"history.{column}", fit.history[column].to_numpy(dtype=np.float64)
    if fit.program.latents.sites:
        draws = fit.draws(4, seed=2)
        yield from leaves("draws", {"shared": draws.shared, "own": draws.own})
    found = fit.predict(train, draws=4)
    yield from leaves("predicted", {"mean": found.mean, "log_score": found.log_score})
    joined = fit.personalize(new, rounds=2)
    yield from leaves("joined", joined.progress.table)
    yield from leaves("joined.predicted", {"mean": joined.predict(new, draws=4).mean})


def write(path: str) -> None:
    """Fit every method and write the numbers to `path`."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[str, np.ndarray] = {}
    for way, options in WAYS.items():
        for name, make in CASES.items():
            if way == "compiled" and name not in COMPILED:
                continue
            for key, value in numbers(name, make(), options):
                found[f"{name} | {way} | {key}"] = value
    np.savez_compressed(
        path, allow_pickle=False, **{key.replace("/", "_"): value for key, value in found.items()}
    )
    print(f"{len(found)} arrays of {len(CASES)} methods in {len(WAYS)} ways: {path}")


def compare(one: str, other: str) -> int:
    """Print what differs between two files; return 0 where nothing does."""
    a, b = np.load(one), np.load(other)
    missing = sorted(set(a.files) ^ set(b.files))
    same = sorted(set(a.files) & set(b.files))
    differ = [
        key
        for key in same
        if a[key].dtype != b[key].dtype or not np.array_equal(a[key], b[key], equal_nan=True)
    ]
    for key in missing:
        print("only in one:", key)
    for key in differ:
        print(
            "differs:",
            key,
            np.abs(a[key] - b[key]).max()
            if a[key].shape == b[key].shape
            else (a[key].shape, b[key].shape),
        )
    print(
        f"{len(same) - len(differ)} of {len(same)} arrays are equal bit for bit; {len(missing)} "
        f"are in one file alone"
    )
    return int(bool(missing or differ))


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "write":
        write(sys.argv[2])
    elif len(sys.argv) == 4 and sys.argv[1] == "compare":
        sys.exit(compare(*sys.argv[2:]))
    else:
        sys.exit(__doc__)
