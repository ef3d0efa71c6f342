"""What a node has answered, across restarts, by digests of requests; the last of a run is answered again."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

from hierfl.core.disk import write_private
from hierfl.nodes import log
from hierfl.nodes.messages import Refused
from hierfl.nodes.policy import Forbidden, Policy
from hierfl.summaries.row_noise import RowNoise

ROUNDING = 1e-9  # of a budget
Kind = Literal["round", "question"]


def digest(content: bytes) -> str:
    """Return the digest of a request."""
    return hashlib.sha256(content).hexdigest()


class Account:
    """The requests that a node has answered in one folder, in all runs."""

    def __init__(self, folder: Path) -> None:
        needed = {"time", "run", "kind", "request"}
        self.folder = folder
        self.entries = [one for one in log.lines(folder / log.ACCOUNT) if needed <= one.keys()]

    def has(self, run: str, request: str, *, paid: bool = False) -> bool:
        """Return whether a request has been answered, and the noise of its answer paid for."""
        return any(
            (one["run"], one["request"]) == (run, request) and ("spent" in one or not paid)
            for one in self.entries
        )

    def check(self, kind: Kind, run: str, request: str, policy: Policy, most: int | None) -> None:
        """Refuse a new request beyond what the policy allows a day, or a method in a run."""
        if self.has(run, request):
            return
        allowed = policy.rounds_a_day if kind == "round" else policy.questions_a_day
        if (
            allowed is not None
            and (count := len(log.rounds_today(self.folder, kind=kind))) >= allowed
        ):
            raise Forbidden(
                f"the node's policy allows {allowed} {kind}s a day, and it has been through "
                f"{count}: ask again tomorrow"
            )
        of_run = {one["request"] for one in self.entries if one["run"] == run}
        if kind == "round" and most is not None and len(of_run) >= most:
            raise Refused(
                f"the method takes at most {most} rounds, and the node has answered as many of "
                f"run '{run}': begin a new run"
            )

    def check_budget(self, how: RowNoise, policy: Policy) -> None:
        """Refuse a step whose noise the budget of the rows does not pay for, in all runs together."""
        if self.share_spent(how, policy, how.spent_by_round) > 1.0 + ROUNDING:
            epsilon, delta = policy.budget or (how.epsilon, how.delta)
            raise Forbidden(
                f"the rows' budget of epsilon {epsilon:g} at delta {delta:g} is spent: the node "
                "answers nothing new about them"
            )

    def share_spent(self, how: RowNoise, policy: Policy, more: float = 0.0) -> float:
        """Return which share of the rows' budget is spent, in all runs together, with what is spent `more`."""
        worth = how.worth(*(policy.budget or (how.epsilon, how.delta)))
        return (sum(float(one.get("spent", 0.0)) for one in self.entries) + more) / worth

    def put(self, kind: Kind, run: str, request: str, how: RowNoise | None = None) -> None:
        """Write down that a request is answered."""
        spent = {} if how is None else {"spent": how.spent_by_round}
        said = {"time": log.now(), "run": run, "kind": kind, "request": request, **spent}
        log.append(self.folder / log.ACCOUNT, said)
        self.entries.append(said)


def answer_again(folder: Path, run: str, request: str) -> bytes | None:
    """Return the answer to a request that was a run's last one; None: it was not."""
    try:
        found = _file(folder, run).read_bytes()
    except FileNotFoundError:
        return None
    return found[64:] if found[:64] == request.encode() else None


def keep_answer(folder: Path, run: str, request: str, content: bytes) -> None:
    """Keep the answer to a run's last request, whole or not at all."""
    path = _file(folder, run)
    draft = path.with_suffix(".answer-draft")
    write_private(draft, request.encode() + content)
    draft.replace(path)


def _file(folder: Path, run: str) -> Path:
    return folder / f"{run}.answer"
