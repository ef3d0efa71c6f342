"""Files and functions of hierfl that a run enters: `python -m benchmarks.entered`.

A file is counted if one of its functions is entered. A function is a qualified name in a file: the
lambdas of one function count once. Modules are imported before the run, so their bodies do not
count. Each run has its own process. `--list NAME` prints what one run enters.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType

import pandas as pd
import pyro
import pyro.distributions as dist
import torch

import hierfl
from hierfl.data.batch import ClientBatch

ROOT = Path(hierfl.__file__).resolve().parent.parent
OURS = tuple(f"{ROOT}/{folder}/" for folder in ("hierfl", "models", "guides"))
# Run -> files and functions of the old code, as issue 51 counted them. This script's definition finds
# 95 and 756, 70 and 461, 120 and 960 in that code; the fourth was not counted again by name.
BEFORE = {
    "two_stage": (92, 761),
    "FedAvg": (70, 417),
    "a formula": (118, 991),
    "a formula over four nodes": (276, 1424),
}
ASKED = 0.75  # of those numbers, at most


def hierarchy(batch: ClientBatch) -> None:
    """A model of one's own: normal clients around a common mean."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with batch.clients():
        w = pyro.sample("w", dist.Normal(mu, tau))
        with batch.data():
            pyro.sample("y", dist.Normal(w, 1.0), obs=batch.y)


def _classifier() -> Callable[[ClientBatch], None]:
    net = torch.nn.Linear(2, 1)

    def model(batch: ClientBatch) -> None:
        weights = pyro.module("net", net)
        with batch.clients(), batch.data():
            pyro.sample("y", dist.Bernoulli(logits=weights(batch.x)[..., 0]), obs=batch.y)

    return model


def _run_of(name: str, folder: str) -> Callable[[], object]:
    """Return the run of that name, with its data made and its modules imported."""
    torch.manual_seed(0)
    if name == "two_stage":
        rows = {c: {"y": torch.randn(8) + i} for i, c in enumerate("abcd")}
        data = hierfl.ClientData.from_clients(rows)
        return lambda: hierfl.fit(hierarchy, data)
    if name == "FedAvg":
        labeled = {c: {"x": torch.randn(8, 2), "y": torch.ones(8)} for c in "abcd"}
        data, model = hierfl.ClientData.from_clients(labeled), _classifier()
        return lambda: hierfl.fit(hierfl.methods.fedavg(model), data, rounds=3)
    columns = ("x", "y")
    frames = {c: pd.DataFrame({k: torch.randn(12).numpy() for k in columns}) for c in "abcd"}
    formula = hierfl.formula("y ~ x + (1 | client)", clients="client")
    if name == "a formula":
        return lambda: hierfl.fit(formula, frames)
    return lambda: hierfl.nodes.fit(formula, hierfl.nodes.in_process(frames, folder))


def entered(run: Callable[[], object]) -> set[CodeType]:
    """Return the functions of hierfl that a run enters in this process."""
    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            seen.add(frame.f_code)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return {code for code in seen if code.co_name != "<module>" and file_of(code).startswith(OURS)}


def file_of(code: CodeType) -> str:
    """Return the file of a function, with the links `hierfl/models` and `hierfl/guides` resolved."""
    return os.path.realpath(code.co_filename)


def traced(name: str) -> list[tuple[str, str]]:
    """Run one of the four in a process of its own.

    Return (file, function) of all that it enters.
    """
    command = [sys.executable, "-m", "benchmarks.entered", "--one", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [(file, function) for file, function in json.loads(done.stdout.splitlines()[-1])]


def _one(name: str) -> None:
    warnings.simplefilter("ignore")
    for public in (hierfl, hierfl.methods, hierfl.nodes):
        for each in public.__all__:
            getattr(public, each)
    with tempfile.TemporaryDirectory() as folder:
        found = entered(_run_of(name, folder))
    print(json.dumps(sorted({(file_of(c)[len(str(ROOT)) + 1 :], c.co_qualname) for c in found})))


def main(args: Sequence[str] | None = None) -> None:
    """Print the table, or what one run enters."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", choices=BEFORE, help=argparse.SUPPRESS)
    parser.add_argument("--list", choices=BEFORE, help="print the functions that one run enters")
    arguments = parser.parse_args(args)
    if arguments.one:
        _one(arguments.one)
        return
    if arguments.list:
        found = traced(arguments.list)
        for file, function in found:
            print(f"{file}: {function}")
        for room, count in Counter(file.rsplit("/", 1)[0] for file, _ in found).most_common():
            print(f"{count:5} {room}")
        return
    print("| run | files | before | functions | before | at most 3/4 |")
    print("|---|---:|---:|---:|---:|---|")
    for name, (files, functions) in BEFORE.items():
        found = traced(name)
        now = len({file for file, _ in found}), len(found)
        good = now[0] <= ASKED * files and now[1] <= ASKED * functions
        print(f"| {name} | {now[0]} | {files} | {now[1]} | {functions} | {good} |", flush=True)


if __name__ == "__main__":
    main()
