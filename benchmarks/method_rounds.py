"""Compiled rounds of every method, beside FedAvg's for the same gradient evaluations.

    python -m benchmarks.method_rounds [METHOD ...] [--size mlp|small] [--turns N] [--write]

The methods are those of the study `baselines`, each built for a classifier at a budget of gradient
evaluations. In each turn a block of FedAvg's rounds and a block of the method's run one after
another in the same process, in an order that alternates; a ratio compares the two blocks of a turn,
and the median over turns is shown. A ratio per evaluation is divided by the method's evaluations
over FedAvg's, where an evaluation of a model on a mini-batch without a gradient counts as a third.
With --write the tables go to METHODS.md, where methods that were not measured this time keep their
rows. The last line printed is one JSON object: method -> ratio per evaluation.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import hierfl
from benchmarks.speed import machine, run_method
from hierfl.studies.baseline_methods import BASELINES
from hierfl.studies.baseline_parts import Budget, held_out

PAGE = Path(__file__).with_name("METHODS.md")
AT_MOST = 1.5  # times FedAvg's round, for the same gradient evaluations
SETTLED = 3  # untimed first rounds: the first compiles

NOISE = "it draws noise for every weight at each evaluation, and steps on a mean and a scale"
WHY = {  # where the time above AT_MOST goes
    "fedabml": NOISE,
    "fedem": "the mixture's weights of each row",
    "fedfomo": "each round copies five models of others to each client, and mixes them",
    "fedmap": "its optimizer is Adam: FedAvg with Adam takes 1.55 itself, and fedmap with plain steps 1.21",
    "fedpa": "its optimizer has momentum: FedAvg with it takes 1.31; the rest is for its draws, ten times the weights",
    "fedpac": "of a round of 15 ms the compiled steps take 2.4; the rest are fixed costs of heads and class means",
    "fedpop": "of a round of 10 ms the compiled steps take 4.5; the rest are fixed costs of what it keeps",
    "fedsvi": f"{NOISE}, by Adam",
    "fedvi": "at each step a network of 191,000 weights makes the head, beside the 79,000 of what it is the head of",
    "pfedbayes": f"{NOISE}, by Adam",
    "pfedhn": "a third of the round is the server's network: 8 million weights, an output for each of a client's",
}


@dataclass(frozen=True)
class Size:
    """Sizes of one setting.

    Args:
        layers: width of the input, of the hidden layer and of the output.
        clients: all of which take part in each round.
        rows: of each client.
        batch: rows of a mini-batch.
        evaluations: gradient evaluations of a round, FedAvg's steps.
    """

    layers: tuple[int, int, int]
    clients: int
    rows: int
    batch: int
    evaluations: int

    def network(self) -> nn.Sequential:
        """Return the network, always with the same initial weights."""
        torch.manual_seed(0)
        inputs, hidden, outputs = self.layers
        return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))

    def data(self) -> hierfl.ClientData:
        """Return random rows: only speed is compared."""
        g = torch.Generator().manual_seed(0)
        count = self.clients * self.rows
        data = hierfl.ClientData.from_arrays(
            torch.arange(self.clients).repeat_interleave(self.rows),
            x=torch.randn(count, self.layers[0], generator=g),
            y=torch.randint(0, self.layers[2], (count,), generator=g),
        )
        return held_out(data)

    def rounds_of(self, name: str) -> Iterator[None]:
        """Run compiled rounds of a method; yield after each."""
        budget = Budget(
            evaluations=self.evaluations,
            rows=self.batch,
            rounds=1000,
            clients=self.clients,
            client_rows=self.rows,
            passes=max(1, round(self.evaluations * self.batch / self.rows)),
            scale=0.05,
        )
        torch.manual_seed(0)
        return run_method(BASELINES[name].made(self.network(), 0.001, budget), self.data())

    def words(self) -> str:
        """Return the sizes in words."""
        return (
            f"{self.clients} clients of {self.rows} rows, all in each round; a network of "
            f"{'-'.join(map(str, self.layers))}; mini-batches of {self.batch} rows; a budget of "
            f"{self.evaluations} gradient evaluations"
        )


SIZES = {
    "mlp": Size((784, 100, 10), clients=20, rows=100, batch=50, evaluations=20),
    "small": Size((64, 32, 10), clients=20, rows=50, batch=10, evaluations=20),
}


# evaluations of models on a mini-batch without a gradient, in a round
FORWARD: dict[str, Callable[[Size], int]] = {
    "fedem": lambda size: BASELINES["fedem"].spent(size.evaluations),  # whose model a row is
    "fedfomo": lambda size: 7 * -(-size.rows // size.batch),  # seven models on all rows
    "ifca": lambda size: 4 * -(-size.rows // size.batch),  # four models on all rows
}


@dataclass(frozen=True)
class Timed:
    """One method beside FedAvg.

    Args:
        name: of the method.
        evaluations: gradient evaluations of its round.
        forward: evaluations without a gradient.
        budget: gradient evaluations of FedAvg's round.
        ratios: of its seconds to FedAvg's, in each turn.
        seconds: of its round, in each turn.
    """

    name: str
    evaluations: int
    forward: int
    budget: int
    ratios: tuple[float, ...]
    seconds: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The median ratio of a round."""
        return statistics.median(self.ratios)

    @property
    def per_evaluation(self) -> float:
        """The median ratio of a round, for the same gradient evaluations."""
        return self.ratio * self.budget / (self.evaluations + self.forward / 3.0)

    def row(self) -> tuple[str, ...]:
        """Return the cells of the table."""
        return (
            self.name,
            f"{self.evaluations} + {self.forward}/3" if self.forward else str(self.evaluations),
            f"{statistics.median(self.seconds):.4f}",
            f"{self.ratio:.2f}",
            f"{min(self.ratios):.2f}-{max(self.ratios):.2f}",
            f"{self.per_evaluation:.2f}",
        )


