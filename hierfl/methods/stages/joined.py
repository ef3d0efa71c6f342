"""The server of two_stage when clients join a run that is done, or send new rows.

The factors of the other clients stay, and their log ratios are carried over to new draws. So the
new clients alone send a factor, then log ratios; k-hat of the weights says whether that suffices.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hierfl.core.process import double_precision
from hierfl.core.trees import tree_map
from hierfl.methods.stages.kept import Kept
from hierfl.methods.stages.server import Rounds
from hierfl.methods.stages.state import GATHER, ServerState
from hierfl.program.handlers import unchecked
from hierfl.summaries.carried import GOOD, carried_over
from hierfl.summaries.conditional import terms_of_clients


def joined(before: Kept, after: Rounds, stay: Tensor, at: Tensor) -> ServerState:
    """Return a state that asks for the factors of new clients.

    Those at places `stay` of the old server are at places `at` of the new one, both by name.
    """
    begun, state = after.begin(), before.state
    factors = tree_map(
        lambda new, old: new.index_copy(0, at, old[stay]), begun.factors, state.factors
    )
    scouts, shared = begun.scouts, after.work.shared
    draws = state.final.resampled(len(scouts.draws))
    mixing = scouts.draws[:, shared:].reshape(len(draws), len(begun.seen), -1).clone()
    old = draws[:, shared:].reshape(len(draws), len(state.seen), -1)
    mixing[:, at] = old[:, stay]
    anchor = begun.anchor
    if anchor is not None:  # the belief is the posterior, not the prior: no small steps
        anchor = replace(anchor, narrow=torch.zeros_like(anchor.narrow))
    return replace(
        begun.at(GATHER),
        belief=state.belief,
        anchor=anchor,
        factors=factors,
        scouts=replace(scouts, draws=torch.cat([draws[:, :shared], mixing.flatten(1)], 1)),
        seen=begun.seen.index_fill(0, at, True),
        powers=begun.powers.index_copy(0, at, state.powers[stay]),
        # the factors that are kept do not move: the first round of factors is the last
        moved=torch.tensor(0.0),
        changed=torch.tensor(0.0),
    )


def carried(
    before: Kept, after: Rounds, state: ServerState, stay: Tensor, at: Tensor
) -> ServerState:
    """Return a state that asks new clients alone to weight draws, where that suffices; else `state`."""
    if not state.weights or not before.state.each.shape[1]:
        return state
    with double_precision(), torch.no_grad(), unchecked():
        work, final = after.work, before.state.final
        alive, shared = before.alive()[before.asked()], work.shared
        places = before.asked()[alive]
        z = final.draws[places, :shared]
        to = state.final.draws[work.asked(state), :shared]
        each, base = before.ratios()[alive][:, stay], torch.zeros(len(z))
        if not work.surrogate.mixed:
            base = work.log_p(z, state.factors) - final.log_p[places]
        own = terms_of_clients(work.surrogate.hierarchy, state.factors, at)
        moved = carried_over(each, z, base, to, own)
        if not moved.error <= GOOD:
            return state
        each = torch.zeros(len(to), len(state.seen)).index_copy(1, at, moved.ratios)
        return replace(
            state,
            each=each,
            asked=each.sum(1),
            weighted=state.weighted.index_fill(0, at, True),
            inner_error=torch.tensor(moved.error),
        )
