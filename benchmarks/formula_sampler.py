"""NUTS of a formula's printed program by NumPyro.

Run `python -m benchmarks.formula_sampler PROGRAM ROWS OUT [options]`.

PROGRAM is the text that `Formula.program` prints, ROWS a NumPy archive of the rows, padded to
(clients, rows). OUT gets the mean, sd and Monte Carlo standard error of each site. The text is run
as it is: names of torch and Pyro stand for their counterparts in JAX and NumPyro, so that sampler,
automatic derivatives and densities are others than hierfl's. `benchmarks.formulas` runs it; it
imports neither torch nor hierfl.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.formula_sampler")
    parser.add_argument("program")
    parser.add_argument("rows")
    parser.add_argument("out")
    parser.add_argument("--warmup", type=int, default=1000)
    parser.add_argument("--draws", type=int, default=4000)
    parser.add_argument("--chains", type=int, default=2)
    parser.add_argument("--accept", type=float, default=0.95, help="acceptance that is aimed at")
    parser.add_argument("--dense", action="store_true", help="adapt to correlations of all sites")
    parser.add_argument(
        "--apart", nargs="*", default=[], help="sites that are sampled non-centered"
    )
    args = parser.parse_args()
    import jax
    import numpyro

    jax.config.update("jax_enable_x64", True)
    numpyro.set_host_device_count(args.chains)
    with np.load(args.rows) as kept:
        rows = dict(kept)
    with open(args.program) as file:
        model = non_centered(program(file.read()), args.apart)
    np.savez(args.out, **sampled(model, rows, args))


def sampled(model: Any, rows: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Run NUTS and summarize each site."""
    import jax
    from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
    from numpyro.infer import MCMC, NUTS, init_to_median

    began = time.perf_counter()
    kernel = NUTS(
        model,
        target_accept_prob=args.accept,
        init_strategy=init_to_median(),
        dense_mass=args.dense,
    )
    run = MCMC(
        kernel,
        num_warmup=args.warmup,
        num_samples=args.draws,
        num_chains=args.chains,
        progress_bar=False,
    )
    run.run(jax.random.PRNGKey(0), SimpleNamespace(**batch(rows)))
    draws = {name: np.asarray(v) for name, v in run.get_samples(group_by_chain=True).items()}
    found: dict[str, Any] = {"seconds": time.perf_counter() - began}
    found["diverging"] = float(run.get_extra_fields()["diverging"].mean())
    worst, fewest = 1.0, np.inf
    for name, value in draws.items():
        effective = np.asarray(effective_sample_size(value))
        spread = value.std((0, 1))
        moving = spread > 1e-8  # the diagonal of a correlation matrix moves by rounding
        found[f"{name}/mean"], found[f"{name}/sd"] = value.mean((0, 1)), spread
        found[f"{name}/mcse"] = np.where(moving, spread / np.sqrt(np.maximum(effective, 1.0)), 0.0)
        if moving.any():
            worst = max(worst, float(np.asarray(split_gelman_rubin(value))[moving].max()))
            fewest = min(fewest, float(effective[moving].min()))
    return found | {"r_hat": worst, "effective": fewest}


def non_centered(model: Any, sites: list[str]) -> Any:
    """Return the program with some Normal sites drawn as standard Normal ones, which leaves its density the same."""
    import numpyro.distributions as dist
    from numpyro.handlers import reparam
    from numpyro.infer.reparam import LocScaleReparam, TransformReparam

    def config(site: dict[str, Any]) -> Any:
        if site["type"] != "sample" or site["name"] not in sites:
            return None
        fn = site["fn"]
        while isinstance(fn, dist.Independent | dist.ExpandedDistribution):
            fn = fn.base_dist
        return (
            TransformReparam()
            if isinstance(fn, dist.TransformedDistribution)
            else LocScaleReparam(0)
        )

    return reparam(model, config=config)


def correlated(loc: Any, scale_tril: Any) -> Any:
    """Return a multivariate Normal distribution as a map of a standard one, so that it can be drawn non-centered."""
    import numpyro.distributions as dist
    from jax import numpy as jnp

    shape = jnp.broadcast_shapes(jnp.shape(loc), jnp.shape(scale_tril)[:-1])
    standard = dist.Normal(0.0, 1.0).expand(shape).to_event(1)
    place = dist.transforms.LowerCholeskyAffine(jnp.broadcast_to(loc, shape), scale_tril)
    return dist.TransformedDistribution(standard, place)


def categorical(logits: Any) -> Any:
    """Return classes, whose numbers may be floats."""
    import numpyro.distributions as dist

    class Classes(dist.CategoricalLogits):  # type: ignore[misc]
        """Classes 0, 1, ..."""

        def log_prob(self, value: Any) -> Any:
            """Return the log probabilities."""
            return super().log_prob(value.astype(int))

    return Classes(logits)


