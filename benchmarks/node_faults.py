"""Faults of nodes and of the server, by killing processes.

Run `python -m benchmarks.node_faults [--faults 50] [--write]`.

Five nodes and a server run PVI as processes that speak the bytes of `hierfl.nodes` over a socket.
Faults drawn by a seed fall on them: SIGKILL of a node or of the server at several points of a
round, nodes that do not answer, answer twice, late or with half a message, that are asked twice, or
that join late. What is killed is started again, from its folder or its checkpoint. The posterior is
compared with that of `hierfl.fit` on all rows together, and the factors that nodes keep are added
up: they must be the server's posterior, which holds every client's answers exactly once.

Prints a table; `--write` also writes it to benchmarks/FAULTS.md.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import hierfl
from benchmarks.node_fault_problem import SEED, clients, method
from benchmarks.node_fault_processes import (
    DONE,
    RESULT,
    ROUND,
    TOO_FEW,
    Fault,
    Plan,
    run_node,
    run_server,
)
from hierfl.nodes.agreement import Agreement, Introduction
from hierfl.nodes.client_state import kept
from hierfl.nodes.node import node

NODES = (  # kind -> share of the faults
    ("killed before its work", 4),
    ("killed while it writes its state", 5),
    ("killed before it answers", 6),
    ("killed after it answered", 4),
    ("never answers", 4),
    ("answers a round late", 5),
    ("answers twice", 5),
    ("answers with half a message", 4),
    ("is asked twice", 3),
)
SERVER = (
    ("killed after it has asked", 3),
    ("killed before its checkpoint", 3),
    ("killed while it writes its checkpoint", 2),
)
LATE = 2  # nodes that join late
FORK = multiprocessing.get_context("fork")  # a copy starts at once, as torch is imported
PATIENCE = 600.0  # seconds


@dataclass(frozen=True)
class Outcome:
    """What came of a run with faults.

    Args:
        faults: how many happened, by kind.
        deaths: processes that were killed and started again.
        mean: the largest difference of a mean from the undisturbed one, in its sd.
        sd: the largest ratio of an sd to the undisturbed one, or its inverse.
        factors: the largest difference between the sum of what nodes keep and the server's
            posterior.
        missing: client rounds that were not counted.
        withheld: nodes that had no answer at the end, with the reason.
        seconds: of the whole run.
    """

    faults: dict[str, int]
    deaths: int
    mean: float
    sd: float
    factors: float
    missing: int
    withheld: dict[str, str]
    seconds: float


def planned(
    count: int, rounds: int, folder: Path, *, seed: int, timeout: float, late: int = LATE
) -> Plan:
    """Draw faults: one of a client or of the server in a round, none in the last two rounds."""
    draw = random.Random(seed)
    names = list(clients().names)
    slow = draw.sample(names, min(late, count))
    faults = [
        Fault(k, draw.randint(2, max(3, rounds // 4)), n, "joins late") for k, n in enumerate(slow)
    ]
    kinds = [kind for kind, share in (*NODES, *SERVER) for _ in range(share)]
    several = [
        kind for _ in range(-(-count // len(kinds))) for kind in draw.sample(kinds, len(kinds))
    ]
    taken: set[tuple[str, int]] = set()
    starts = {one.who: one.round + 1 for one in faults}
    for kind in several[: max(0, count - late)]:
        while True:
            who = "server" if kind in dict(SERVER) else draw.choice(names)
            at = draw.randint(starts.get(who, 0), rounds - 3)
            if (who, at) not in taken:
                break
        taken.add((who, at))
        faults.append(Fault(len(faults), at, who, kind))
    return Plan(folder, rounds, timeout, tuple(faults))


def prepared(plan: Plan) -> Agreement:
    """Make the folders of a run; every node has told of its client, those that join late too."""
    shutil.rmtree(plan.folder, ignore_errors=True)
    (plan.folder / DONE).mkdir(parents=True)
    told = []
    for name in clients().names:
        (plan.folder / name).mkdir(mode=0o700)
        (plan.folder / name / "policy.toml").write_text('may_leave = ["summaries"]\n')
        told.append(Introduction.of(clients().select([name])))
    return Agreement.between(told)


def carried_out(plan: Plan) -> Outcome:
    """Run a plan: start the processes, and start again what is killed."""
    began, agreement = time.monotonic(), prepared(plan)
    processes: dict[str, Any] = {}
    deaths = 0
    try:
        while not (plan.folder / RESULT).exists():
            if time.monotonic() - began > PATIENCE:
                raise RuntimeError(
                    f"the run has not ended within {PATIENCE:g} s: see '{plan.folder}'"
                )
            for who in due(plan, agreement):
                process = processes.get(who)
                if process is None or not process.is_alive():
                    deaths += process is not None and _was_killed(who, process.exitcode)
                    processes[who] = _started(plan, who, agreement)
            time.sleep(0.02)
    finally:
        for process in processes.values():
            process.kill()
            process.join()
    return compared(plan, agreement, deaths, time.monotonic() - began)


def due(plan: Plan, agreement: Agreement) -> Iterator[str]:
    """Yield who should be running now."""
    yield "server"
    now = int((plan.folder / ROUND).read_text() or -1) if (plan.folder / ROUND).exists() else -1
    for name in agreement.names:
        first = plan.late.get(name, -1)
        if now >= first:
            yield name
        for one in plan.faults:
            if one.kind == "joins late" and one.who == name and now >= first:
                plan.mark(one)


def _started(plan: Plan, who: str, agreement: Agreement) -> Any:
    if who == "server":
        process = FORK.Process(target=run_server, args=(plan, agreement))
    else:
        process = FORK.Process(target=run_node, args=(plan, who, agreement))
    process.start()
    return process


def _was_killed(who: str, status: int) -> bool:
    """Return whether a process was killed on purpose.

    Raises:
        RuntimeError: it has failed by itself.
    """
    if status == -signal.SIGKILL:
        return True
    if status == TOO_FEW or status == 0:
        return False
    raise RuntimeError(f"{who} ended with status {status}: see what it printed")


def compared(plan: Plan, agreement: Agreement, deaths: int, seconds: float) -> Outcome:
    """Compare a run with the undisturbed one."""
    found = json.loads((plan.folder / RESULT).read_text())
    mean, sd = undisturbed(plan.rounds)
    known = [name for name in mean if name in found["mean"]]
    done = {int(path.name) for path in (plan.folder / DONE).iterdir()}
    kinds = [one.kind for one in plan.faults if one.number in done]
    return Outcome(
        faults={kind: kinds.count(kind) for kind in sorted(set(kinds))},
        deaths=deaths,
        mean=max(abs(found["mean"][n] - mean[n]) / sd[n] for n in known),
        sd=max(math.exp(abs(math.log(found["sd"][n] / sd[n]))) for n in known),
        factors=_apart(plan, agreement, found["factors"]),
        missing=sum(map(len, found["left_out"])),
        withheld=found["withheld"],
        seconds=seconds,
    )


def undisturbed(rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return means and sds of every site, of the fit on all rows together."""
    data = clients()
    fit = hierfl.fit(
        method(),
        data,
        rounds=rounds,
        seed=SEED,
        settings=hierfl.Settings(compile=False),
        progress=False,
    )
    drawn = fit.draws(4000, seed=1)
    mean, sd = {}, {}
    for k, name in enumerate(data.names):
        for j, column in enumerate(drawn.own["slope"][:, k].unbind(1)):
            mean[f"{name} slope[{j}]"], sd[f"{name} slope[{j}]"] = (
                float(column.mean()),
                float(column.std()),
            )
    for j, column in enumerate(drawn.shared["loc"].unbind(1)):
        mean[f"loc[{j}]"], sd[f"loc[{j}]"] = float(column.mean()), float(column.std())
    return mean, sd


