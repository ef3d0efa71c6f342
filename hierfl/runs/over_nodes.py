"""`fit` where the rows are at nodes: what takes its place, and the arguments that mean nothing there."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from hierfl.method import Method
from hierfl.program.sites import Model
from hierfl.runs.check_arguments import check_counts, check_method
from hierfl.runs.choice import Disclose, check_word

Found_co = TypeVar("Found_co", covariant=True)

# argument of `fit` -> what to do instead
MENDS = {
    "data": "the rows are at the nodes: leave data out",
    "validation": "the rows are at the nodes: ask them afterwards, fit.scores()",
    "eval_every": "nothing is scored between rounds: ask the nodes afterwards, fit.scores()",
    "patience": "nothing is scored between rounds: give the number of rounds",
    "engine": "each node is one client: leave engine out",
    "chunk": "each node is one client: leave chunk out",
    "compile": "nodes run their steps uncompiled: leave compile out",
    "device": "a node computes where its owner says: leave device out",
    "checkpoint_every": "a checkpoint is written after each round: leave checkpoint_every out",
    "progress": "there is no bar over nodes: read fit.history afterwards",
    "callback": "there is no fit with rows between rounds: leave callback out",
    "on_client_error": "a node that fails is left out of its round, and fit.history names it: leave it out",
    "min_rows": "a node's policy says it: min_rows in its policy.toml",
}


@dataclass(frozen=True, eq=False)
class FitCall:
    """The arguments of `hierfl.fit` that mean something over nodes; it says what each is.

    Raises:
        ValueError: a named method discloses more than the server may see.
    """

    method: Method | Model
    rounds: int | None = None
    seed: int = 0
    cohort: int | float | None = None
    disclose: Disclose = "summaries"
    checkpoint: str | Path | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        """Refuse a method that discloses more than the server may see."""
        check_word(self.disclose)
        if self.named and self.disclose == "sums" and self.named.discloses == "summaries":
            raise ValueError(
                f"disclose is 'sums', and method '{self.named.name}' shows the server a summary of each client: take "
                f"another, or hand in the model, for which one is chosen"
            )

    @property
    def lacks_schema(self) -> bool:
        """Whether the model is a `hierfl.formula` on whose schema the nodes are still to agree."""
        return getattr(self.method, "has_schema", True) is False

    @property
    def named(self) -> Method | None:
        """The method, where one was named; None where one is to be chosen for a model."""
        return self.method if isinstance(self.method, Method) else None


class OverNodes(Protocol[Found_co]):
    """Nodes that a method can be fitted over: `hierfl.flower.superlink(...)`, `hierfl.nodes.in_process(...)`."""

    def fit_over(self, call: FitCall) -> Found_co:
        """Fit the method of a call, or one that is chosen for its model."""
        ...


def fit_over(
    nodes: OverNodes[Found_co],
    method: Method | Model,
    given: Mapping[str, Any],
    function: Callable[..., object],
) -> Found_co:
    """Check the arguments of `fit`, and fit over nodes.

    Args:
        nodes: the argument of `fit`.
        method: the argument of `fit`.
        given: all other arguments of `fit`.
        function: `fit`, whose defaults say which arguments were left out.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: an argument means nothing over nodes; the message says what to do instead.
    """
    if not callable(getattr(nodes, "fit_over", None)):
        raise TypeError(
            f"nodes is a {type(nodes).__name__}: make it with hierfl.flower.superlink(...), or with "
            f"hierfl.nodes.in_process(...) to try it here"
        )
    defaults = inspect.signature(function).parameters
    for name, mend in MENDS.items():
        value, default = given[name], defaults[name].default
        plain = isinstance(value, bool | int | str)  # frames compare row by row
        so_anyway = value is False and name in ("compile", "progress")
        if value is not default and not (plain and value == default) and not so_anyway:
            raise ValueError(f"nodes and {name} do not go together: {mend}")
    check_method(method)
    check_counts({name: given[name] for name in ("rounds", "seed", "cohort")})
    if given["resume"] and given["checkpoint"] is None:
        raise ValueError(
            "resume is True, and there is no checkpoint to go on from: name its folder"
        )
    passed = ("rounds", "seed", "cohort", "disclose", "checkpoint", "resume")
    return nodes.fit_over(FitCall(method, **{name: given[name] for name in passed}))
