"""Posteriors of the recipes by pooled NUTS, kept in `recipe_nuts.json`.

`python -m benchmarks.recipe_nuts NAME ...` runs them; a name is a script's, or
`missing_covariates:imputed`.

Each site's mean, sd, and the largest Monte Carlo error of a mean in posterior sds, one over the
root of the effective draws. Sites of a small scale are sampled non-centered, or NUTS would be stuck
near 0; it is the same posterior. Sites with tails as heavy as a half-Cauchy's, which have no mean,
are stored as logarithms (`LOGS`).

Recipes of `IN_NUMPYRO` have a twin that NumPyro samples, since Pyro's NUTS takes hours: set
`HIERFL_NUMPYRO` to a Python that has NumPyro.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyro
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS
from pyro.infer.mcmc.util import initialize_model
from pyro.infer.reparam import LocScaleReparam
from pyro.ops.stats import effective_sample_size, split_gelman_rubin
from torch import Tensor
from torch._inductor.exc import InductorError
from torch.fx.experimental.proxy_tensor import make_fx

import hierfl
from benchmarks import pooled_nuts

ROOT = Path(__file__).parents[1]
STORED = Path(__file__).with_name("recipe_nuts.json")
NON_CENTERED = {  # recipe -> the sites that NUTS samples non-centered
    "autoregression": ("inertia",),
    "frailty": ("frailty",),
    "gaussian_process": ("level",),
    "group_level_predictor": ("level",),
    "missing_covariates": ("level",),
    "missing_covariates:imputed": ("level",),
    "network_meta_analysis": ("deviation",),
    "three_levels": ("region",),
}
IN_NUMPYRO = {"horseshoe"}
LOGS = {"horseshoe": ("tau", "own", "c2")}
DRAWS, WARMUP, CHAINS = 1500, 400, 2
ACCEPT = (
    0.95  # with Pyro's 0.8, three levels came out 0.2 sd off and too narrow, at an R-hat of 1.002
)
DENSE = 70  # unknowns up to which NUTS adapts to their covariance


def recipe(name: str) -> ModuleType:
    """Return a script of examples/recipes as a module."""
    spec = importlib.util.spec_from_file_location(
        name, ROOT / "examples" / "recipes" / f"{name}.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sampled(
    model: Callable[[Any], None], data: hierfl.ClientData, non_centered: tuple[str, ...]
) -> dict[str, Tensor]:
    """Return draws of every latent site by NUTS, (chains, draws, ...), with clients where they have them.

    Args:
        model: the program.
        data: all clients' rows.
        non_centered: sites to be sampled non-centered.
    """
    batch = hierfl.full_batch(data)
    config: Any = {name: LocScaleReparam(centered=0.0) for name in non_centered}
    free = poutine.reparam(model, config=config)
    pyro.set_rng_seed(0)
    start, potential, transforms, _ = initialize_model(free, model_args=(batch,))
    shapes = {name: value.shape for name, value in start.items()}

    def unflatten(flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split([shape.numel() for shape in shapes.values()], -1)
        return {
            name: part.reshape((*flat.shape[:-1], *shape))
            for (name, shape), part in zip(shapes.items(), parts, strict=True)
        }

    flat = torch.cat([value.reshape(-1) for value in start.values()])
    both = torch.func.grad_and_value(lambda z: potential(unflatten(z)))
    fast = compiled(both, flat)
    chains = []
    for seed in range(CHAINS):
        pyro.set_rng_seed(seed)
        kernel = NUTS(
            potential_fn=lambda z: fast(z["z"]),
            full_mass=len(flat) <= DENSE,
            target_accept_prob=ACCEPT,
        )
        kernel.initial_params = {"z": 0.1 * torch.randn(len(flat))}
        run = MCMC(
            kernel,
            num_samples=DRAWS,
            warmup_steps=WARMUP,
            initial_params=kernel.initial_params,
            disable_progbar=True,
        )
        run.run()
        values = unflatten(run.get_samples()["z"])
        chains.append({name: transforms[name].inv(value) for name, value in values.items()})
    together = {name: torch.stack([chain[name] for chain in chains]) for name in chains[0]}
    return constrained(free, batch, together, non_centered)


def compiled(
    both: Callable[[Tensor], tuple[Tensor, Tensor]], at: Tensor
) -> Callable[[Tensor], Tensor]:
    """Return the potential as a compiled function with its gradient, several times as fast as Pyro's.

    Args:
        both: z -> (gradient, potential).
        at: a z to trace it at.
    """
    with pyro.validation_enabled(False):  # it reads values, which a trace does not have
        traced = make_fx(both)(at)
    graph = torch.compile(traced)
    try:
        graph(at)
    except InductorError:  # torch 2.13 does not lower the diagonal of a Cholesky factor
        graph = traced

    class Potential(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, z: Tensor) -> Tensor:
            with torch.no_grad():
                gradient, value = graph(z.detach())
            ctx.save_for_backward(gradient)
            return value.clone()

        @staticmethod
        def backward(ctx: Any, *outer: Tensor) -> Tensor:
            return outer[0] * ctx.saved_tensors[0]

    apply: Any = Potential.apply
    return lambda z: apply(z)


def constrained(
    free: Any, batch: Any, drawn: dict[str, Tensor], non_centered: tuple[str, ...]
) -> dict[str, Tensor]:
    """Return the draws with the non-centered sites as the program names them."""
    each: list[dict[str, Tensor]] = []
    for at in range(CHAINS * DRAWS):
        values = {name: value.flatten(0, 1)[at] for name, value in drawn.items()}
        nodes: dict[str, Any] = (
            poutine.trace(poutine.condition(free, values)).get_trace(batch).nodes
        )
        each.append({name: nodes[name]["value"] for name in non_centered})
    made = {
        name: torch.stack([values[name] for values in each]).unflatten(0, (CHAINS, DRAWS))
        for name in non_centered
    }
    return {n: v for n, v in drawn.items() if not n.endswith("_decentered")} | made


def summary(drawn: dict[str, Tensor]) -> dict[str, Any]:
    """Return each site's mean, sd and worst Monte Carlo error, as lists."""
    sites = {}
    for name, value in drawn.items():
        effective = effective_sample_size(value, chain_dim=0, sample_dim=1)
        mean, sd = value.flatten(0, 1).mean(0), value.flatten(0, 1).std(0)
        sites[name] = {
            "shape": list(mean.shape),
            "mean": [round(v, 5) for v in mean.flatten().tolist()],
            "sd": [round(v, 5) for v in sd.flatten().tolist()],
            "error": round(float(effective.min() ** -0.5), 4),
            "r_hat": round(float(split_gelman_rubin(value, 0, 1).max()), 4),
        }
    return sites


