"""All attacks: `python -m benchmarks.attacks [--quick] [attack ...]`.

Prints a table of what became of each try. The columns "wrong", "raw" and "code run" must be 0; the
exit status says whether they are.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.attacks import (
    data_sets,
    flips,
    hostile_server,
    introductions,
    kills,
    lying_nodes,
    records,
    together,
)

ATTACKS: dict[str, tuple[Callable[..., dict[str, int]], int, str]] = {
    "kills": (kills.attack, 200, "fits and saves killed, then resumed"),
    "flips": (flips.attack, 500, "bytes changed in what is loaded"),
    "records": (records.attack, 100, "crafted folders loaded"),
    "data_sets": (data_sets.attack, 100, "malformed and strange data"),
    "hostile_server": (hostile_server.attack, 200, "requests of a server of its own mind"),
    "lying_nodes": (lying_nodes.attack, 100, "runs with one liar of four nodes"),
    "introductions": (introductions.attack, 100, "crafted introductions"),
    "together": (together.attack, 40, "pairs of processes on a folder, and of threads"),
}
COUNTS = ("right", "refused", "wrong", "raw", "code run")
QUICK = 10  # times fewer


def main(arguments: Sequence[str] | None = None) -> int:
    """Run attacks and print the table.

    Return 1 if anything came out wrong, raw or as code that ran, else 0.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("attacks", nargs="*", metavar="attack", help=", ".join(ATTACKS))
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} times fewer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tries", type=int, help="in place of each attack's own number")
    parser.add_argument("--first", type=int, help="of the tries of lying_nodes, to run it in parts")
    chosen = parser.parse_args(arguments)
    table, bad = Table("attack", "what", "tries", *COUNTS, "seconds"), 0
    for name in chosen.attacks or ATTACKS:
        attack, tries, what = ATTACKS[name]
        tries = chosen.tries or (tries // QUICK if chosen.quick else tries)
        part = {} if chosen.first is None else {"first": chosen.first}
        began = time.perf_counter()
        found = attack(tries, chosen.seed, **part)
        bad += sum(found.get(count, 0) for count in COUNTS[2:])
        seconds = f"{time.perf_counter() - began:.0f}"
        table.add_row(name, what, str(tries), *(str(found.get(k, 0)) for k in COUNTS), seconds)
    Console(width=120).print(table)
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
