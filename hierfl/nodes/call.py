"""`fit` where the rows are at nodes, and what it is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hierfl.engine.settings import Disclose
from hierfl.method import Method
from hierfl.program.sites import Model
from hierfl.runs.call import NOT_OF_FITS, check_count, check_method

AT_NODES = "data validation eval_every patience checkpoint_every progress callback settings engine"
AT_NODES += " chunk compile device on_client_error min_rows"
# argument of `hierfl.fit` -> what to do instead
ELSEWHERE = NOT_OF_FITS | dict.fromkeys(
    AT_NODES.split(),
    "leave it out: rows are at nodes, which compute as their owners say, policy.toml; score them "
    "afterwards, fit.scores()",
)


@dataclass(frozen=True, eq=False)
class FitCall:
    """The arguments of `fit` without the nodes, by its names; `method` is the method or the model."""

    method: Method | Model
    rounds: int | None = None
    seed: int = 0
    cohort: int | float | None = None
    disclose: Disclose = "summaries"
    checkpoint: str | Path | None = None
    resume: bool = False
    joins: Any = None  # the FitOverNodes that the clients of the nodes join

    def __post_init__(self) -> None:
        """Refuse arguments of another kind, and a method that discloses more than the server may see."""
        check_method(self.method)
        for name in ("rounds", "seed", "cohort"):
            check_count(name, getattr(self, name))
        if self.disclose not in ("summaries", "sums"):
            raise ValueError(f"disclose is {self.disclose!r}: it must be 'summaries' or 'sums'")
        if self.named and self.disclose == "sums" and self.named.discloses == "summaries":
            raise ValueError(
                f"disclose is 'sums', and method '{self.named.name}' shows the server a summary of "
                "each client: take another, or hand in the model, for which one is chosen"
            )
        if self.resume and self.checkpoint is None:
            raise ValueError(
                "resume is True, and there is no checkpoint to go on from: name its folder"
            )

    @property
    def lacks_schema(self) -> bool:
        """Whether the model is a `hierfl.formula` on whose schema the nodes are still to agree."""
        return getattr(self.method, "has_schema", True) is False

    @property
    def named(self) -> Method | None:
        """The method, where one was named; None where one is to be chosen for a model."""
        return self.method if isinstance(self.method, Method) else None
