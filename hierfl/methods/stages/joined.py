"""The server of two_stage when clients join a run that is done, or send new rows.

The factors of the other clients stay, and their log ratios are carried over to new draws. So the
new clients alone send a factor, then log ratios; k-hat of the weights says whether that suffices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hierfl.core.importance_sampling import resampled
from hierfl.core.trees import Tree, tree_map
from hierfl.methods.stages.checks import GATHER, WEIGHT
from hierfl.methods.stages.kept import Kept
from hierfl.methods.stages.server import Rounds
from hierfl.program.few_rows import double_precision
from hierfl.program.handlers import unchecked
from hierfl.summaries.carried import GOOD, carried_over
from hierfl.summaries.conditional import terms_of_clients
from hierfl.summaries.hierarchy import Factors


def joined(before: Kept, after: Rounds, stay: Tensor, at: Tensor) -> Tree:
    """Return a state that asks for the factors of new clients.

    Those at places `stay` of the old server are at places `at` of the new one, both by name.
    """
    begun, state = after.begin(), before.state
    factors = tree_map(
        lambda new, old: new.index_copy(0, at, old[stay]), begun["factors"], state["factors"]
    )
    scouts, shared = begun["scouts"], after.work.shared
    final = state["final"]
    draws = resampled(final["draws"], final["log_weights"], len(scouts["draws"]))
    mixing = scouts["draws"][:, shared:].reshape(len(draws), len(begun["seen"]), -1).clone()
    old = draws[:, shared:].reshape(len(draws), len(state["seen"]), -1)
    mixing[:, at] = old[:, stay]
    scouts = {**scouts, "draws": torch.cat([draws[:, :shared], mixing.flatten(1)], 1)}
    belief = {name: state[name] for name in ("loc", "covariance") if name in state}
    # the belief is the posterior, not the prior: no small steps
    belief |= {name: torch.zeros_like(begun[name]) for name in ("narrow",) if name in begun}
    return {
        **begun,
        **belief,
        "factors": factors,
        "scouts": scouts,
        "seen": begun["seen"].index_fill(0, at, True),
        "powers": begun["powers"].index_copy(0, at, state["powers"][stay]),
        "stage": torch.tensor(GATHER),
        # the factors that are kept do not move: the first round of factors is the last
        **{name: torch.tensor(0.0) for name in ("moved", "changed")},
    }


def carried(before: Kept, after: Rounds, state: Tree, stay: Tensor, at: Tensor) -> Tree:
    """Return a state that asks new clients alone to weight draws, where that suffices; else `state`."""
    if int(state["stage"]) != WEIGHT or not before.state["each"].shape[1]:
        return state
    with double_precision(), torch.no_grad(), unchecked():
        work, final = after.work, before.state["final"]
        alive, shared = before.alive()[before.asked()], work.shared
        places = before.asked()[alive]
        z = final["draws"][places, :shared]
        to = state["final"]["draws"][work.asked(state), :shared]
        each = before.ratios()[alive][:, stay]
        base, factors = torch.zeros(len(z)), Factors(**state["factors"])
        if not work.surrogate.mixed:
            base = work.log_p(z, factors) - final["log_p"][places]
        own = terms_of_clients(work.surrogate.hierarchy, factors, at)
        found = carried_over(each, z, base, to, own)
        if not found.error <= GOOD:
            return state
        kept = torch.zeros(len(to), len(state["seen"])).index_copy(1, at, found.ratios)
        return {
            **state,
            "each": kept,
            "asked": kept.sum(1),
            "weighted": state["weighted"].index_fill(0, at, True),
            "inner_error": torch.tensor(found.error),
        }
