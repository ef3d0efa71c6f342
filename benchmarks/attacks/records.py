"""Crafted folders of saved fits.

`load` must refuse each, or return just what its record says, and run no code.

python -m benchmarks.attacks records
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import random
import shutil
import struct
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from safetensors.torch import load_file, save_file

import hierfl
from benchmarks.attacks.mutations import JSON, mutated, watched
from hierfl import guides, methods, models
from hierfl.core.trees import named_leaves
from hierfl.program.recipes import describe, differences

REFUSALS = (hierfl.CheckpointError, hierfl.CannotRemake, hierfl.RowsNotSaved)
RAN: list[Any] = []  # calls of functions that no record may have called


def canary(*args: Any, **kwargs: Any) -> None:
    """Note that it was called."""
    RAN.append((args, kwargs))


@hierfl.model(name="attacked")
def marked(batch: Any) -> None:
    """A model that the program has marked.

    A record may have it called with a batch, and with nothing else.
    """
    if not isinstance(batch, hierfl.ClientBatch):
        canary(batch)
    with batch.clients():
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with batch.data():
            pyro.sample("y", dist.Normal(w, 1.0), obs=batch.y)


class Bomb:
    """Its pickle runs a command."""

    def __reduce__(self) -> Any:
        """Touch a file."""
        return os.system, ("touch ran",)


NAMES = (
    "os:system os.system posix:system subprocess:Popen subprocess:run builtins:eval builtins:exec "
    "builtins:open importlib:import_module shutil:rmtree shutil:copyfile pickle:loads torch:load "
    "torch.load torch:save torch.hub:load torch.serialization:load numpy:load runpy:run_path "
    "ctypes:CDLL socket:create_connection hierfl.runs.checkpoint:shutil.rmtree "
    "hierfl.runs.checkpoint:save hierfl.runs.checkpoint.save hierfl.load hierfl.fit "
    "hierfl.diagnostics.nuts hierfl.Fit hierfl.report.write hierfl.datasets.files:load "
    "hierfl.models:torch.os.system hierfl.methods.fedavg.__globals__ "
    "hierfl.methods.fedavg:fedavg.__globals__ hierfl.methods.__dict__ "
    "hierfl.program.public_names.find hierfl.program.recipes:remake hierfl.cli:main "
    "pyro:clear_param_store pyro.distributions.SpanningTree pyro.distributions.Rejector "
    "torch.optim.Optimizer torch.optim.lr_scheduler somebodys_module:canary "
    "somebodys_module:Canary somebodys_module:canary.__call__ attacked __main__:canary "
    "benchmarks.attacks.records:canary benchmarks.attacks.records:Bomb"
).split()
OPTIONS: tuple[JSON, ...] = (
    {},
    {"command": "touch ran"},
    {"args": {"sequence": ["touch", "ran"]}},
    {"path": "ran"},
    {"name": "ran"},
    {"src": "fit.json", "dst": "ran"},
    {"file": "ran", "mode": "w"},
)
SIZES: tuple[JSON, ...] = (
    {"family": "hierfl.guides.amortized", "with": {"hidden": 10**12}},
    {"family": "hierfl.guides.low_rank", "with": {"rank": 10**12}},
    {"family": "hierfl.guides.conditional", "with": {"newton_steps": 10**12}},
    {
        "family": "hierfl.guides.structured",
        "with": {"shared": {"named": "hierfl.guides.spline_flow"}, "full": 10**12},
    },
    {"tensor": [1.0], "dtype": "quint8"},
    {"made_by": "pyro.distributions.LKJ", "with": {"dim": 10**12, "concentration": 1.0}},
)


def at_places(method: JSON, what: JSON) -> Iterator[JSON]:
    """Yield a method's description with something else at each of its options, and around it."""
    for place in method["with"]:
        yield {**method, "with": {**method["with"], place: what}}
        yield {**method, "with": {**method["with"], place: {"sequence": [what]}}}
    for name in ("hierfl.optimizers.TorchOptimizer", "hierfl.models.likelihood.Likelihood"):
        key = {"kind": what, "options": {"mapping": {"a": 1}}} if "Torch" in name else {"of": what}
        for place in ("optimizer", "model"):
            yield {**method, "with": {**method["with"], place: {"made_by": name, "with": key}}}
    yield what
    yield {"made_by": "hierfl.methods.fine_tuned", "with": {"method": what}}
    yield {
        "made_by": "hierfl.Method",
        "with": {"name": "m", **{k: what for k in ("model", "guide", "client", "server")}},
    }


