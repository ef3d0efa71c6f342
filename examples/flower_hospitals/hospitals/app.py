"""Pairs of apps: two_stage, fedavg, and a method of the server's choice; `flwr run` takes that of pyproject.toml."""

import json
import os
from functools import partial
from pathlib import Path

import torch

from hierfl.flower import Apps, apps
from hierfl.nodes import FitOverNodes
from hospitals.data import rows
from hospitals.model import hierarchy, method_of


def done(name: str, fit: FitOverNodes) -> None:
    """Write what the server knows at the end: no row and no client state is in it."""
    out = Path(os.environ["HOSPITALS_OUT"])
    torch.save(fit.message, out / f"{name}.pt")
    rounds = fit.history[["round", "clients", "seconds"]].to_dict("records")
    (out / f"{name}.json").write_text(json.dumps(rounds))
    if name == "two_stage":
        found = fit.posterior(draws=1000).posterior
        means = {
            site: found[site].mean(("chain", "draw")).values.tolist() for site in found.data_vars
        }
        (out / "means.json").write_text(json.dumps(means))
        own = fit.local_summary(draws=1000)  # of the hospitals whose policies let summaries out
        own.table.to_csv(out / "hospitals.csv", index=False)


def made(name: str) -> Apps:
    """Return the apps of a method; of the model alone, for a server that chooses."""
    return apps(
        hierarchy if name == "chosen" else method_of(name),
        lambda context: rows(str(context.node_config["folder"])),
        done=partial(done, name),
        nodes=4,
        rounds=5 if name == "fedavg" else None,
        timeout=120.0,
    )


two_stage = made("two_stage")
fedavg = made("fedavg")
chosen = made("chosen")
