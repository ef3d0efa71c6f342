"""`fit` where the rows are at nodes, and what it is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hierfl.engine.settings import Disclose
from hierfl.method import Method
from hierfl.program.sites import Model
from hierfl.runs.call import NOT_OF_FITS, check_count, check_method

# argument of `hierfl.fit` -> what to do instead
ELSEWHERE = {
    "data": "the rows are at the nodes: leave data out",
    "validation": "the rows are at the nodes: ask them afterwards, fit.scores()",
    "eval_every": "nothing is scored between rounds: ask the nodes afterwards, fit.scores()",
    "patience": "nothing is scored between rounds: give the number of rounds",
    "checkpoint_every": "a checkpoint is written after each round: leave checkpoint_every out",
    "progress": "there is no bar over nodes: read fit.history afterwards",
    "callback": "there is no fit with rows between rounds: leave callback out",
    "settings": "each node is one client, computed where its owner says: leave settings out",
    "engine": "each node is one client: leave engine out",
    "chunk": "each node is one client: leave chunk out",
    "compile": "nodes run their steps uncompiled: leave compile out",
    "device": "a node computes where its owner says: leave device out",
    "on_client_error": "a node that fails is left out, and named: leave on_client_error out",
    "min_rows": "a node's policy says it: min_rows in its policy.toml",
    **NOT_OF_FITS,
}


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
