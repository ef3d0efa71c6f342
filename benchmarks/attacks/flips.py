"""Bytes that flip in the files of runs and saved fits.

What is read is what was written, or is refused.

python -m benchmarks.attacks flips
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hierfl
from benchmarks.attacks.mutations import flipped
from hierfl import guides, methods, models
from hierfl.core.trees import named_leaves
from hierfl.engine import client_store

ROUNDS = 4
Outcome = dict[str, Any]


def rows() -> hierfl.ClientData:
    """Return three clients with features."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(9, 2, generator=g)
    return hierfl.ClientData.from_arrays(
        [0, 0, 0, 1, 1, 2, 2, 2, 2],
        names=("north", "south", "east"),
        features={"x": ("age", "dose")},
        x=x,
        y=x.sum(-1),
    )


def method() -> hierfl.Method:
    """Return a method that `load` can make again, with client states."""
    return methods.fedsvi(models.regression("gaussian", centered=True), guide=guides.mean_field)


def run(folder: Path, *, resume: bool = False) -> hierfl.Fit:
    """Run a method with a checkpoint every round."""
    return hierfl.fit(
        method(),
        rows(),
        rounds=ROUNDS,
        cohort=2,
        settings=hierfl.Settings(compile=False),
        progress=False,
        checkpoint=folder,
        checkpoint_every=1,
        resume=resume,
    )


def outcome(fit: hierfl.Fit) -> Outcome:
    """Return all that a fit holds, as values that can be compared."""
    table = client_store.taken(fit.progress.table, torch.arange(len(fit.clients)))
    data = fit.federation.data
    history = [{k: v for k, v in row.items() if k != "seconds"} for row in fit.progress.history]
    tensors = {**data.fields, **data.client_fields, "offsets": data.offsets}
    states = {"server": fit.progress.server, "table": table, "rows": tensors}
    return {
        "round": fit.progress.round,
        "rounds": fit.rounds,
        "history": history,
        "clients": fit.clients,
        "features": dict(data.features),
        **{
            f"{part} {name}": (str(leaf.dtype), leaf.tolist())
            for part, tree in states.items()
            for name, leaf in named_leaves(tree).items()
        },
    }


def damage(folder: Path, how: random.Random) -> str:
    """Damage one file of a folder, remove it, or put another in its place; say what was done."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = how.choice(files)
    if how.random() < 0.9:
        path.write_bytes(flipped(path.read_bytes(), how))
        return f"damaged {path.relative_to(folder)}"
    if how.random() < 0.5:
        path.unlink()
        return f"removed {path.relative_to(folder)}"
    other = how.choice(files)
    content = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(content)
    return f"swapped {path.relative_to(folder)} and {other.relative_to(folder)}"


Reader = Callable[[Path], hierfl.Fit]


def readings(where: Path) -> dict[str, tuple[Reader, list[Outcome]]]:
    """Make the folders that are damaged; return how each is read, and which outcomes are right.

    A checkpoint that is damaged may be passed over for the one before it.
    """

    def again(folder: Path) -> hierfl.Fit:
        return hierfl.load(folder, data=rows())

    found: dict[str, tuple[Reader, list[Outcome]]] = {}
    whole = run(where / "resumed")
    run(where / "loaded")
    shutil.copytree(where / "loaded", where / "older")
    shutil.rmtree(sorted((where / "older").glob("round-*"))[-1])
    whole.save(where / "saved", with_data=True)
    found["resumed"] = (lambda folder: run(folder, resume=True), [outcome(whole)])
    found["loaded"] = (again, [outcome(whole), outcome(again(where / "older"))])
    found["saved"] = (hierfl.load, [outcome(whole)])
    shutil.rmtree(where / "older")
    client_store.IN_MEMORY = 0
    found["in a file"] = (found["resumed"][0], [outcome(run(where / "in a file"))])
    return found


def attack(n: int = 500, seed: int = 0) -> dict[str, int]:
    """Damage files of runs and saved fits, and load or resume them.

    Args:
        n: how many times.
        seed: of the damage.

    Returns:
        Counts of "tried"; "right": what was written, or the checkpoint before it; "refused":
        CheckpointError, or RowsNotSaved for rows that are gone; "wrong"; "raw"; and "code run",
        which is always 0 here.
    """
    how = random.Random(seed)
    counts = dict.fromkeys(("tried", "right", "refused", "wrong", "raw", "code run"), 0)
    memory = client_store.IN_MEMORY
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        where = Path(name)
        try:
            known = readings(where)
            for number in range(n):
                kind = list(known)[number % len(known)]
                read, right = known[kind]
                client_store.IN_MEMORY = 0 if kind == "in a file" else memory
                folder = where / f"damaged-{number}"
                shutil.copytree(where / kind, folder)
                told = damage(folder, how)
                try:
                    result = "right" if outcome(read(folder)) in right else "wrong"
                except (hierfl.CheckpointError, hierfl.RowsNotSaved):
                    result = "refused"
                except Exception as error:
                    result = f"raw: {type(error).__name__}: {error}"
                counts["tried"] += 1
                counts[result.partition(":")[0]] += 1
                if result not in ("right", "refused"):
                    print(f"flip {number}, {kind}, {told}: {result}", file=sys.stderr)
                shutil.rmtree(folder)
        finally:
            client_store.IN_MEMORY = memory
    return counts
