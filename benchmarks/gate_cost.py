"""What the gate of a node costs: CPU seconds of an honest default fit over four nodes of one process.

Run `python -m benchmarks.gate_cost [--before FOLDER] [--times 5]`, FOLDER being a checkout of another
commit, whose fits take turns with this one's, each in a process of its own.

first   a fit in new folders, with what a process does once
next    the median of the fits after it in the same process, each in new folders
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import median

HERE = Path(__file__).parents[1]
FORMULAS = {
    "gaussian": "y ~ scale(x) + sex + (1 | hospital)",
    "bernoulli": "event ~ scale(x) + sex + (1 | hospital)",
}
ROWS, FITS = 200, 4


def seconds(family: str) -> list[float]:
    """Return the CPU seconds of fits of a family, in this process."""
    import numpy as np
    import pandas as pd

    import hierfl

    rng, frames = np.random.default_rng(0), {}
    for name in ("east", "north", "south", "west"):
        x, sex = rng.normal(50.0, 9.0, ROWS), rng.choice(["f", "m"], ROWS)
        y = 0.1 * x + (sex == "m") + rng.normal(size=ROWS)
        frames[name] = pd.DataFrame({"x": x, "sex": sex, "y": y, "event": (y > 5.5).astype(int)})
    took = []
    for _ in range(FITS):
        formula = hierfl.formula(FORMULAS[family], family, clients="hospital")
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            start = time.process_time()
            hierfl.nodes.fit(formula, hierfl.nodes.in_process(frames, folder), seed=0)
            took.append(time.process_time() - start)
    return took


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table of seconds, and of their ratio to those of another checkout."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--family", help="print the seconds of this process as JSON")
    asked = parser.parse_args(argv)
    if asked.family:
        print(json.dumps(seconds(asked.family)))
        return
    print(f"{'family':10} {'checkout':8} {'first':>7} {'next':>7}  all first and next")
    for family in FORMULAS:
        roots = {"now": HERE} | ({"before": asked.before.resolve()} if asked.before else {})
        took: dict[str, list[list[float]]] = {name: [] for name in roots}
        for _ in range(asked.times):
            for name, root in roots.items():
                command = [sys.executable, __file__, "--family", family]
                run = dict(check=True, capture_output=True, cwd=root)
                env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
                took[name].append(json.loads(subprocess.run(command, env=env, **run).stdout))
        both = {
            name: (median(of[0] for of in every), median(t for of in every for t in of[1:]))
            for name, every in took.items()
        }
        for name, (first, after) in both.items():
            every = [f"{of[0]:.2f}/{median(of[1:]):.2f}" for of in took[name]]
            print(f"{family:10} {name:8} {first:7.2f} {after:7.2f}  {' '.join(every)}")
        if asked.before:
            ratios = [now / before for now, before in zip(*both.values(), strict=True)]
            print(f"{family:10} {'ratio':8} {ratios[0]:7.2f} {ratios[1]:7.2f}")


if __name__ == "__main__":
    main()
