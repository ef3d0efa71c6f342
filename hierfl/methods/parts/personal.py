"""Clients that keep params of their own from round to round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hierfl.core.trees import Tree, chosen
from hierfl.method import Client, Up
from hierfl.program.program import Params


def personal_client(
    own_params: Tree,
    first: Callable[[Tree, Tree], Tree],
    *,
    start: Callable[[Tree, Tree], Tree],
    finish: Callable[[Tree, Tree, Tree, Tensor], tuple[Up, Tree]],
    params: Callable[[Tree, Tree], Params],
    **others: Any,
) -> Client:
    """Return a client whose state is `first(message, own)`, or part of it, until it has been through a round.

    `start`, `finish` and `params` get that state, or what the last round left. `finish` returns the
    whole next state, with `seen` 0 where the round does not count. `others` are further fields of `Client`.
    """

    def now(message: Tree, own: Tree) -> Tree:
        begin = first(message, own)
        return {**own, **chosen(own["seen"], {name: own[name] for name in begin}, begin)}

    def finished(work: Tree, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
        up, after = finish(work, message, own, rows)
        # in the order in which the client store holds them
        return up, {**{n: after[n] for n in own_params}, "seen": after.get("seen", torch.ones(()))}

    return Client(
        own={**own_params, "seen": torch.zeros(())},
        start=lambda message, own: start(message, now(message, own)),
        finish=finished,
        params=lambda message, own: params(message, now(message, own)),
        seen=lambda own: own["seen"],
        **others,
    )
