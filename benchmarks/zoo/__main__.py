"""Fits of the zoo's programs beside NUTS's kept answers: `python -m benchmarks.zoo [NAME ...]`.

Each program is fitted in a process of its own by `hierfl.fit(model, data, seed=0)`, and the table
goes to `benchmarks/ZOO.md`. `--nuts` samples again by NumPyro (`pip install numpyro`, or `HIERFL_NUMPYRO` names a
Python that has it) and keeps the answers in `benchmarks/zoo/answers.json`.
"""

from __future__ import annotations

import argparse
import json
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import hierfl
from benchmarks.pooled_nuts import ROOT, python
from benchmarks.zoo.reading import data_of, program_of

HERE = Path(__file__).parent
ANSWERS, TABLE = HERE / "answers.json", ROOT / "benchmarks/ZOO.md"
NAMES = sorted(path.stem for path in (HERE / "programs").glob("[a-z]*.py"))
MIXED, EFFECTIVE = 1.02, 150  # R-hat of chains whose answer is kept, and draws that are effective
LIMIT = 100  # CPU seconds of a fit
NUTS_LIMIT = 500  # CPU seconds of a run of NUTS
MEAN, SD = 0.15, 0.15  # of posterior sds, and of the ratio of sds


class Apart(NamedTuple):
    """How far a fit is from NUTS: of all numbers, the worst mean in sds and ratio of sds."""

    mean: float
    mean_site: str
    ratio: float
    ratio_site: str


def limited(seconds: int) -> None:
    """End this process after some CPU seconds."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))


def in_limit(command: Sequence[str], seconds: int) -> subprocess.CompletedProcess[str]:
    """Run a command that has some CPU seconds."""
    end = partial(limited, seconds)
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, preexec_fn=end)


def fitted_apart(name: str) -> dict[str, Any]:
    """Fit a program in a process of its own, which has `LIMIT` CPU seconds."""
    command = [sys.executable, "-m", "benchmarks.zoo", "--one", name]
    ran = in_limit(command, LIMIT)
    if ran.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return {"seconds": float(LIMIT), "verdict": f"Not ended after {LIMIT} CPU s"}
    if ran.returncode:
        return {"seconds": 0.0, "verdict": f"Failed: {ran.stderr.strip().splitlines()[-1]}"}
    answer: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return answer


def fitted(name: str) -> dict[str, Any]:
    """Fit a program in this process; an error or a warning is part of the answer."""
    torch.set_num_threads(1)
    program = program_of(name)
    began = time.process_time()
    try:
        fit = hierfl.fit(program.model, data_of(program), seed=0, progress=False)
        seconds = time.process_time() - began
        summary = fit.summary()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return {"seconds": time.process_time() - began, "verdict": text}
    return {
        "rounds": len(fit.history),
        "seconds": seconds,
        "chosen": fit.chosen,
        "verdict": summary.verdict,
        "sites": moments_of(fit, getattr(program, "LOGS", ())),
    }


def moments_of(fit: hierfl.Fit, logs: Sequence[str]) -> dict[str, dict[str, list[float]]]:
    """Return mean and sd of each number of each site, or of its log, by 4,000 draws."""
    posterior = fit.posterior(4000, seed=1)["posterior"]
    sites = {}
    for site, values in posterior.data_vars.items():
        value = values.to_numpy().reshape(values.shape[0] * values.shape[1], -1)
        value = np.log(value) if site in logs else value
        sites[str(site)] = {"mean": value.mean(0).tolist(), "sd": value.std(0).tolist()}
    return sites


def sampled(name: str, *options: str) -> dict[str, Any]:
    """Sample a program by NUTS in a process of its own.

    Args:
        name: the program.
        *options: of `benchmarks.zoo.by_numpyro`.

    Raises:
        RuntimeError: the process failed, or had no time left.
    """
    rows = hierfl.full_batch(data_of(program_of(name)))
    fields = {**rows.fields, **rows.client_fields}
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder) / of) for of in ("rows.npz", "out.json")]
        doubles = {n: v.double() if v.is_floating_point() else v for n, v in fields.items()}
        arrays: dict[str, Any] = {n: v.numpy() for n, v in doubles.items()}
        np.savez(files[0], present=rows.mask().numpy(), **arrays)
        command = [python(), "-m", "benchmarks.zoo.by_numpyro", name, *files, *options]
        ran = in_limit(command, NUTS_LIMIT)
        if ran.returncode:
            raise RuntimeError(f"NUTS of {name} failed: {ran.stderr[-3000:]}")
        return dict(json.loads(Path(files[1]).read_text()))


def kept_of(name: str) -> dict[str, Any]:
    """Sample a program by NUTS, and return what is kept of the answer.

    Raises:
        RuntimeError: of `sampled`, or the chains have not mixed.
    """
    answer = sampled(name)
    r_hat, effective = answer["r_hat"], answer["effective"]
    if not (r_hat < MIXED and effective >= EFFECTIVE):
        raise RuntimeError(f"{name} has not mixed: R-hat {r_hat}, {effective} effective draws")
    sites = answer.pop("sites")
    rounded = {
        n: {k: [float(f"{x:.5g}") for x in v] for k, v in s.items()} for n, s in sites.items()
    }
    return {**answer, "sites": rounded}


def kept_answers() -> dict[str, Any]:
    """Return NUTS's answers, by program."""
    return json.loads(ANSWERS.read_text()) if ANSWERS.exists() else {}


