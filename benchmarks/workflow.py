"""From a CSV file to a report, step by step: `python -m benchmarks.workflow [NAME ...]`.

The CPU seconds of each step that a statistician waits for, on six real data sets, in a process of its
own with one thread. `HIERFL_BAMBI` names a Python with bambi: it reads the same file and samples the
same formula, two chains of 1,000 + 1,000 steps, in the same run. `HIERFL_DATA` is the folder of the
data that do not ship. Imports are the first step; each later one counts its own first calls.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAMES = ("heart", "trauma", "radon", "ilea", "nurses", "lung")
STEPS = (
    *("imports", "read", "fit", "summary", "posterior", "effects", "predict", "loo"),
    *("save", "load", "report"),
)
THEIR_TIME = ("time | event(died)", "censored(time, censored)")


def steps(name: str, path: Path) -> dict[str, float]:
    """Return the CPU seconds of each step on the rows of a file."""
    found, began = {}, 0.0

    def done(step: str) -> None:
        nonlocal began
        found[step], began = time.process_time() - began, time.process_time()

    import torch

    import hierfl

    torch.set_num_threads(1)
    # names are imported when they are first asked for
    _ = hierfl.fit, hierfl.formula, hierfl.diagnostics.loo
    done("imports")
    from benchmarks.formula_problems import PROBLEMS

    problem, began = PROBLEMS[name], time.process_time()
    import pandas as pd

    frame = pd.read_csv(path)
    done("read")
    formula = hierfl.formula(
        problem.formula, problem.family, clients=problem.clients, missing="drop"
    )
    fit = hierfl.fit(formula, frame, seed=0, progress=False)
    done("fit")
    fit.summary()
    done("summary")
    fit.posterior()
    done("posterior")
    fit.predictions(_first_term(problem.formula))
    done("effects")
    fit.predict(frame)
    done("predict")
    hierfl.diagnostics.loo(fit)
    done("loo")
    with tempfile.TemporaryDirectory() as folder:
        fit.save(Path(folder) / "fit", with_data=True)
        done("save")
        again = hierfl.load(Path(folder) / "fit")
        done("load")
        again.report(Path(folder) / "page.html")
        done("report")
    return found


def _first_term(formula: str) -> str:
    """Return the column of the first predictor."""
    first = formula.partition("~")[2].split("+")[0].strip()
    return first.removeprefix("scale(").removesuffix(")")


def by_bambi(name: str, path: Path, python: str) -> float:
    """Return the CPU seconds of bambi, its imports and the table of its posterior included."""
    import pandas as pd

    from benchmarks.formula_problems import PROBLEMS
    from benchmarks.pooled_nuts import ROOT
    from benchmarks.seconds import of_children

    problem, frame = PROBLEMS[name], pd.read_csv(path)
    if name == "lung":
        frame["censored"] = frame["died"].map({1: "none", 0: "right"})
    asked: dict[str, Any] = {
        "rows": json.loads(frame.dropna().to_json(orient="columns")),
        "formula": problem.formula.replace(*THEIR_TIME),
        "family": problem.family,
        "draws": 1000,
    }
    asked["rows"] = {column: list(of.values()) for column, of in asked["rows"].items()}
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / "asked.json", Path(folder) / "out.json"]
        files[0].write_text(json.dumps(asked))
        began = of_children()
        subprocess.run(
            [python, "-m", "benchmarks.bambi_sampler", *map(str, files)],
            cwd=ROOT,
            check=True,
            capture_output=True,
        )
        return of_children() - began


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table, a row for each data set."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.workflow", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        print(json.dumps(steps(args.names[0], args.one)))
        return
    from benchmarks.formula_problems import PROBLEMS
    from benchmarks.seconds import run_alone

    print(f"| data | {' | '.join(STEPS)} | all | bambi |")
    print("|---|" + "---:|" * (len(STEPS) + 2))
    bambi = os.environ.get("HIERFL_BAMBI")
    with tempfile.TemporaryDirectory() as folder:
        for name in args.names or NAMES:
            path = Path(folder) / f"{name}.csv"
            PROBLEMS[name].frame().to_csv(path, index=False)
            said = run_alone("-m", "benchmarks.workflow", name, "--one", str(path))
            found = json.loads(said)
            other = f"{by_bambi(name, path, bambi):.1f}" if bambi else "none"
            each = " | ".join(f"{found[step]:.1f}" for step in STEPS)
            print(f"| {name} | {each} | {sum(found.values()):.1f} | {other} |", flush=True)


if __name__ == "__main__":
    main()
