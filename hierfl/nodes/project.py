"""The files of a small Flower project, which `hierfl new NAME` writes."""

from __future__ import annotations

import keyword
import re
from importlib.util import find_spec
from pathlib import Path

LONGEST = 32  # letters of the name of an app of Flower, in which underscores are hyphens
PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "APP"
version = "0.1.0"
description = "A hierarchical Bayesian model over the rows of several clients: hierfl on Flower"
license = "Apache-2.0"
dependencies = []  # hierfl[flower] is installed where the server and the nodes run

[tool.hatch.build.targets.wheel]
packages = ["NAME"]

[tool.flwr.app]
publisher = "APP"

[tool.flwr.app.components]
serverapp = "NAME.app:server"
clientapp = "NAME.app:client"

[tool.flwr.app.config]
"""

PACKAGE = '''\
"""A hierarchical Bayesian model over clients whose rows stay where they are."""

import torch

torch.set_default_dtype(torch.float64)  # before the model is made, whose numbers have the same type
'''

MODEL = '''\
"""The model, the same at the server and at every node."""

import pyro.distributions as dist

from hierfl import models

# Varying intercepts and slopes, with unknown means and spreads: of the field `x` for labels `y` of
# 0 and 1.
# Any Pyro program that is a function of a hierfl ClientBatch may stand here.
model = models.regression("bernoulli", prior_scale=dist.HalfNormal(0.5), centered=True)
'''

DATA = '''\
"""The rows of one client: on a SuperNode from its own folder, in simulation from an example."""

from pathlib import Path
from typing import Any

import pandas as pd

import hierfl


def rows(context: Any) -> hierfl.ClientData:
    """Return the rows of the node's client.

    A SuperNode is started with --node-config 'client="north" folder="FOLDER"', and FOLDER holds
    rows.csv: a column y of labels, and a column for each feature. In simulation, node k has the
    k-th hospital of hierfl's heart disease data, or a part of one where nodes are more than four.
    """
    config = context.node_config
    if "partition-id" in config:
        return in_simulation(int(config["partition-id"]), int(config["num-partitions"]))
    return from_folder(str(config["client"]), Path(str(config["folder"])))


def from_folder(client: str, folder: Path) -> hierfl.ClientData:
    """Read rows.csv of a node's folder; all nodes must have the same columns."""
    frame = pd.read_csv(folder / "rows.csv")
    features = [name for name in frame.columns if name != "y"]
    frame.insert(0, "client", client)
    return hierfl.ClientData.from_frame(frame, "client", x=features, y="y")


def in_simulation(number: int, nodes: int) -> hierfl.ClientData:
    """Return the example's client with a number: a hospital, or every so many of its patients."""
    data = hierfl.datasets.heart_disease()
    part, place = divmod(number, data.num_clients)
    own = data.select([data.names[place]])
    parts = len(range(place, nodes, data.num_clients))
    if parts < 2:
        return own
    fields = {name: values[part::parts] for name, values in own.fields.items()}
    client = f"{data.names[place]}-{part + 1}"
    return hierfl.ClientData.from_arrays([client] * len(fields["y"]), **fields)
'''

APP = '''\
"""The two apps; `flwr run` finds them by pyproject.toml."""

import tempfile
from pathlib import Path
from typing import Any

from hierfl.flower import apps
from hierfl.nodes import FitOverNodes
from NAME.data import rows
from NAME.model import model


def folder(context: Any) -> Path:
    """Return the private folder of a node's client state, in simulation one of this run."""
    config = context.node_config
    if "folder" in config:
        return Path(str(config["folder"]))
    return Path(tempfile.gettempdir()) / "NAME" / f"{context.run_id}-{config['partition-id']}"


def done(fit: FitOverNodes) -> None:
    """Print what the server knows at the end; no row and no client state is in it."""
    print(fit.chosen)
    print(fit.history[["round", "clients", "seconds"]].to_string(index=False))
    found = fit.posterior(draws=1000).posterior
    for name in found.data_vars:
        mean, sd = found[name].mean(("chain", "draw")), found[name].std(("chain", "draw"))
        print(f"{name}: mean {mean.values.round(2)}, sd {sd.values.round(2)}")
    print(fit.scores())  # of the nodes whose policy lets them out


made = apps(model, rows, done=done, nodes=NODES, folder_for_node=folder)
server = made.server
client = made.client
'''

README = """\
# NAME

A hierarchical Bayesian model over clients whose rows stay where they are: hierfl on
[Flower](https://flower.ai).

* `NAME/model.py`: the model. `hierfl.fit`'s own rule chooses the method.
* `NAME/data.py`: where a node finds the rows of its client.
* `NAME/app.py`: the two apps, and what the server does with the answer.

## In simulation, on one machine

    pip install 'hierfl[flower]' 'flwr[simulation]'
    flwr run . --stream --federation-config 'num-supernodes=NODES'

The number is that of `nodes=` in `NAME/app.py`; the example's data have four hospitals, which
more nodes share.
`flwr federation simulation-config` sets it for good.

## On SuperNodes, unchanged

On the server's machine, with its certificates:

    flower-superlink --ssl-ca-certfile ca.crt --ssl-certfile server.pem --ssl-keyfile server.key \\
        --enable-supernode-auth

At each client, whose folder holds `rows.csv` and, if its owner likes, `policy.toml`:

    flower-supernode --root-certificates ca.crt --superlink SERVER:8000 \\
        --auth-supernode-private-key key --node-config 'client="north" folder="/var/lib/NAME"'

Then, from this folder, `flwr run . CONNECTION --stream`, where CONNECTION is the SuperLink's entry
in Flower's `config.toml`. A node's owner approves runs with `hierfl node approve`, and sees what
left with `hierfl node log`.
"""


def write_project(name: str, parent: Path, *, nodes: int = 4) -> dict[Path, str]:
    """Write a Flower project, a new folder and package `name`; a run waits for `nodes`. Return file -> what it is."""
    _check_name(name)
    if nodes < 1:
        raise ValueError(f"nodes is {nodes}: it must be 1 or more")
    root = parent / name
    if root.exists() and any(root.iterdir()):
        raise FileExistsError(f"'{root}' is not empty: choose another name, or remove it")
    (root / name).mkdir(parents=True, exist_ok=True)
    files = {
        root / "pyproject.toml": (PROJECT, "what Flower reads"),
        root / "README.md": (README, "how to run it"),
        root / name / "__init__.py": (PACKAGE, "the package"),
        root / name / "model.py": (MODEL, "the model"),
        root / name / "data.py": (DATA, "the rows of a node"),
        root / name / "app.py": (APP, "the two apps"),
    }
    words = {"NODES": str(nodes), "APP": name.replace("_", "-"), "NAME": name}
    for path, (text, _) in files.items():
        path.write_text(re.sub(r"\b(NODES|APP|NAME)\b", lambda m: words[m[0]], text))
    return {path: what for path, (_, what) in files.items()}


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ValueError(
            f"'{name}' cannot be the name of a package: take lower-case letters, digits and "
            "underscores"
        )
    if len(name) > LONGEST:
        raise ValueError(f"'{name}' is too long for Flower: take {LONGEST} letters at most")
    if find_spec(name) is not None:
        raise ValueError(f"'{name}' is the name of an installed package: choose another")