def apart(fit: Mapping[str, Any], nuts: Mapping[str, Any]) -> Apart:
    """Compare the sites that both have.

    Raises:
        ValueError: they have none in common.
    """
    mean, ratio = (0.0, ""), (1.0, "")
    for name in fit.keys() & nuts.keys():
        loc, sd = (np.array(nuts[name][key]) for key in ("mean", "sd"))
        own_loc, own_sd = (np.array(fit[name][key]) for key in ("mean", "sd"))
        moving = sd > 1e-6 * np.abs(loc).max()
        if moving.any():
            away = np.abs(own_loc - loc)[moving] / sd[moving]
            ratios = own_sd[moving] / sd[moving]
            mean = max(mean, (float(away.max()), name))
            worst = ratios[np.abs(np.log(np.maximum(ratios, 1e-9))).argmax()]
            ratio = max(ratio, (float(worst), name), key=lambda r: abs(np.log(max(r[0], 1e-9))))
    if not mean[1]:
        raise ValueError(f"no site that moves is in both: {sorted(fit)}, {sorted(nuts)}")
    return Apart(*mean, *ratio)


COLUMNS = (
    *("program", "idiom", "method", "rounds", "CPU s", "NUTS, CPU s"),
    *("worst mean, sd", "worst sd ratio", "right", "verdict"),
)
HEAD = """# Programs that others wrote

Written by `python -m benchmarks.zoo`. Each program is a file of `benchmarks/zoo/programs`, with the group
as client, and is fitted by `hierfl.fit(model, data, seed=0)` in a process of its own; 4,000 draws are
compared with NUTS of NumPyro on the same file, two chains of 500 + 1,000 steps or more. Of all numbers of all
sites the table has the mean that is furthest from NUTS's, in NUTS's sds, and the ratio of sds that is
furthest from 1; a number without a variance is compared by its log. A fit is right if these are within 0.15
and 15%: the largest of dozens of errors of NUTS's own is about 0.1. Rows without
NUTS's numbers have not been sampled yet, or have params, which NUTS does not learn.
"""


def row_of(name: str, fit: Mapping[str, Any], nuts: Mapping[str, Any] | None) -> list[str]:
    """Return a program's row of the table; without NUTS's answer, no judgment."""
    verdict = str(fit["verdict"]).split("\n")[0].partition(". ")[0].replace("|", "/")
    of_nuts = "" if nuts is None else f"{nuts['seconds']:.1f}"
    method, rounds = str(fit.get("chosen", "")).partition(",")[0], str(fit.get("rounds", ""))
    cells = [name, program_of(name).IDIOM, method, rounds, f"{fit['seconds']:.1f}", of_nuts]
    if "sites" not in fit:
        return [*cells, "", "", "no", verdict]
    if nuts is None:
        return [*cells, "", "", "", verdict]
    away = apart(fit["sites"], nuts["sites"])
    right = away.mean <= MEAN and abs(away.ratio - 1.0) <= SD
    mean, ratio = f"{away.mean:.2f} ({away.mean_site})", f"{away.ratio:.2f} ({away.ratio_site})"
    return [*cells, mean, ratio, "yes" if right else "no", verdict]


def write(new: Mapping[str, Sequence[str]]) -> None:
    """Write rows into the table, in the place of older ones of the same programs."""
    lines = TABLE.read_text().splitlines() if TABLE.exists() else []
    rows = {line.split("|")[1].strip(): line for line in lines if line.startswith("|")}
    rows |= {name: f"| {' | '.join(cells)} |" for name, cells in new.items()}
    head = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    body = [rows[name] for name in sorted(rows) if name in NAMES]
    TABLE.write_text("\n".join([HEAD, *head, *body]) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Fit programs, and write their rows of the table; or sample them by NUTS."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--nuts", action="store_true", help="sample by NUTS instead")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        print(json.dumps(fitted(args.one)))
        return
    for name in args.names or NAMES:
        if args.nuts:
            try:
                answer = kept_of(name)
            except RuntimeError as error:
                print(name, error, flush=True)
                continue
            answers = {**kept_answers(), name: answer}
            ANSWERS.write_text(json.dumps(answers, sort_keys=True, separators=(",", ":")) + "\n")
            print(name, {k: v for k, v in answer.items() if k != "sites"}, flush=True)
            continue
        row = row_of(name, fitted_apart(name), kept_answers().get(name))
        write({name: row})
        print(" | ".join(row), flush=True)


if __name__ == "__main__":
    main()
