"""Step sizes and weights of a study's methods: each method's are chosen from the same grid, on validation rows.

A validation row is a training row that its client has kept from the fit; test rows play no part. Every trial
is saved like a run of the study, so that an interrupted search resumes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hierfl.engine.chunks import ClientError
from hierfl.studies.results import Say, kept, quiet

# The grid of step sizes in FedABML, section 5.
RATES = (1e-3, 1e-2, 10**-1.5, 1e-1, 10**-0.5)

Choice = dict[str, float]
DIVERGED = -math.inf  # score of a trial whose weights grow beyond all bounds


def tuned(
    out: Path,
    name: str,
    settings: Mapping[str, Any],
    grid: Mapping[str, Sequence[float]],
    score: Callable[[Choice], float],
    say: Say = quiet,
) -> Choice:
    """Choose the options of one method that score highest on validation rows.

    One option is searched at a time, in the order of the grid, the ones after it at their first values. Equal
    scores go to the smaller value.

    Args:
        out: the study's folder; each trial is saved there by `kept`.
        name: readable name of the search, such as the method's.
        settings: everything the scores depend on beside the options, as JSON-compatible values.
        grid: option -> the values to try, in the order in which the options are searched.
        score: options -> score on validation rows, higher is better; a fit that diverges scores lowest.
        say: called with one line for each trial that has to be computed.

    Returns:
        Option -> value.

    Raises:
        ValueError: every trial of an option diverges.
    """
    chosen: Choice = {option: values[0] for option, values in grid.items()}

    def found(options: Choice) -> float:
        shown = "-".join(f"{option}-{value:.4g}" for option, value in options.items())
        saved = {**settings, "trial": name, "options": options}
        return _read(
            kept(out, f"tuning-{name}-{shown}", saved, lambda: _tried(score, options), say)
        )

    for option, values in grid.items():
        scores = {value: found({**chosen, option: value}) for value in sorted(values)}
        best = max(scores, key=lambda value: scores[value])
        if scores[best] == DIVERGED:
            raise ValueError(
                f"{name}: every trial of '{option}' diverges ({', '.join(f'{v:.3g}' for v in values)}): "
                f"add smaller step sizes to the grid"
            )
        chosen[option] = best
    return chosen


def _tried(score: Callable[[Choice], float], options: Choice) -> dict[str, float | None]:
    try:
        value = score(dict(options))
    except ClientError:  # an update that is not finite
        return {"score": None}
    return {"score": value if math.isfinite(value) else None}


def _read(numbers: Mapping[str, float | None]) -> float:
    value = numbers["score"]
    return DIVERGED if value is None else value
