"""A thousand clients in Flower's simulation beside `hierfl.fit`.

Run `python -m benchmarks.flower_scale [--write]`.

A project as `hierfl new` writes it, with FedAvg of a small network and rows of its own, runs in
Flower's simulation on Ray; `hierfl.fit` runs the same rounds of the same clients in one process.
Measures seconds a round, bytes and memory, and the largest difference between the two results.
`--write` makes benchmarks/SCALE.md.

It needs Ray, which hierfl does not depend on: `pip install 'flwr[simulation]'`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import torch

import hierfl
from benchmarks.flower_scale_table import Measured, write
from hierfl.core.trees import named_leaves
from hierfl.flower.project import write_project

NAME, PORT = "thousand", 8555
ROWS, FEATURES = 20, 20
METHOD = f'''\
"""FedAvg of a small network."""

import torch
from torch import nn

from hierfl import methods, models

with torch.random.fork_rng():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear({FEATURES}, 50), nn.Tanh(), nn.Linear(50, 2))
model = methods.fedavg(models.network(net, likelihood=models.likelihood.categorical()), steps=10, batch_size=10)
'''
DATA = '''\
"""The rows of one client, simulated."""

import numpy as np

import hierfl

FILE = {file!r}


def rows(context):
    """Return the client with the number of a node."""
    number = int(context.node_config["partition-id"])
    found = np.load(FILE, mmap_mode="r")
    x, y = found[number, :, :-1], found[number, :, -1]
    return hierfl.ClientData.from_arrays([f"{number:04d}"] * len(y), x=x, y=y.astype(np.int64))
'''
DONE = """\
    import torch

    torch.save(fit.message, {out!r} + "/message.pt")
    fit.history.to_json({out!r} + "/history.json", orient="records")
    return
"""


# ------------------------------------------------------------------------------------------------
# the clients
def population(clients: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return simulated rows, (clients, rows, features and label)."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(clients, ROWS, FEATURES))
    centers = draw.normal(size=(clients, 1))
    y = x.mean(2) * FEATURES**0.5 + centers + draw.logistic(size=(clients, ROWS)) > 0
    return np.concatenate([x, y[:, :, None]], axis=2)


def together(rows: np.ndarray[Any, np.dtype[np.float64]]) -> hierfl.ClientData:
    """Return all clients in one place."""
    names = np.repeat([f"{k:04d}" for k in range(len(rows))], ROWS)
    flat = rows.reshape(-1, FEATURES + 1)
    return hierfl.ClientData.from_arrays(
        names, x=flat[:, :-1].copy(), y=flat[:, -1].astype(np.int64)
    )


def written(folder: Path, clients: int, rounds: int, cohort: int) -> Path:
    """Write the project, with the benchmark's model and rows, and return its folder."""
    np.save(folder / "rows.npy", population(clients))
    write_project(NAME, folder, nodes=clients)
    package = folder / NAME / NAME
    (package / "model.py").write_text(METHOD)
    (package / "data.py").write_text(DATA.replace("{file!r}", repr(str(folder / "rows.npy"))))
    app = (package / "app.py").read_text()
    changes = {
        f"nodes={clients},": f"nodes={clients}, rounds={rounds}, cohort={cohort}, timeout=3600.0,",
        "    print(fit.chosen)\n": DONE.replace("{out!r}", repr(str(folder))),
        "tempfile.gettempdir()": repr(str(folder)),
    }
    for old, new in changes.items():
        if app.count(old) != 1:
            raise RuntimeError(f"the app that `hierfl new` writes has no '{old}' any more")
        app = app.replace(old, new)
    (package / "app.py").write_text(app)
    return folder / NAME


# ------------------------------------------------------------------------------------------------
# Flower
@contextmanager
def superlink(folder: Path) -> Iterator[dict[str, str]]:
    """Run a SuperLink of Flower's simulation, and yield the environment of the command flwr."""
    programs = Path(sys.executable).parent
    home = folder / "home"
    home.mkdir()
    address = f'address = "127.0.0.1:{PORT}"\ninsecure = true\n'
    (home / "config.toml").write_text(f'[superlink]\ndefault = "here"\n[superlink.here]\n{address}')
    settings = {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join([str(programs), os.environ["PATH"]]),
    }
    command = ["flower-superlink", "--insecure", "--simulation", "--port", str(PORT)]
    with open(folder / "superlink.log", "w") as log:
        process = subprocess.Popen(
            [str(programs / command[0]), *command[1:], "--disable-runtime-dependency-installation"],
            stdout=log,
            stderr=log,
            env=settings,
        )
        try:
            time.sleep(8.0)
            yield settings
        finally:
            process.terminate()
            process.wait(60)