def descriptions(method: JSON) -> list[JSON]:
    """Return crafted descriptions of a method."""
    calls: list[JSON] = [{"named": name} for name in NAMES] + [
        {"marked": name} for name in NAMES[-6:]
    ]
    calls += [
        {form: name, "with": o} for form in ("made_by", "family") for name in NAMES for o in OPTIONS
    ]
    return [crafted for call in (*SIZES, *calls) for crafted in at_places(method, call)]


# ----------------------------------------------------------------------------------------------
# forged files
def sealed(folder: Path, change: Callable[[JSON], JSON]) -> None:
    """Change the record of the newest checkpoint, and give it a hash that fits again."""
    path = sorted(folder.glob("round-*"))[-1] / "state.json"
    record = json.loads(path.read_text())
    record.pop("sha256")
    hashes = record["hashes"]
    for name in list(hashes):
        file = path.with_name(name if "." in name else f"{name}.safetensors")
        if file.is_file() and file.stat().st_size < 1 << 30:
            hashes[name] = hashlib.sha256(file.read_bytes()).hexdigest()
    record = change(record)
    path.unlink()
    text = json.dumps(record)
    if isinstance(record, dict):
        digest = hashlib.sha256(json.dumps(record).encode()).hexdigest()
        text = json.dumps({**record, "sha256": digest})
    path.write_text(text)


def schema_of(folder: Path) -> Path:
    """Return the file of the clients' names."""
    return next(iter(folder.rglob("fit.json")))


def same(record: JSON) -> JSON:
    """Return the record as it is."""
    return record


def forged_files(folder: Path, how: random.Random) -> None:
    """Put something else in the place of one file.

    A pickle, a header that promises terabytes, a link, a pipe.
    """
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "state.json")
    path = how.choice(files)
    kind = how.choice(
        ["pickle", "torch", "bomb", "huge header", "link", "pipe", "folder", "tensors", "schema"]
    )
    content = path.read_bytes()
    path.unlink()
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Bomb()))
    elif kind == "torch":
        buffer = io.BytesIO()
        torch.save({"offsets": Bomb()}, buffer)
        path.write_bytes(buffer.getvalue())
    elif kind in ("bomb", "huge header"):
        shape, length = (10**12, 8 * 10**12) if kind == "bomb" else (1, 8)
        header = json.dumps(
            {"offsets": {"dtype": "I64", "shape": [shape], "data_offsets": [0, length]}}
        ).encode()
        size = len(header) if kind == "bomb" else 1 << 60
        path.write_bytes(struct.pack("<Q", size) + header + bytes(8))
    elif kind == "link":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "tensors" and path.suffix == ".safetensors":
        path.write_bytes(content)
        tensors = {k: _another(v, how) for k, v in load_file(path).items()}
        save_file(tensors, path)
    else:
        path.write_bytes(content)
        schema = schema_of(folder)
        found = json.loads(schema.read_text())
        found.pop("sha256", None)
        schema.write_text(json.dumps(mutated(found, how)))
    sealed(folder, same)


def _another(value: torch.Tensor, how: random.Random) -> torch.Tensor:
    kinds: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda v: v,
        lambda v: v.to(torch.bfloat16),
        lambda v: v.flatten()[:0],
        lambda v: v.flatten()[:1],
        lambda v: v * 0 - (1 << 40),
        lambda v: v.double() * float("nan"),
        lambda v: torch.full_like(v, 1 << 30),
        lambda v: v[None].clone(),
        lambda v: v.to(torch.complex64),
    ]
    return how.choice(kinds)(value).contiguous()


