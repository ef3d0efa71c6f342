"""Clients whose updates conflict with all others': named in history and warning, and counted."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

from hierfl.method import Surprise

FEWEST = 4  # clients that are judged: with fewer, nobody can say which of them is the odd one
ALARM = 0.01  # tail probability, times the number of clients that are judged (Bonferroni)
COMPARED, CONFLICTS = "compared", "conflicts"  # columns of the history


def said_of_conflicts(found: Surprise | None, names: Sequence[str]) -> dict[str, Any]:
    """Return what the history says of clients that conflict with the others, and warn of each.

    A false alarm comes up in at most 1 of 100 fits, however many clients there are, as far as the
    p-values are right.

    Args:
        found: of N clients; None: nothing was compared in the round.
        names: of the clients.

    Returns:
        `compared`, how many clients were judged, 0 with fewer than four; `surprise`, the smallest
        p-value times that number, at most 1; and `conflicts`, of each client where it is below
        0.01: its name, that number `p`, and `away`, how far out it is.
    """
    if found is None:
        return {}
    values = found.p.double().tolist()
    judged = [k for k, p in enumerate(values) if not math.isnan(p)]
    if len(judged) < FEWEST:
        return {COMPARED: 0}
    p = {k: min(1.0, len(judged) * values[k]) for k in judged}
    far = sorted((k for k in judged if p[k] < ALARM), key=lambda k: values[k])
    conflicts = [{"client": names[k], "p": p[k], "away": float(found.away[k])} for k in far]
    for one in conflicts:
        warnings.warn(
            f"client '{one['client']}' conflicts with all others: its summary is "
            f"{one['away']:.1f} times as far from what they predict as summaries lie (p = "
            f"{one['p']:.1g}, corrected for {len(judged)} clients). It is counted. See whether "
            "its outcome and columns are coded and in units as the others'; to see what it "
            "changes, fit without it (data.select)",
            stacklevel=4,
        )
    return {COMPARED: len(judged), "surprise": min(p.values()), CONFLICTS: conflicts}