def run(name: str) -> dict[str, Any]:
    """Return the summary of a recipe's posterior by NUTS.

    Args:
        name: of the script, with `:program` behind it where that is another function than `model`.
    """
    file, _, model = name.partition(":")
    module = recipe(file)
    if name in IN_NUMPYRO:
        drawn = sampled_in_numpyro(file, module.data())
    else:
        program = getattr(module, model or "model")
        drawn = sampled(program, module.data(), NON_CENTERED.get(name, ()))
    return summary(on_their_scales(name, drawn))


def on_their_scales(name: str, drawn: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a recipe's draws with the logarithms of the sites that have no mean."""
    logs = LOGS.get(name, ())
    return {site: value.log() if site in logs else value for site, value in drawn.items()}


def sampled_in_numpyro(file: str, data: hierfl.ClientData) -> dict[str, Tensor]:
    """Return draws of every latent site by the recipe's twin in NumPyro, (chains, draws, ...).

    Args:
        file: the recipe's name; the twin is FILE_numpyro.py in this folder.
        data: all clients' rows.
    """
    client = np.repeat(np.arange(data.num_clients), data.counts.numpy())
    fields: dict[str, Any] = {name: value.numpy() for name, value in data.fields.items()}
    twin = Path(__file__).with_name(f"{file}_numpyro.py")
    with tempfile.TemporaryDirectory() as folder:
        rows, draws = Path(folder, "rows.npz"), Path(folder, "draws.npz")
        np.savez(rows, client=client, **fields)
        subprocess.run([pooled_nuts.python(), str(twin), str(rows), str(draws)], check=True)
        stored = np.load(draws)
        return {name: torch.from_numpy(stored[name]) for name in stored.files}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run NUTS for recipes, and put their summaries into recipe_nuts.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", metavar="NAME", help="a recipe")
    names = parser.parse_args(arguments).names
    torch.set_default_dtype(torch.float64)
    pyro.enable_validation(False)
    warnings.simplefilter("ignore")
    for name in names:
        began = time.perf_counter()
        sites = run(name)
        known = json.loads(STORED.read_text()) if STORED.exists() else {}
        STORED.write_text(json.dumps(dict(sorted({**known, name: sites}.items())), indent=0) + "\n")
        worst = max(site["error"] for site in sites.values())
        r_hat = max(site["r_hat"] for site in sites.values())
        seconds = time.perf_counter() - began
        print(f"{name}: error {worst:.3f} sd, R-hat {r_hat:.3f}, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
