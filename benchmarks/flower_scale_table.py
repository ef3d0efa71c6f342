"""The table of `benchmarks.flower_scale`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).parent / "SCALE.md"
OTHERS = "\n# What an answer"  # where the table of `benchmarks.server_scale` begins


@dataclass(frozen=True)
class Measured:
    """What a run cost.

    Args:
        what: ran.
        clients: a round.
        rounds: of the run.
        seconds_a_round: median.
        seconds_before: of the whole run, less those of its rounds.
        bytes_down: to a client and round.
        bytes_up: from a client and round.
        gigabytes: peak memory.
    """

    what: str
    clients: int
    rounds: int
    seconds_a_round: float
    seconds_before: float
    bytes_down: int
    bytes_up: int
    gigabytes: float


def write(
    found: Sequence[Measured],
    apart: float,
    clients: int,
    cores: int,
    versions: Mapping[str, str],
    *,
    to_file: bool,
) -> None:
    """Print the table, and write it."""
    load = os.getloadavg()[1]
    lines = [
        f"# {clients:,} clients in Flower's simulation",
        "",
        "`python -m benchmarks.flower_scale --write`: FedAvg of a small network (1,152 float64 "
        "numbers), ten local",
        "steps, 20 rows a client. The project is that of `hierfl new`, with its own model and "
        "rows, on",
        f"{', '.join(f'{k} {v}' for k, v in versions.items())} and {cores} cores, which other "
        f"work shared:",
        f"{load:.0f} processes wanted them. Ray is needed for the simulation alone, and is no "
        f"dependency of hierfl:",
        "`pip install 'flwr[simulation]'`.",
        "",
        f"Largest difference of a weight between Flower's result and `hierfl.fit`'s: {apart:.1e}.",
        "",
        "| | clients a round | rounds | s a round | s before and after | bytes down | bytes up | "
        "GB |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
        *(
            f"| {one.what} | {one.clients:,} | {one.rounds} | {one.seconds_a_round:.1f} | "
            f"{one.seconds_before:.0f} | "
            f"{one.bytes_down:,} | {one.bytes_up:,} | {one.gigabytes:.1f} |"
            for one in found
        ),
        "",
        "Bytes are of a client's tensors in one round.",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if to_file:
        _, mark, others = FILE.read_text().partition(OTHERS)
        FILE.write_text(text + mark + others)


# ------------------------------------------------------------------------------------------------ a
# million devices
DEVICES = 1_000_000
LINE = 125_000_000  # bytes a second of a server's network: 1 Gbit/s
COHORTS = (1_000, 10_000, 100_000, DEVICES)
MINUTE = 60.0  # seconds that a round of an aggregator may take


def append(
    rows: Sequence[Mapping[str, float]], agreed: Mapping[int, int], *, to_file: bool
) -> None:
    """Print what an answer costs the server and what follows for a million devices, and add it to the file."""
    lines = [
        "",
        "# What an answer costs the server",
        "",
        "`python -m benchmarks.server_scale --write`, measured on made-up answers of FedAvg: the "
        "server reads, checks",
        "and sums each as it comes in. It keeps 256 of them, or 64 MB but 16. Milliseconds are of "
        "one core.",
        "",
        "| float32 numbers | answers | bytes down | bytes up | ms an answer | MB for all answers |",
        "|---:|---:|---:|---:|---:|---:|",
        *(
            f"| {one['params']:,} | {one['answers']:,} | {one['down']:,.0f} | {one['up']:,.0f} | "
            f"{1e3 * one['seconds']:.2f} | {one['megabytes']:.0f} |"
            for one in rows
        ),
        "",
        "Each node is told all clients' names and numbers of rows before the first round; "
        "measured, in bytes a node:",
        ", ".join(f"{count:,} clients {size:,}" for count, size in agreed.items()) + ".",
        "",
        "## Computed from these: rounds of a stateless method",
        "",
        "Seconds are of one core, and of a network of 1 Gbit/s for both directions. Requests are "
        "all in memory",
        "before the first is sent. An aggregator of a tree has a core and such a network, and "
        "takes a minute a round.",
        "",
        "| float32 numbers | clients a round | GB up | s of a core | s of a network | GB of "
        "requests | answers an aggregator | aggregators | levels |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for one in {int(row["params"]): row for row in rows}.values():
        lines += [_of_cohort(one, cohort) for cohort in COHORTS]
    text = "\n".join(lines) + "\n"
    print(text)
    if to_file:
        FILE.write_text(FILE.read_text().partition(OTHERS)[0] + text)


def _of_cohort(one: Mapping[str, float], cohort: int) -> str:
    """Return what a round of a cohort costs, as a line of a table."""
    work = cohort * one["seconds"]
    line = cohort * (one["up"] + one["down"]) / LINE
    fan_in = max(2, int(MINUTE / max(one["seconds"], (one["up"] + one["down"]) / LINE)))
    aggregators, levels, left = 0, 0, cohort
    while left > 1:
        left = -(-left // fan_in)
        aggregators, levels = aggregators + left, levels + 1
    return (
        f"| {one['params']:,.0f} | {cohort:,} | {cohort * one['up'] / 1e9:.3g} | {work:.3g} | "
        f"{line:.3g} | {cohort * one['down'] / 1e9:.3g} | {fan_in:,} | {aggregators:,} | {levels} |"
    )
