"""The split of params into a common body and each client's own head, declared as local or by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hierfl.core.arguments import NameRule, names_by_rule
from hierfl.core.trees import Tree
from hierfl.data.batch import ClientBatch
from hierfl.method import Server, Share, Step, Up, slope
from hierfl.methods.parts.averaging import averaging_server
from hierfl.optimizers import Optimizer, Stepped, step
from hierfl.program.program import Params, Program, ProgramError

Part = Literal["body", "head"]
Optimizers = Mapping[Part, Optimizer]


@dataclass(frozen=True, eq=False)
class BodyAndHead:
    """The two parts of a program's params, at their starting values."""

    body: Params  # global params
    head: Params  # of one client
    in_program: bool  # whether the program declares the head inside the clients plate

    def first_head(self, message: Params) -> Params:
        """Return every client's first head: the server's, if the message holds it."""
        here = torch.zeros(()).device  # where the clients work
        return {n: message[n] if n in message else v.to(here) for n, v in self.head.items()}

    def work(self, message: Params, head: Params, optimizers: Optimizers) -> Tree:
        """Return the working state of a round: both parts with the states of their optimizers."""
        params: Mapping[Part, Params] = {"body": {n: message[n] for n in self.body}, "head": head}
        work: Tree = {
            part: Stepped(at, optimizers[part].init(at) if part in optimizers else {})
            for part, at in params.items()
        }
        return {**work, "loss": torch.zeros(())}

    def sent(self, work: Tree, weight: float | Tensor) -> dict[str, Share]:
        """Return a client's update: its body, if any, and the loss of its last step."""
        body = {"theta": Share(work["body"].params, weight)} if self.body else {}
        return {**body, "loss": Share(work["loss"], weight)}

    def finished(self, work: Tree, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
        """Return the update, weighted by rows, and the head, which is kept."""
        return self.sent(work, rows), {"head": work["head"].params}

    def server(self) -> Server:
        """Return the server that averages the bodies."""
        start = self.body if self.in_program else {**self.body, **self.head}
        return averaging_server(
            start,
            lambda body, means: means["theta"] if self.body else body,
            sent=None if self.in_program else tuple(self.body),
        )


def body_and_head(program: Program, head: NameRule | None, method: str) -> BodyAndHead:
    """Split the params of a program without latent sites; `head` is as in `fedrep`."""
    above, mine = program.start()
    if program.latents.sites:
        raise ProgramError(
            f"{method} fits params only, and this model has latent sites: take models.network, or "
            "fedsvi"
        )
    if mine and head is not None:
        raise ProgramError(
            f"head is given, and the model has params of each client ({', '.join(mine)}), which "
            f"are the head of {method}: leave head out"
        )
    if mine:
        return BodyAndHead(above, mine, in_program=True)
    if head is None:
        raise ProgramError(
            f"{method} needs a head, and all params of this model are global: give head=, a rule "
            f"that chooses some of {', '.join(above)}"
        )
    own = names_by_rule(list(above), head, option="head", of="the model's params")
    if len(own) == len(above) and head != "all":
        raise ProgramError(
            f"head: the rule matches every param ({', '.join(above)}), which leaves {method} no "
            'body: choose fewer, or say head="all"'
        )
    if not own and head != "none":
        raise ProgramError('head is empty: name a prefix of some param, or say head="none"')
    body = {name: value for name, value in above.items() if name not in own}
    mine = {name: value for name, value in above.items() if name in own}
    return BodyAndHead(body, mine, in_program=False)


def check_has_body(split: BodyAndHead, method: str) -> None:
    """Refuse a split without a body, for methods whose clients then have nothing to send."""
    if not split.body:
        raise ProgramError(
            f"{method} has nothing to learn together, as every param is in the head: choose a "
            "smaller head, or take local_only"
        )


def moving(program: Program, optimizers: Optimizers) -> Step:
    """Return a step on the parts that have an optimizer, with the others fixed."""

    def move(work: Tree, message: Tree, batch: ClientBatch) -> Tree:
        def loss(params: Mapping[Part, Params]) -> Tensor:
            body = params.get("body", work["body"].params)
            return program.mean_loss({**body, **params.get("head", work["head"].params)}, batch)

        gradient, value = slope(loss, {part: work[part].params for part in optimizers})
        moved = {p: step(opt, gradient[p], work[p]) for p, opt in optimizers.items()}
        return {**work, **moved, "loss": value}

    return move
