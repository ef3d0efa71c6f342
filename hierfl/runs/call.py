"""The arguments of `fit`, and the checks of their kinds before any work is done."""

import numbers
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hierfl.core.arguments import expect, expect_integer, expect_kind, shown
from hierfl.core.user_warnings import warn
from hierfl.data.batch import expect_client_data
from hierfl.data.clients import ClientData
from hierfl.engine.federation import Settings
from hierfl.method import Method
from hierfl.program.sites import Family

if TYPE_CHECKING:
    from hierfl.runs.result import Fit

NAMED = 5  # clients in a warning
OR_NONE = ("rounds", "cohort", "patience")


@dataclass(frozen=True, eq=False)
class FitArguments:
    """The arguments of `hierfl.fit` after the model and the data, checked."""

    rounds: int | None
    seed: int
    cohort: int | float | None
    checkpoint: Path | None
    checkpoint_every: int
    resume: bool
    validation: ClientData | None
    eval_every: int
    patience: int | None
    callback: "Callable[[Fit], object] | None"
    progress: bool
    settings: Settings
    time_limit: float | None = None  # seconds
    lines: bool = False  # whether a long run says every ten seconds how far it is

    def __post_init__(self) -> None:
        """Refuse arguments of another kind, or out of range."""
        if self.validation is not None:
            expect_client_data(self.validation, "validation")
        for name in ("rounds", "checkpoint_every", "eval_every", "seed", "cohort", "patience"):
            check_count(name, getattr(self, name))
        if self.time_limit is not None:
            expect(time_limit=(self.time_limit, "(0, inf]"))
        fix = "give a function of the fit, or None"
        expect_kind(self.callback, Callable | None, "callback", fix)
        expect_kind(self.settings, Settings, "settings", "give hierfl.Settings(...)")
        if self.patience is not None and self.validation is None:
            raise ValueError("patience needs rows to score: pass validation=")
        for name in ("rounds", "checkpoint_every", "eval_every"):
            expect(**{name: (getattr(self, name), "[1, inf) or None")})

    @property
    def line(self) -> Callable[[str], None] | None:
        """What prints a line of progress; None where none is wanted."""
        if not self.lines:
            return None
        return lambda text: print(f"hierfl.fit: {text}", file=sys.stderr, flush=True)


def with_rows(data: ClientData, call: FitArguments) -> tuple[ClientData, FitArguments]:
    """Return clients with `min_rows` rows or more, and the call for them; warn of the others."""
    least, validation = call.settings.min_rows, call.validation
    lacking = (data.counts < least).nonzero()[:, 0].tolist()
    if not lacking:
        return data, call
    small = list(map(data.names.__getitem__, lacking))
    if len(small) == data.num_clients:
        what = f"min_rows is {least}, and no client has that many rows"
        raise ValueError(f"{what}: the largest has {int(data.counts.max())}")
    others = f" and {len(small) - NAMED} more" if len(small) > NAMED else ""
    warn(
        f"{len(small)} of {data.num_clients} clients have fewer than {least} rows and do not take part: "
        f"{', '.join(small[:NAMED])}{others}; fit.personalize(rows) fits their own parameters locally"
    )
    if validation is not None:
        call = replace(call, validation=_without(validation, small))
    return _without(data, small), call


def _without(data: ClientData, names: list[str]) -> ClientData:
    return data.select([name for name in data.names if name not in set(names)])


def check_method(method: Any) -> None:
    """Refuse what is neither a method nor a model, a function of a batch."""
    is_kind = isinstance(method, type | Family)
    if is_kind or not (callable(method) or isinstance(method, Method)):
        fix = "a model, a function of a batch or a hierfl.formula, or a method"
        raise TypeError(f"model is {shown(method)}: pass {fix}, methods.fedsvi(model)")


def planned_of(method: Method, rounds: int | None) -> int:
    """Return how many rounds a run may take."""
    if rounds is not None:
        return rounds
    if method.most_rounds is None:
        what = f"rounds is None, and method '{method.name}' does not stop automatically"
        raise ValueError(f"{what}: say how many, rounds=100")
    return method.most_rounds


def check_count(name: str, value: object) -> None:
    """Refuse an argument of `fit` that is no integer; `cohort` may be a share, some may be None."""
    if value is None and name in OR_NONE:
        return
    if name != "cohort":
        expect_integer(value, name)
    elif isinstance(value, bool):
        raise TypeError(f"cohort is {value!r}: it must be a count, a share or None")
    else:
        expect_kind(value, numbers.Real, "cohort", "it must be a count, a share or None")