def batch(rows: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a batch, with its plates."""
    import jax.numpy as jnp
    import numpyro

    present = rows.pop("present")
    clients, width = present.shape

    @contextmanager
    def data() -> Iterator[None]:
        with numpyro.plate("data", width, dim=-1), numpyro.handlers.mask(mask=jnp.asarray(present)):
            yield

    fields = {name: jnp.asarray(value) for name, value in rows.items()}
    return {**fields, "clients": lambda: numpyro.plate("clients", clients, dim=-2), "data": data}


def program(text: str) -> Any:
    """Return the printed program as a function of NumPyro's primitives."""
    import jax
    import numpyro
    import numpyro.distributions as dist
    from jax import numpy as jnp
    from jax.scipy.special import gammaln

    from benchmarks.numpyro_families import FAMILIES

    def pad(x: Any, sizes: tuple[int, int]) -> Any:
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [sizes])

    torch = SimpleNamespace(
        nn=SimpleNamespace(functional=SimpleNamespace(pad=pad)),
        tensor=jnp.array,
        zeros=lambda *shape: jnp.zeros(
            shape[0] if shape and isinstance(shape[0], tuple) else shape
        ),
        stack=lambda parts, dim=0: jnp.stack(parts, dim),
        cat=lambda parts, dim=0: jnp.concatenate(parts, dim),
        broadcast_tensors=lambda *parts: jnp.broadcast_arrays(*parts),
        lgamma=gammaln,
        exp=jnp.exp,
        log=jnp.log,
        sqrt=jnp.sqrt,
        sign=jnp.sign,
        linalg=SimpleNamespace(qr=jnp.linalg.qr),
        take_along_dim=jnp.take_along_axis,
        arange=jnp.arange,
        atan=jnp.arctan,
        sigmoid=jax.nn.sigmoid,
        softmax=jax.nn.softmax,
    )
    families = SimpleNamespace(**vars(FAMILIES), Weibull=dist.Weibull, Censored=censored)
    named = {name: getattr(dist, name) for name in dir(dist) if name[0].isupper()}
    replaced = {"MultivariateNormal": correlated, "Categorical": categorical}
    priors = SimpleNamespace(**{**named, **replaced})
    scope: dict[str, Any] = {"pyro": numpyro, "dist": priors, "torch": torch, "families": families}
    body = text[text.index("def model") :]
    # of a log Weibull time; JAX's arrays have no method exp
    mean = "eta - torch.lgamma(1 + 1 / shape)"
    body = body.replace(f"({mean}).exp()", f"torch.exp({mean})")
    exec(methods_as_functions(body), scope)
    return scope["model"]


def methods_as_functions(body: str) -> str:
    """Return a program whose methods of tensors, which JAX's arrays lack, are functions."""
    body = re.sub(r"(\w+|\(-\w+\))\.(exp|atan|log|sigmoid)\(\)", r"torch.\2(\1)", body)
    body = re.sub(r"\w+\.new_tensor\(", "torch.tensor(", body)
    body = re.sub(r"= \((.+)\)\.sqrt\(\)$", r"= torch.sqrt(\1)", body, flags=re.MULTILINE)
    body = body.replace(").rsqrt()", ") ** -0.5")
    body = body.replace("upper.diagonal().sign()", "torch.sign(upper.diagonal())")
    body = body.replace("lower.square().sum(-1).sqrt()", "torch.sqrt((lower**2).sum(-1))")
    padded = "torch.nn.functional.pad(eta, (1, 0))"
    return body.replace(f"{padded}.softmax(-1)", f"torch.softmax({padded})")


def censored(base: Any, cens: Any) -> Any:
    """Return Weibull or log-normal times, of which some are right-censored: log f(t) or log S(t)."""
    import numpyro.distributions as dist
    from jax import numpy as jnp
    from jax.scipy.special import log_ndtr

    def log_survival(value: Any) -> Any:
        if isinstance(base, dist.Weibull):
            return -((value / base.scale) ** base.concentration)
        return log_ndtr((base.loc - jnp.log(value)) / base.scale)

    class Times(dist.Distribution):  # type: ignore[misc]
        """Times; log densities alone."""

        support = dist.constraints.positive

        def log_prob(self, value: Any) -> Any:
            """Return log f of observed times, log S of censored ones."""
            return jnp.where(cens == 1, log_survival(value), base.log_prob(value))

    return Times(batch_shape=jnp.broadcast_shapes(base.batch_shape, jnp.shape(cens)))


if __name__ == "__main__":
    main()
