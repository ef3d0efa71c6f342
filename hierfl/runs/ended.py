"""When the rounds of a fit cease to gain, and what it goes over to: chains on all clients' rows.

Clients in one process have rows that may be read together. So where rounds do not end, Hamiltonian
chains on the exact posterior do (`hierfl.methods.stages.exact`); clients then locate their own
scalars, and weight the draws, in two more rounds.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hierfl.core.importance_sampling import K_HAT
from hierfl.core.watch import Watch, watched
from hierfl.data.batch import full_batch
from hierfl.diagnostics.check import LEAST_EFFECTIVE
from hierfl.engine.chunks import ClientError
from hierfl.engine.federation import Federation
from hierfl.engine.rounds import Progress, one_round
from hierfl.method import Method
from hierfl.methods.stages.checks import DONE, GATHER, STILL, STILL_SD
from hierfl.methods.stages.exact import Chains, chained, closed
from hierfl.methods.stages.server import Rounds
from hierfl.methods.stages.two_stage import seen_in, server_rounds
from hierfl.posterior.hidden_modes import may_hide_modes
from hierfl.program.recipes import recipe_of
from hierfl.runs.call import FitArguments
from hierfl.runs.expected import in_words

# rounds in which the distance from final factors has to fall by this factor
PATIENCE, GAIN = 5, 0.7
AT_ONCE = 20.0  # seconds of the CPU before chains are considered
TIMES = 2.0  # the time that rounds may take, in that of the chains
TIRED = "rounds ceased to gain: the clients' factors move in a cycle"
LONGEST = 3600.0  # seconds that chains may take


class NoGain(Exception):
    """Rounds have ceased to gain, and chains on the rows are not possible; the message says why."""


def line_of(call: FitArguments) -> Callable[[str], None] | None:
    """Return what prints a line of progress; None where the call wants none."""
    if not call.lines:
        return None
    return lambda text: print(f"hierfl.fit: {text}", file=sys.stderr, flush=True)


def ends_by_chains(
    method: Method, federation: Federation, call: FitArguments, *, chosen: bool
) -> bool:
    """Return whether a run may go over to chains: two_stage without row noise, rows in one process."""
    recipe = recipe_of(method)
    if recipe is None or method.name != "two_stage" or not (chosen or call.time_limit):
        return False
    is_whole = federation.cohort == federation.data.num_clients and call.rounds is None
    local = federation.settings.on_client_error != "skip" and federation.settings.device == "cpu"
    return is_whole and local and seen_in(federation.program).spread is None


def watch_of(federation: Federation, call: FitArguments, *, chains: bool) -> Watch:
    """Return the watch of a run: its time limit; with chains, some times what these would take."""
    say = line_of(call)
    if call.time_limit is not None or not chains:
        return Watch(say, math.inf if call.time_limit is None else call.time_limit)

    def later() -> float:
        return max(AT_ONCE, TIMES * chains_of(federation).seconds())

    # of the CPU, so that a fit does not depend on what else a machine does
    return Watch(say, AT_ONCE, later, time.process_time)


def why_at_once(federation: Federation) -> str | None:
    """Return why a run of two_stage goes over to chains before its first round; None: it does not."""
    if not seen_in(federation.program).hierarchy.reading.is_scaled:
        return None
    if chains_of(federation).seconds() > LONGEST:
        return None
    return "a global site scales a local one, for which no Gaussian factor is a good one"


def why_over(history: Sequence[Mapping[str, Any]]) -> str | None:
    """Return why a run of two_stage goes over to chains after its last round; None: it does not."""
    last = history[-1]
    if last.get("stage") == DONE:
        k_hat, effective = last.get("k_hat", 0.0), last.get("effective", math.inf)
        if k_hat < K_HAT and effective >= LEAST_EFFECTIVE:
            return None
        return f"the weights of the rounds cannot be trusted (k-hat {k_hat:.2f})"
    distances = (_away(record) for record in history if record.get("stage") == GATHER)
    away = [v for v in distances if v is not None]
    if len(away) <= 2 * PATIENCE or min(away[-PATIENCE:]) < GAIN * min(away[:-PATIENCE]):
        return None
    return TIRED


def why_doubted(federation: Federation, where: Progress) -> str | None:
    """Return why chains check the draws of a run that is done; None where they need not, or take long."""
    k_hat = float(where.history[-1].get("k_hat", 0.0))
    done = where.history[-1].get("stage") == DONE
    if not done or not may_hide_modes(federation.program, where.server, k_hat):
        return None
    if chains_of(federation).seconds() > AT_ONCE:
        return None
    return f"modes of little mass may be missed (k-hat {k_hat:.2f})"


def _away(record: Mapping[str, Any]) -> float | None:
    """Return how far factors are from final, 1 where they are; None before they are compared."""
    if "moved" not in record and "changed" not in record:
        return None
    return max(record.get("moved", math.inf) / STILL, record.get("changed", math.inf) / STILL_SD)


def chains_of(federation: Federation) -> Chains:
    """Return the chains of a federation."""
    data = federation.data
    batch = full_batch(data, data.by_name, seed=federation.seed)
    score = seen_in(federation.program).score
    return Chains(rounds_of(federation), score, batch, federation.seed)


def by_chains(federation: Federation, where: Progress, call: FitArguments, why: str) -> Progress:
    """Return the progress of a run that chains have ended; `ended` says why."""
    chains, say = chains_of(federation), line_of(call)
    seconds = chains.seconds()
    if seconds > LONGEST:
        raise NoGain(f"{why}, and chains on all rows would take {in_words(seconds)}")
    if say is not None:
        say(f"{why}; chains on all rows take {in_words(seconds)}")
    rounds, state, before = rounds_of(federation), where.server, len(where.history)
    with watched(Watch(say)):
        drawn = chains.run(state, len(state["final"]["draws"]))
        where = replace(where, server=chained(rounds, state, drawn))
        try:
            while not federation.server.finished(where.server):
                where = one_round(federation, where, where.round + 2)
        except ClientError:  # no factor of these rows: what is sampled of all clients stays
            where = replace(where, server=closed(where.server))
    if len(where.history) == before:
        record = {"round": where.round, **federation.server.logged(where.server)}
        where = where.advanced(where.server, where.table, [record])
    return replace(where, ended=f"{chains.count} chains on all clients' rows, since {why}")


def rounds_of(federation: Federation) -> Rounds:
    """Return the server's part of two_stage."""
    recipe = recipe_of(federation.method)
    assert recipe is not None
    return server_rounds(federation.program, recipe.options["draws"], None)
