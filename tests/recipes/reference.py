"""Posteriors of the recipes by pooled NUTS, kept in `nuts.json`: `python -m tests.recipes.reference NAME ...` runs them.

Each site's mean, sd, and the largest Monte Carlo error of a mean in posterior sds, one over the root of the effective
draws. Local sites are sampled non-centred, or NUTS would be stuck where their scale is small; it is the same posterior.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS
from pyro.infer.reparam import LocScaleReparam
from pyro.ops.stats import effective_sample_size, split_gelman_rubin
from torch import Tensor

import hierfl

ROOT = Path(__file__).parents[2]
STORED = Path(__file__).with_name("nuts.json")
NON_CENTRED = {  # recipe -> the sites that NUTS samples non-centred
    "autoregression": ("level", "inertia"),
    "frailty": ("frailty",),
    "gaussian_process": ("level",),
    "group_level_predictor": ("level",),
    "horseshoe": ("slope", "shift"),
    "measurement_error": ("shift",),
    "network_meta_analysis": ("deviation",),
    "ordinal": ("shift",),
    "three_levels": ("region", "state"),
}
DRAWS, WARMUP, CHAINS = 1500, 500, 2


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
    model: Callable[[Any], None], data: hierfl.ClientData, non_centred: tuple[str, ...]
) -> dict[str, Tensor]:
    """Return draws of every latent site by NUTS, (chains, draws, ...), with clients where they have them.

    Args:
        model: the program.
        data: all clients' rows.
        non_centred: sites to be sampled non-centred.
    """
    batch = hierfl.full_batch(data)
    config = {name: LocScaleReparam(centered=0.0) for name in non_centred}
    free = poutine.reparam(model, config=config)
    chains = []
    for seed in range(CHAINS):
        pyro.set_rng_seed(seed)
        kernel = NUTS(free, jit_compile=True, ignore_jit_warnings=True, target_accept_prob=0.9)
        run = MCMC(kernel, num_samples=DRAWS, warmup_steps=WARMUP, disable_progbar=True)
        run.run(batch)
        chains.append(run.get_samples())
    together = {name: torch.stack([chain[name] for chain in chains]) for name in chains[0]}
    return constrained(free, batch, together, non_centred)


def constrained(
    free: Any, batch: Any, drawn: dict[str, Tensor], non_centred: tuple[str, ...]
) -> dict[str, Tensor]:
    """Return the draws with the non-centred sites as the program names them."""
    each = []
    for at in range(CHAINS * DRAWS):
        values = {name: value.flatten(0, 1)[at] for name, value in drawn.items()}
        nodes = poutine.trace(poutine.condition(free, values)).get_trace(batch).nodes
        each.append({name: nodes[name]["value"] for name in non_centred})
    made = {
        name: torch.stack([values[name] for values in each]).unflatten(0, (CHAINS, DRAWS))
        for name in non_centred
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


def main(names: list[str]) -> None:
    """Run NUTS for recipes, and put their summaries into nuts.json."""
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    for name in names:
        file, _, model = name.partition(":")
        module, began = recipe(file), time.perf_counter()
        drawn = sampled(getattr(module, model or "model"), module.data(), NON_CENTRED.get(name, ()))
        sites = summary(drawn)
        known = json.loads(STORED.read_text()) if STORED.exists() else {}
        known[name] = sites
        STORED.write_text(json.dumps(dict(sorted(known.items())), indent=0) + "\n")
        worst = max(site["error"] for site in sites.values())
        r_hat = max(site["r_hat"] for site in sites.values())
        seconds = time.perf_counter() - began
        print(f"{name}: error {worst:.3f} sd, R-hat {r_hat:.3f}, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
