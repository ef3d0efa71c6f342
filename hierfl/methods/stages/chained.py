"""The server's state once chains have the posterior, whose draws have equal weights."""

from __future__ import annotations

from dataclasses import replace

import torch

from hierfl.methods.stages.exact import Ended
from hierfl.methods.stages.server import Rounds
from hierfl.methods.stages.state import DONE, ServerState
from hierfl.program.few_rows import double_precision
from hierfl.program.handlers import unchecked
from hierfl.summaries.weights import Points, asked_of


def chained(rounds: Rounds, state: ServerState, ended: Ended) -> ServerState:
    """Return a server's state with draws of the exact posterior, which asks for factors about them."""
    count, yes, asked = len(ended.draws), torch.tensor(True), state.asked
    if rounds.work.surrogate.mixed:  # these draws have equal weights, whatever clients say of them
        asked = asked[: asked_of(rounds.work.shared, len(asked))]
    with double_precision(), torch.no_grad(), unchecked():
        scouts = Points.equal(ended.draws[:: max(1, count // len(state.scouts.draws))])
        belief, final = rounds.work.of_any_client(scouts, state.factors), Points.equal(ended.draws)
    return replace(
        state.gathering(),
        belief=belief,
        chained=yes,
        asked=asked,
        each=state.each[: len(asked)],
        sampled=yes,
        proposed=yes,
        final=final,
        scouts=scouts,
        powers=torch.ones_like(state.powers),
        share=torch.tensor(ended.effective / count),
        r_hat=torch.tensor(ended.r_hat),
        k_hat=torch.tensor(0.0),
        effective=torch.tensor(ended.effective),
        inner_error=torch.tensor(torch.nan),
    )


def closed(state: ServerState) -> ServerState:
    """Return the state of chains as done, where clients cannot weight their draws."""
    return replace(state.at(DONE), weighted=torch.ones_like(state.weighted))
