"""Who was left out of a run's rounds, or took no part in it, as its history says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

TAKES_PART = "takes_part"  # of a client that was left out: False where it failed before the rounds


def times_left_out(history: Iterable[Mapping[str, Any]]) -> int:
    """Return how many times a client that takes part was left out of a round."""
    return sum(map(len, left_out_of_rounds(history).values()))


def left_out_of_rounds(
    history: Iterable[Mapping[str, Any]],
) -> dict[str, list[tuple[int, Mapping[str, Any]]]]:
    """Return by client from which rounds a client that takes part was left out, and why."""
    of_client = records_of(history, "left_out").items()
    return {client: times for client, times in of_client if times[0][1].get(TAKES_PART, True)}


def absent_from(history: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the clients that took no part in a run, and why."""
    of_client = records_of(history, "left_out").items()
    return {
        client: str(times[0][1]["reason"])
        for client, times in of_client
        if not times[0][1].get(TAKES_PART, True)
    }


def with_absent(record: Mapping[str, Any], absent: Mapping[str, str]) -> dict[str, Any]:
    """Return the record of a round that names, beside those left out of it, who takes no part in the run."""
    others = [out for out in record.get("left_out", ()) if out.get(TAKES_PART, True)]
    absentees = [{"client": c, "reason": why, TAKES_PART: False} for c, why in absent.items()]
    return {**record, "left_out": [*others, *absentees]}


def records_of(
    history: Iterable[Mapping[str, Any]], column: str
) -> dict[str, list[tuple[int, Mapping[str, Any]]]]:
    """Return a column of the history ("left_out", "far_out") by client, with the rounds."""
    records: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
    for record in history:
        for entry in record.get(column) or ():
            records.setdefault(entry["client"], []).append((record["round"], entry))
    return records
