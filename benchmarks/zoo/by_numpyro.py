"""NUTS of NumPyro on a program of the zoo: `python -m benchmarks.zoo.by_numpyro NAME ROWS OUT`.

The program's file is imported as it is, with modules of JAX and NumPyro in the place of torch and
Pyro, so that sampler, derivatives and densities are others than hierfl's. What NumPyro does not have
is written in another way in `for_numpyro(batch)`. ROWS is a NumPy archive of
the rows, padded to (clients, rows). OUT gets, in JSON, the mean and sd of each number of each site.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

METHODS = ("exp", "log", "sqrt", "square", "abs", "sigmoid", "softmax", "log1p", "expm1")


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo.by_numpyro")
    parser.add_argument("name")
    parser.add_argument("rows")
    parser.add_argument("out")
    parser.add_argument("--warmup", type=int, default=500)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--accept", type=float, default=0.95, help="acceptance that is aimed at")
    args = parser.parse_args()
    import jax
    import numpyro

    jax.config.update("jax_enable_x64", True)
    numpyro.enable_validation(False)  # of draws of vague priors, whose shapes alone are read
    sys.modules.update(modules := stand_ins())
    program = importlib.import_module(f"benchmarks.zoo.programs.{args.name}")
    for name in modules:  # funsor asks whether torch is there
        del sys.modules[name]
    with np.load(args.rows) as archive:
        rows = dict(archive)
    with open(args.out, "w") as file:
        json.dump(sampled(program, batch(rows), args), file)


def stand_ins() -> dict[str, Any]:
    """Return modules under the names of torch's and Pyro's."""
    import jax
    import numpyro
    import numpyro.distributions as dist
    from jax import numpy as jnp
    from jax._src import core  # methods of arrays have no public way in
    from numpyro.contrib.funsor import config_enumerate
    from numpyro.infer import reparam

    def of_shape(make: Any) -> Any:
        def made(*shape: Any, dtype: Any = None) -> Any:
            return make(shape[0] if shape and isinstance(shape[0], tuple) else shape, dtype)

        return made

    def sample(name: str, fn: Any, obs: Any = None, obs_mask: Any = None, **more: Any) -> Any:
        if obs_mask is None:
            return numpyro.sample(name, fn, obs=obs, **more)
        drawn = numpyro.sample(f"{name}_unobserved", fn)  # a mask would leave it no prior
        numpyro.sample(f"{name}_observed", fn.mask(obs_mask), obs=obs)
        return numpyro.deterministic(name, jnp.where(obs_mask, obs, drawn))

    torch, pyro, families = ModuleType("torch"), ModuleType("pyro"), ModuleType("dist")
    functions = {"sigmoid": jax.nn.sigmoid, "softmax": jax.nn.softmax, "tensor": jnp.array}
    functions |= {"zeros": of_shape(jnp.zeros), "ones": of_shape(jnp.ones)}
    functions |= {"lgamma": jax.scipy.special.gammaln, "erf": jax.scipy.special.erf}
    for name, function in {**vars(jnp), **functions}.items():
        setattr(torch, name, function)
    torch.stack = lambda arrays, dim=0: jnp.stack(arrays, dim)  # type: ignore[attr-defined]
    torch.cat = lambda arrays, dim=0: jnp.concatenate(arrays, dim)  # type: ignore[attr-defined]
    torch.logsumexp = jax.nn.logsumexp  # type: ignore[attr-defined]
    torch.nn = SimpleNamespace(functional=jax.nn)  # type: ignore[attr-defined]
    vars(torch).update(long=int, Size=tuple)
    poutine = SimpleNamespace(**vars(numpyro.handlers))
    infer = SimpleNamespace(config_enumerate=config_enumerate)
    vars(pyro)["poutine"] = poutine
    vars(pyro).update(vars(numpyro), markov=lambda steps, **_: steps, distributions=families)
    vars(pyro)["sample"] = sample
    vars(families).update(vars(dist), StudentT=dist.StudentT)
    for name in METHODS:
        method = functions.get(name) or getattr(jnp, name)
        setattr(core.ShapedArray, name, core.aval_method(method))
        setattr(type(jnp.zeros(())), name, method)
    modules: dict[str, Any] = {"torch": torch, "pyro": pyro, "pyro.distributions": families}
    modules |= {"pyro.distributions.transforms": dist.transforms, "pyro.infer": infer}
    return {**modules, "pyro.infer.reparam": reparam}


def batch(rows: dict[str, Any]) -> SimpleNamespace:
    """Return the fields of a batch, with its plates; padding masks what is observed."""
    import numpyro

    present = rows.pop("present")
    clients, width = present.shape

    class Masked(numpyro.primitives.Messenger):  # type: ignore[misc]
        """Leaves padded rows out of what is observed."""

        def process_message(self, msg: dict[str, Any]) -> None:
            if msg["type"] == "sample" and msg["is_observed"]:
                msg["fn"] = msg["fn"].mask(present)

    @contextmanager
    def data() -> Iterator[None]:
        with numpyro.plate("data", width, dim=-1), Masked():
            yield

    plates = {"clients": lambda: numpyro.plate("clients", clients, dim=-2), "data": data}
    sizes = {"num_clients": clients, "num_rows": width}
    return SimpleNamespace(**{n: as_given(v) for n, v in rows.items()}, **plates, **sizes)


def as_given(values: np.ndarray) -> Any:
    """Return a field as JAX's array."""
    from jax import numpy as jnp

    return jnp.asarray(values)