def _apart(plan: Plan, agreement: Agreement, factors: dict[str, Any]) -> float:
    """Return how far the sum of the factors that nodes keep is from the server's."""
    total: dict[str, torch.Tensor] = {}
    for name in agreement.names:
        made = node(method(), clients().select([name]), agreement, plan.folder / name, seed=SEED)
        for part, value in kept(made).after.factor._asdict().items():
            total[part] = total.get(part, torch.zeros(())) + value
    return max(
        float((total[part] - torch.tensor(factors[f"['{part}']"])).abs().max()) for part in total
    )


def written(found: Outcome, rounds: int, seed: int) -> str:
    """Return the table, in Markdown."""
    happened = sum(found.faults.values())
    kinds = pd.DataFrame(list(found.faults.items()), columns=["fault", "times"])
    lines = [
        "# Faults over nodes",
        "",
        f"`python -m benchmarks.node_faults --faults {happened} --rounds {rounds} --seed {seed} "
        f"--write`: five nodes",
        "and a server as processes, PVI of a logistic hierarchy. Processes are killed by SIGKILL "
        "and started again.",
        "",
        f"* {happened} faults over {rounds} rounds; {found.deaths} processes killed and started "
        f"again; {found.seconds:.0f} s.",
        f"* Client rounds that were not counted: {found.missing} of {5 * rounds}.",
        f"* Largest difference of a posterior mean from the undisturbed run: {found.mean:.2g} sd. "
        f"Of an sd: a factor of {found.sd:.4f}.",
        f"* Client states lost: {len(found.withheld)}. Sum of the factors that nodes keep, less "
        f"the server's: {found.factors:.1e}.",
        "",
        "| fault | times |",
        "|---|---:|",
        *(f"| {row.fault} | {row.times} |" for row in kinds.itertuples()),
    ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Run, compare, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=8.0, help="seconds a round")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args(argv)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="hierfl-") as folder:
        place = Path(folder) / "run"
        plan = planned(asked.faults, asked.rounds, place, seed=asked.seed, timeout=asked.timeout)
        text = written(carried_out(plan), asked.rounds, asked.seed)
    print(text)
    if asked.write:
        (Path(__file__).parent / "FAULTS.md").write_text(text)


if __name__ == "__main__":
    main()