HEAD = ("method", "evaluations", "s per round", "ratio to FedAvg", "(range)", "per evaluation")


def beside(name: str, base: Iterator[None], size: Size, *, turns: int, block: float) -> Timed:
    """Time a method's rounds in turns with FedAvg's.

    Args:
        name: of the method.
        base: FedAvg's rounds, which have run before.
        size: the setting.
        turns: how many blocks of each are timed.
        block: length of a block of rounds, in seconds.
    """
    other = size.rounds_of(name)
    _seconds(other, SETTLED)
    counts = [max(1, round(block / _seconds(run, 1))) for run in (base, other)]
    ratios, seconds = [], []
    for turn in range(turns):
        order = (0, 1) if turn % 2 == 0 else (1, 0)
        took = {which: _seconds((base, other)[which], counts[which]) for which in order}
        ratios.append(took[1] / took[0])
        seconds.append(took[1])
    spent = BASELINES[name].spent(size.evaluations)
    forward = FORWARD[name](size) if name in FORWARD else 0
    return Timed(name, spent, forward, size.evaluations, tuple(ratios), tuple(seconds))


def _seconds(run: Iterator[None], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        next(run)
    return (time.perf_counter() - began) / count


def measure(names: Sequence[str], size: Size, *, turns: int, block: float) -> Iterator[Timed]:
    """Time methods one after another, each in turns with the same run of FedAvg."""
    base = size.rounds_of("fedavg")
    _seconds(base, SETTLED)
    for name in names:
        yield beside(name, base, size, turns=turns, block=block)


Row = tuple[str, ...]


def kept_rows(old: str, name: str) -> dict[str, Row]:
    """Return the rows of one setting in the text of METHODS.md, by method."""
    _, _, text = old.partition(f"\n## {name}\n")
    lines = [line for line in text.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
    return {row[0]: row for row in rows if row != HEAD}


def section(by_method: Mapping[str, Row], size: Size) -> str:
    """Return the table of one setting, the slowest per evaluation first."""
    rows = sorted(by_method.values(), key=lambda row: -float(row[-1]))
    lines = [f"| {' | '.join(HEAD)} |", "|---" + "|---:" * (len(HEAD) - 1) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    above = [row[0] for row in rows if float(row[-1]) > AT_MOST]
    lines += ["", f"Above {AT_MOST} per evaluation: {len(above)} of {len(rows)}.", ""]
    lines += [f"* `{name}`: {WHY.get(name, 'not looked into')}." for name in above]
    return f"{size.words()}.\n\n" + "\n".join(lines).rstrip() + "\n"


def page(sections: dict[str, str], threads: int, load: float) -> str:
    """Return METHODS.md."""
    head = f"""# Rounds of every method beside FedAvg's

Written by `python -m benchmarks.method_rounds --write`, on {machine()}, {threads} thread(s); load before the run:
{load:.1f}. Ratios are medians over turns, of blocks of compiled rounds that ran one after another in one process.
**per evaluation**: the ratio, divided by the method's gradient evaluations over FedAvg's; an evaluation of a model on
a mini-batch without a gradient counts as a third of one.
"""
    return head + "".join(f"\n## {name}\n\n{text}" for name, text in sections.items())


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.method_rounds",
        description="Compiled rounds of every method, beside FedAvg's.",
    )
    parser.add_argument("method", nargs="*", help="default: all of hierfl.studies.baseline_methods")
    parser.add_argument("--size", action="append", choices=SIZES, help="default: all")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--block", type=float, default=0.3, help="seconds of a block of rounds")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--write", action="store_true", help=f"write the tables to {PAGE.name}")
    args = parser.parse_args(argv)
    unknown = set(args.method) - set(BASELINES)
    if unknown:
        parser.error(f"there is no method {min(unknown)}; choose from {', '.join(BASELINES)}")
    torch.set_num_threads(args.threads)
    torch.set_default_dtype(torch.float32)
    old = PAGE.read_text() if PAGE.exists() else ""
    sections = {
        name: section(rows, SIZES[name]) for name in SIZES if (rows := kept_rows(old, name))
    }
    load = os.getloadavg()[0]
    record: dict[str, float] = {}
    for name in args.size or SIZES:
        table = Table(*HEAD, title=f"{name}: compiled rounds", title_justify="left")
        found = []
        for timed in measure(
            args.method or list(BASELINES), SIZES[name], turns=args.turns, block=args.block
        ):
            print(f"{name} {timed.name}: {timed.per_evaluation:.2f}", flush=True)
            found.append(timed)
            table.add_row(*timed.row())
        Console(width=110).print(table)
        rows = kept_rows(old, name) | {timed.name: timed.row() for timed in found}
        sections[name] = section(rows, SIZES[name])
        record |= {f"{name} {timed.name}": round(timed.per_evaluation, 3) for timed in found}
    if args.write:
        PAGE.write_text(page(sections, args.threads, load))
    print(json.dumps(record))


if __name__ == "__main__":
    main()