def non_centered(model: Any) -> Any:
    """Return a program whose Normal sites of clients and rows are drawn as standard Normal ones."""
    import numpyro.distributions as dist
    from numpyro.handlers import reparam
    from numpyro.infer.reparam import LocScaleReparam

    def config(site: dict[str, Any]) -> Any:
        fn = site["fn"]
        while isinstance(fn, dist.Independent | dist.ExpandedDistribution):
            fn = fn.base_dist
        is_local = bool(site["cond_indep_stack"]) and not site["is_observed"]
        is_centered = is_local and not site["name"].endswith("_decentered")
        return LocScaleReparam(0) if is_centered and isinstance(fn, dist.Normal) else None

    return reparam(model, config=config)


def sampled(program: Any, rows: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Run two chains of NUTS, and summarize each site."""
    import jax
    from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
    from numpyro.infer import MCMC, NUTS, init_to_uniform

    centered = getattr(program, "CENTERED", False)
    model = getattr(program, "for_numpyro", program.model)
    kernel = NUTS(
        model if centered else non_centered(model),
        target_accept_prob=args.accept,
        init_strategy=init_to_uniform(radius=1.0),  # medians of vague priors are nowhere
        dense_mass=getattr(program, "DENSE", False),
    )
    run = MCMC(
        kernel,
        num_warmup=args.warmup,
        num_samples=args.draws,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    began = time.process_time()
    run.run(jax.random.PRNGKey(0), rows)
    draws = {n: np.asarray(v) for n, v in run.get_samples(group_by_chain=True).items()}
    seconds = time.process_time() - began
    sites, fewest, worst = {}, np.inf, 1.0
    for name, value in draws.items():
        if name.endswith("_decentered"):
            continue
        if value.shape[-2:] == (rows.num_clients, 1):  # clients first, as in a fit
            value = np.moveaxis(value, -2, 2)
        value = np.log(value) if name in getattr(program, "LOGS", ()) else value
        sd = value.std((0, 1))
        moving = sd > 1e-8
        sites[name] = {"mean": value.mean((0, 1)).ravel().tolist(), "sd": sd.ravel().tolist()}
        if moving.any():
            fewest = min(fewest, float(effective_sample_size(value)[moving].min()))
            worst = max(worst, float(split_gelman_rubin(value)[moving].max()))
    diverging = int(run.get_extra_fields()["diverging"].sum())
    quality = {"effective": round(fewest), "r_hat": round(worst, 3), "diverging": diverging}
    return {"seconds": round(seconds, 1), **quality, "sites": sites}


if __name__ == "__main__":
    main()