def simulated(clients: int, cohort: int, rounds: int, folder: Path) -> tuple[Measured, Any]:
    """Run the project in Flower's simulation.

    Return what was measured, and the server's last message.
    """
    project = written(folder, clients, rounds, cohort)
    config = f"num-supernodes={clients} client-resources-num-cpus=1 init-args-num-cpus={CORES}"
    with superlink(folder) as settings, peak_memory() as memory:
        began = time.perf_counter()
        done = subprocess.run(
            ["flwr", "run", str(project), "here", "--stream", "--federation-config", config],
            env=settings,
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.perf_counter() - began
    if not (folder / "message.pt").exists():
        raise RuntimeError(f"the simulation fails:\n{done.stdout[-4000:]}\n{done.stderr[-2000:]}")
    history = json.loads((folder / "history.json").read_text())
    return measured("Flower on Ray", history, seconds, memory[0]), torch.load(
        folder / "message.pt", weights_only=True
    )


# ------------------------------------------------------------------------------------------------
# measuring
CORES = len(os.sched_getaffinity(0))


def measured(
    what: str, history: Sequence[dict[str, Any]], seconds: float, memory: float
) -> Measured:
    """Return what a run cost.

    Args:
        what: ran.
        history: a record of each round.
        seconds: of the whole run.
        memory: peak, in GB.
    """
    rounds = [float(one["seconds"]) for one in history]
    return Measured(
        what,
        clients=int(history[0]["clients"]),
        rounds=len(rounds),
        seconds_a_round=float(np.median(rounds)),
        seconds_before=seconds - sum(rounds),
        bytes_down=int(history[0]["bytes_down"]) // int(history[0]["clients"]),
        bytes_up=int(history[0]["bytes_up"]) // int(history[0]["clients"]),
        gigabytes=memory,
    )


@contextmanager
def peak_memory() -> Iterator[list[float]]:
    """Yield the peak memory of this process' descendants, in GB.

    Memory that several share counts once.
    """
    found, stop = [0.0], Event()

    def watch() -> None:
        while not stop.wait(1.0):
            found[0] = max(found[0], sum(map(_memory, _descendants(os.getpid()))))

    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()


def _descendants(pid: int) -> list[int]:
    parents = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(place.name)] = int(
                (place / "stat").read_text().rpartition(")")[2].split()[1]
            )
        except OSError:  # it has ended
            continue
    below = [pid]
    for one in below:  # it grows
        below += [child for child, parent in parents.items() if parent == one]
    return below[1:]


def _memory(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(float(line.split()[1]) for line in lines if line.startswith("Pss:")) / 2**20
    except (OSError, ValueError):
        return 0.0


def here(clients: int, cohort: int, rounds: int) -> tuple[Measured, Any]:
    """Run the same rounds by `hierfl.fit`.

    Return what was measured, and the server's last message.
    """
    import resource

    space: dict[str, Any] = {}
    exec(METHOD, space)
    data = together(population(clients))
    began = time.perf_counter()
    fit = hierfl.fit(
        space["model"],
        data,
        rounds=rounds,
        cohort=cohort,
        settings=hierfl.Settings(compile=False),
        progress=False,
    )
    seconds = time.perf_counter() - began
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    found = measured("hierfl.fit", fit.history.to_dict("records"), seconds, memory)
    return found, fit.message


def difference(one: Any, other: Any) -> float:
    """Return the largest difference between two results, entry by entry."""
    there = named_leaves(other)
    return max(float((v - there[name]).abs().max()) for name, v in named_leaves(one).items())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run both ways for each cohort, and print or write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--cohort", type=int, action="append", help="clients a round")
    parser.add_argument("--rounds", type=int, action="append", help="as many as cohorts")
    parser.add_argument("--write", action="store_true", help="make benchmarks/SCALE.md")
    chosen = parser.parse_args(arguments)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    found, apart = [], []
    for cohort, rounds in zip(
        chosen.cohort or [100, chosen.clients], chosen.rounds or [5, 2], strict=True
    ):
        with tempfile.TemporaryDirectory(prefix="flower-scale-") as folder:
            flower, there = simulated(chosen.clients, cohort, rounds, Path(folder))
        ours, message = here(chosen.clients, cohort, rounds)
        apart.append(difference(message, there))
        found += [flower, ours]
        print(flower, ours, f"apart {apart[-1]:.1e}", sep="\n", flush=True)
    versions = {name: importlib.metadata.version(name) for name in ("flwr", "ray", "torch")}
    write(found, max(apart), chosen.clients, CORES, versions, to_file=chosen.write)


if __name__ == "__main__":
    main()
