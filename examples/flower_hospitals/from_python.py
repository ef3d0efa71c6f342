"""The four hospitals fitted from this process: `hierfl.nodes.fit(model, nodes)` against a running SuperLink.

A SuperLink and four SuperNodes are started on this machine as by `deploy.py`, with TLS and node
authentication. The SuperLink leaves the server of a run to this process, which has no patient's
row; one hospital lets its summaries and scores out. Run it with `python
examples/flower_hospitals/from_python.py`.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from pathlib import Path
from typing import Any

import torch

import hierfl
from hierfl import methods
from hierfl.core.disk import write_private
from hierfl.core.trees import named_leaves

sys.path.insert(0, str(Path(__file__).parent))
from deploy import LINK, deployment, new_folder, project, settled
from hospitals.model import hierarchy

OPEN = "cleveland"  # the hospital whose policy lets summaries and scores out


def main() -> None:
    """Deploy, fit from here, ask the nodes, compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo-flower-out"))
    folder = new_folder(parser.parse_args().out.resolve())
    torch.set_default_dtype(torch.float64)
    data = settled(folder)
    for name in data.names:
        may_leave = ["summaries", "scores"] if name == OPEN else []
        (folder / "nodes" / name / "policy.toml").write_text(f"may_leave = {may_leave}\n")
    secret = folder / "superexec.secret"
    write_private(secret, secrets.token_bytes(32))
    options = ("--isolation", "process", "--superexec-auth-secret-file", str(secret))
    with deployment(folder, data.names, *options):
        served(folder, secret, data)


def served(folder: Path, secret: Path, data: hierfl.ClientData) -> None:
    """Fit over the nodes from this process, and print how it compares with a fit of all rows together."""
    from hierfl.flower import superlink  # flwr is slow to import

    began = time.monotonic()
    with superlink(
        f"127.0.0.1:{LINK}",
        project=project("chosen", folder),
        nodes=len(data.names),
        root_certificates=folder / "ca.crt",
        secret=secret,
    ) as there:
        fitted = hierfl.nodes.fit(hierarchy, there, checkpoint=folder / "server")
        print(fitted.chosen)
        print(fitted.history[["round", "clients", "seconds"]].to_string(index=False))
        print(f"fit over nodes: {time.monotonic() - began:.0f} s")
        here = hierfl.fit(hierarchy, data, settings=hierfl.Settings(compile=False), progress=False)
        print(f"its last message: within {apart(fitted, here):.1e} of hierfl.fit on all rows")
        found, expected = fitted.posterior().posterior, here.posterior().posterior
        for name in found.data_vars:  # as arrays: the nodes' columns have other names
            differ = float(abs(found[name].values - expected[name].values).max())
            print(f"1000 draws of {name}: within {differ:.1e}")

        began = time.monotonic()
        summary = fitted.local_summary(draws=500)  # the call has returned long ago
        print(f"local summaries after {time.monotonic() - began:.0f} s; kept: {summary.withheld}")
        own = here.draws(500).own
        place = data.names.index(OPEN)
        means = torch.cat([own[name][:, place].mean(0).flatten() for name in own]).tolist()
        differ = max(
            abs(a - b) for a, b in zip(sorted(means), sorted(summary.table["mean"]), strict=True)
        )
        print(f"means of {OPEN}'s {len(means)} own numbers: within {differ:.1e}")
        print(fitted.scores().table.to_string(index=False))

        began = time.monotonic()
        named = methods.fedsvi(hierarchy)  # the nodes make it of their own model
        again = hierfl.nodes.fit(named, there, rounds=1, seed=1)
        beside = hierfl.fit(
            named, data, rounds=1, seed=1, settings=hierfl.Settings(compile=False), progress=False
        )
        differ = apart(again, beside)
        print(f"fedsvi, seed 1, one round: {time.monotonic() - began:.0f} s, within {differ:.1e}")


def apart(one: Any, other: Any) -> float:
    """Return the largest difference between the last messages of two fits."""
    expected = named_leaves(other.message)
    return max(
        float((value.double() - expected[name].double()).abs().max())
        for name, value in named_leaves(one.message).items()
    )


if __name__ == "__main__":
    main()