# ---------------------------------------------------------------------------------------------- the
# attack
def saved(folder: Path) -> None:
    """Save a fit that `load` can make again."""
    data = hierfl.ClientData.from_clients(
        {"a": {"x": [[1.0], [2.0]], "y": [1.0, 2.0]}, "b": {"x": [[3.0]], "y": [0.5]}}
    )
    method = methods.fedsvi(models.regression(centered=True), guide=guides.mean_field)
    hierfl.fit(
        method, data, rounds=1, settings=hierfl.Settings(compile=False), progress=False
    ).save(folder, with_data=True)


def crafted(folder: Path, number: int, how: random.Random, recipes: list[JSON]) -> None:
    """Forge a saved fit: its method, an entry of its record, or a file."""
    kind = number % 4
    if kind < 2:
        recipe = how.choice(recipes)
        sealed(folder, lambda r: {**r, "about": {**r["about"], "method": recipe}})
    elif kind == 2:
        sealed(folder, lambda r: mutated(r, how))
    else:
        forged_files(folder, how)


def outcome(folder: Path) -> str:
    """Load a folder, and say how that went: "right", "refused", "wrong", "raw" or "code run"."""
    RAN.clear()
    with watched() as seen, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            fit = hierfl.load(folder)
            found = "right" if _is_right(folder, fit) else "wrong"
        except REFUSALS:
            found = "refused"
        except Exception as error:
            found = f"raw: {type(error).__name__}: {error}"
    ran = RAN or [event for event in seen if "__pycache__" not in event]
    return f"code run: {ran[:3]}" if ran or Path("ran").exists() else found


def _is_right(folder: Path, fit: hierfl.Fit) -> bool:
    """Return whether a fit is what the files of its folder say.

    An option they do not name has its default.
    """
    newest = sorted(folder.glob("round-*"))[-1]
    record = json.loads((newest / "state.json").read_text())
    method = record["about"]["method"]
    states = (("global", fit.progress.server), ("local", fit.progress.table))
    return (
        not differences(method, _named_in(method, describe(fit.method))).differs
        and record["round"] == fit.progress.round
        and json.dumps(fit.progress.history) == json.dumps(record["history"])
        and all(
            torch.equal(leaf, load_file(newest / f"{part}.safetensors")[name])
            for part, tree in states
            for name, leaf in named_leaves(tree).items()
        )
    )


def _named_in(record: JSON, description: JSON) -> JSON:
    """Return a description without the options that a record does not name."""
    if not isinstance(record, dict) or not isinstance(description, dict):
        return description
    return {
        key: {k: _named_in(record[key][k], v) for k, v in value.items() if k in record[key]}
        if key == "with"
        else value
        for key, value in description.items()
    }


def attack(n: int = 100, seed: int = 0) -> dict[str, int]:
    """Load crafted folders.

    Args:
        n: how many.
        seed: of what is crafted.

    Returns:
        Counts of "tried", "right", "refused", "wrong", "raw" and "code run".
    """
    how = random.Random(seed)
    counts = dict.fromkeys(("tried", "right", "refused", "wrong", "raw", "code run"), 0)
    module = types.ModuleType("somebodys_module")
    module.__dict__.update(canary=canary, Canary=type("Canary", (), {"__init__": canary}))
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as where:
        sys.modules["somebodys_module"] = module
        os.chdir(where)
        try:
            saved(Path("saved"))
            newest = sorted(Path("saved").glob("round-*"))[-1]
            recipes = descriptions(
                json.loads((newest / "state.json").read_text())["about"]["method"]
            )
            for number in range(n):
                folder = Path(f"crafted-{number}")
                shutil.copytree("saved", folder)
                crafted(folder, number, how, recipes)
                found = outcome(folder)
                counts["tried"] += 1
                counts[found.partition(":")[0]] += 1
                if found not in ("right", "refused"):
                    print(f"record {number}: {found}", file=sys.stderr)
                shutil.rmtree(folder)
        finally:
            os.chdir(before)
            del sys.modules["somebodys_module"]
    return counts
