"""The two apps: `flwr run` finds them by pyproject.toml."""

import os
from pathlib import Path

import torch

from hierfl.flower import apps
from hospitals.data import rows
from hospitals.model import METHODS

torch.set_default_dtype(torch.float64)
METHOD = os.environ.get("HOSPITALS_METHOD", "two_stage")


def done(fit):
    """Save the fit where the server runs: no row and no client state is in it."""
    fit.save(Path(os.environ["HOSPITALS_OUT"]) / METHOD, rows=False)


made = apps(
    METHODS[METHOD](),
    lambda context: rows(str(context.node_config["folder"])),
    done=done,
    nodes=4,
    rounds=None if METHOD == "two_stage" else 5,
    timeout=120.0,
)
server = made.server
client = made.client
