"""How long a run may take, when its rounds cease to gain, and what it goes over to: chains on all clients' rows.

Clients in one process have rows that may be read together. So where rounds do not end, Hamiltonian
chains on the exact posterior do (`hierfl.methods.stages.exact`); clients then locate their own
scalars, and weight draws, in two more rounds. What decides is rounds and counted work, the same
on every machine; the clock decides at a `time_limit=` alone.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from hierfl.core.chains import MOST_JUMPING
from hierfl.core.draw_quality import quality_of
from hierfl.core.importance_sampling import K_HAT, rests_on_few
from hierfl.core.process import Watch, watched
from hierfl.core.trees import tree_map
from hierfl.data.batch import full_batch
from hierfl.data.clients import ClientData
from hierfl.diagnostics.check import LEAST_EFFECTIVE
from hierfl.engine.chunks import NotFinite, Task, work_on
from hierfl.engine.client_store import taken
from hierfl.engine.federation import Federation
from hierfl.engine.rounds import Progress, one_round
from hierfl.method import Clock, Method
from hierfl.methods.stages.anchored import begun, is_anchored
from hierfl.methods.stages.checks import STILL, STILL_SD
from hierfl.methods.stages.exact import Chains, chained, closed
from hierfl.methods.stages.server import Rounds
from hierfl.methods.stages.state import DONE, GATHER, ServerState
from hierfl.methods.stages.two_stage import seen_in, server_rounds
from hierfl.posterior.hidden_modes import (
    is_mixture,
    k_hats_of_rounds,
    may_hide_modes,
)
from hierfl.program.sites import recipe_of
from hierfl.summaries.expansion import LEAST_ROWS

FEW = 12  # clients whose work is timed
LONG = 4.0  # seconds of one client that are long enough to be timed once
# What a self-stopping method takes beside its first round of clients' work: later rounds are longer,
# and the server draws, the longer the more clients and global numbers, and matrices of local ones;
# by chains where local sites are not Normal. By the ten problems of benchmarks.seconds, and
# --hard: answers lie between half and twice as long, mostly.
LATER, SERVER, MANY_NUMBERS, MANY_CLIENTS, MOST_CLIENTS = 2.0, 1.0, 20, 300, 1000
BY_CHAINS, A_MATRIX, WEIGHTED = 15.0, 1e-6, 20.0


def expected(method: Method, data: ClientData, rounds: int | None, usual: int | None = None) -> str:
    """Return what a run is going to do, in words; `usual` rounds are those that it mostly takes."""
    what = f"{data.num_clients:,} clients, {data.num_rows:,} rows: "
    if rounds is not None:
        most = " at most" if method.most_rounds else ""
        return f"{what}{rounds} round{'s' * (rounds > 1)}{most}"
    if 1 in (method.most_rounds, usual):
        return f"{what}one round"
    about = f"about {usual} rounds" if usual else "rounds until it is done"
    return f"{what}{about}, {method.most_rounds} at most"


def seconds_expected(federation: Federation, where: Progress, rounds: int) -> float:
    """Return about how long so many rounds take, by the work of a few clients, timed."""
    data, cohort = federation.data, federation.cohort
    message = federation.server.down(where.server, Clock(where.round, rounds, cohort))
    sample = min(FEW, cohort)

    def timed(count: int) -> float:
        places = torch.linspace(0, data.num_clients - 1, count).long()
        ids, began = data.by_name[places], time.perf_counter()
        task = Task(message, taken(where.table, ids), ids, where.round, 0)
        work_on(federation, federation.client.phases, task)
        return time.perf_counter() - began

    first = timed(1)  # which reads the program, too
    if first < LONG:
        first, several = timed(1), timed(sample)
    else:  # a round would not take much longer, and should not be run twice to say so
        several = first
    per_client = max(0.0, several - first) / max(1, sample - 1)
    clients = (first + per_client * (cohort - 1)) / federation.cores
    if not federation.server.stops_itself:
        return rounds * clients
    return _server_seconds(federation, rounds) + clients * (1 if rounds == 1 else LATER * rounds)


def _server_seconds(federation: Federation, rounds: int) -> float:
    """Return about how long the server takes of so many rounds."""
    program, count = federation.program, federation.data.num_clients
    numbers = program.latents.global_block.size / MANY_NUMBERS
    seconds = SERVER + numbers**2 + min(count, MOST_CLIENTS) / MANY_CLIENTS
    if federation.method.name == "two_stage" and seen_in(program).hierarchy.mixing is not None:
        seconds += BY_CHAINS
    matrices = 1.0 if rounds == 1 else WEIGHTED * rounds
    return seconds + matrices * A_MATRIX * count * program.latents.local_block.size**3


def in_words(seconds: float) -> str:
    """Return a duration, rounded."""
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    minutes = seconds / 60
    return f"about {minutes:.0f} minutes" if minutes < 90 else f"about {minutes / 60:.1f} hours"


# rounds in which the distance from final factors has to fall by this factor
PATIENCE, GAIN = 5, 0.7
# rounds before chains that take no time, and seconds of chains that are worth one more
ROUNDS, A_ROUND = 12, 2.0
# the rounds that are taken at least, and steps of a client's factor in each; rounds end that take
# so often the counted work of chains, which may mix slowly
LEAST_TAKEN, STEPS, MANY_TIMES = 3, 20, 3.0
# likewise once draws were weighted in vain: their k-hat, from which other rounds hardly help
HOPELESS, AGAIN_TIMES = 1.0, 0.5
# rounds within which factors are final, at their rate, and with those that then weight draws: rounds
# do not end that take less than chains
SOON, WITH_WEIGHTS = 2, 4
MANY_OTHERS = 4  # scalars that rows read by no linear predictor; with fewer a step is fast
TIRED = "rounds stopped improving: the clients' factors move in a cycle"
MISSED = "modes of little mass may be missed"
LOOSE = 2.0  # rows a client, whose own scales no Gaussian factor fits
# seconds that chains may take: at all, where they look for other modes, and in place of rounds
LONGEST, LOOKING, AT_ONCE = 3600.0, 20.0, 60.0
A_SEARCH = 0.2  # of the time of chains that a search for modes takes, at most
TIMES = 3.0  # the time that chains on all rows may take, in that of one run of the server's chains


class NoGain(Exception):
    """Rounds have ceased to gain, and chains on the rows are not possible; the message says why."""


def why_tired(history: Sequence[Mapping[str, Any]]) -> str | None:
    """Return why rounds end: what the last one says, or that none has gained; None: they go on."""
    last = history[-1]
    if last.get("stage") == DONE:
        k_hat, effective = last.get("k_hat", 0.0), last.get("effective", math.inf)
        if k_hat < K_HAT and effective >= LEAST_EFFECTIVE:
            return None
        return _distrusted(k_hat)
    distances = (_away(record) for record in history if record.get("stage") == GATHER)
    away = [v for v in distances if v is not None]
    if len(away) <= 2 * PATIENCE or min(away[-PATIENCE:]) < GAIN * min(away[:-PATIENCE]):
        return None
    return TIRED


def _away(record: Mapping[str, Any]) -> float | None:
    """Return how far factors are from final, 1 where they are; None before they are compared."""
    if "moved" not in record and "changed" not in record:
        return None
    return max(record.get("moved", math.inf) / STILL, record.get("changed", math.inf) / STILL_SD)


def _is_nearly_done(history: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether factors are nearly final, at the rate at which they get there, or draws are weighted."""
    if history[-1].get("stage") != GATHER:
        return True
    before, away = ([None, *map(_away, history)])[-2:]
    return before is not None and away is not None and away ** (SOON + 1) < before**SOON


def _distrusted(k_hat: float) -> str:
    return f"the weights of the rounds cannot be trusted (k-hat {k_hat:.2f})"


def _failed(where: Progress) -> bool:
    """Return whether the draws of the rounds were weighted, and hardly any counts."""
    return bool(where.history[-1].get("k_hat", 0.0) >= HOPELESS)


@dataclass(eq=False)
class Fallback:
    """Chains on the rows of a federation, and when a run goes over to them."""

    federation: Federation
    say: Callable[[str], None] | None

    @cached_property
    def rounds(self) -> Rounds:
        """The server's part of two_stage."""
        recipe = recipe_of(self.federation.method)
        assert recipe is not None
        return server_rounds(self.federation.program, recipe.options["draws"], None)

    @cached_property
    def chains(self) -> Chains:
        """The chains."""
        data, program, seed = self.federation.data, self.federation.program, self.federation.seed
        batch = full_batch(data, data.by_name, seed=seed)
        _, score, spread = seen_in(program)
        return Chains(self.rounds, score, spread, batch, seed)

    def why_at_once(self) -> str | None:
        """Return why a run goes over before its first round; None: it does not."""
        hierarchy, _, spread = seen_in(self.federation.program)
        if hierarchy.reading.is_scaled and self.chains.seconds <= LONGEST:
            return "a global site scales a local one, which no Gaussian factor fits well"
        has_shared = len(hierarchy.reading.origin) > 0  # else clients are independent
        if has_shared and self._can_fit_all and self.chains.seconds <= LONGEST:
            return "clients' own scalars can fit all that they observe, as no Gaussian factor does"
        # draws weighted by rows take as long as chains; by sums the server's own do not
        most = LONGEST if self._reads_rows_often else AT_ONCE
        most = most if spread is None else LOOKING
        if has_shared and hierarchy.mixing is not None and self.chains.seconds <= most:
            return "local sites are not Normal, so rounds need chains too"
        return None

    def is_faster(self, seconds: float) -> bool:
        """Return whether chains on the rows take little beside chains of the server that take so long."""
        return self.chains.seconds <= TIMES * seconds

    def searched(self, where: Progress) -> Progress:
        """Return the progress of a run whose rounds are done, after the search for modes that it needs."""
        done = where.history[-1].get("stage") == DONE and not bool(where.server.chained)
        if not done or why_tired(where.history) is not None or not self._looks_for_modes:
            return where
        return replace(where, one_mode=not self.chains.has_modes(where.server))

    def why_over(self, where: Progress) -> str | None:
        """Return why a run goes over after its last round; None: it does not."""
        why, done = why_tired(where.history), where.history[-1].get("stage") == DONE
        if why is not None:
            return why
        if not done and self._are_long(where) and not self._are_nearly_done(where):
            if _failed(where):
                return _distrusted(where.history[-1]["k_hat"])
            taken = "1 round was" if where.round == 1 else f"{where.round} rounds were"
            return f"{taken} not enough, and chains are faster than more rounds"
        if bool(where.server.chained):
            return None
        if not done:
            looks = where.server.weights and is_mixture(self.federation.program)
            return MISSED if looks and self.chains.seconds <= LOOKING else None
        k_hat = max(k_hats_of_rounds(where.history))
        if may_hide_modes(self.federation.program, where):
            why = f"{MISSED} (k-hat {k_hat:.2f})"
        elif self._may_have_modes and self.chains.has_modes(where.server):
            why = "the density has several modes"
        elif self._tails_rest_on_few(where.server):
            why = f"the tails rest on few draws (k-hat {k_hat:.2f})"
        return None if why is None or self.chains.seconds > LOOKING else why

    @property
    def _can_fit_all(self) -> bool:
        """Whether most clients have as many scalars as numbers observed, none by a linear predictor."""
        program, data = self.federation.program, self.federation.data
        hierarchy, score, _ = seen_in(program)
        line, size = score.line, hierarchy.reading.own_size
        if len(line.inside) or not bool((line.rest >= size).any()):
            return False
        labels = [data.fields[name] for name in program.labels.values() if name in data.fields]
        observed = data.counts * sum(of[0].numel() for of in labels)
        return bool(0 < observed.median() <= size)

    @property
    def _looks_for_modes(self) -> bool:
        """Whether chains, which would see other modes of a mixture, take too long, and a search for these does not."""
        if not is_mixture(self.federation.program):
            return False
        return LOOKING < self.chains.seconds <= LOOKING / A_SEARCH

    @property
    def _may_have_modes(self) -> bool:
        """Whether rows read more of the global scalars than a scale by no linear predictor, and chains would pass."""
        hierarchy, score, _ = seen_in(self.federation.program)
        beside = int((score.line.rest >= hierarchy.reading.own_size).sum())
        few = len(hierarchy.reading.origin) <= MOST_JUMPING
        return few and beside > 1 and self.chains.seconds <= LOOKING

    @property
    def _reads_rows_often(self) -> bool:
        """Return whether no polynomials stand for many rows, which rounds then read a few times."""
        rowless, counts = self.federation.client.rowless, self.federation.data.counts
        return rowless is None or int(counts.max()) < LEAST_ROWS

    def _are_long(self, where: Progress) -> bool:
        """Return whether the rounds take, or will take, more than chains on the rows are worth."""
        rounds, times = where.round, AGAIN_TIMES if _failed(where) else MANY_TIMES
        beyond = rounds - ROUNDS
        if beyond >= 0 and beyond >= self.chains.seconds / A_ROUND:
            return True
        if len(seen_in(self.federation.program).score.line.rest) < MANY_OTHERS:
            return False
        rounds = max(rounds, LEAST_TAKEN) if self._reads_rows_often else 0
        return self._seconds_of(rounds) >= times * self.chains.seconds

    def _are_nearly_done(self, where: Progress) -> bool:
        """Return whether rounds are about to end, sooner than chains."""
        nearly = _is_nearly_done(where.history) and not _failed(where)
        return nearly and self._seconds_of(WITH_WEIGHTS) < self.chains.seconds

    def _seconds_of(self, rounds: int) -> float:
        """Return the counted work of clients' factors in so many rounds."""
        return rounds * STEPS * self.chains.factor_seconds

    def _tails_rest_on_few(self, state: ServerState) -> bool:
        """Return whether the verdict would ask for more draws: of global scalars, unconstrained."""
        final = state.final
        z = final.draws[:, : len(seen_in(self.federation.program).hierarchy.reading.origin)]
        known = quality_of(z, final.log_weights, float(state.share))
        return (
            rests_on_few(final.log_weights, float(state.k_hat))
            or bool((known.effective < LEAST_EFFECTIVE).any())
            or bool((known.excess() > 1.0).any())
        )

    def ended(self, where: Progress, why: str) -> Progress:
        """Return the progress of a run that chains have ended; its `ended` says why."""
        federation, chains = self.federation, self.chains
        if chains.seconds > LONGEST:
            raise NoGain(f"{why}, and chains on all rows would take {in_words(chains.seconds)}")
        self._say_seconds(f"{why}; chains on all rows take", *chains.expected)
        state, table, before = where.server, where.table, len(where.history)
        if is_anchored(state):  # factors of small steps are about points that no draw is near
            state, table = begun(state), tree_map(torch.zeros_like, table)
        with watched(Watch(self.say)):
            said = partial(self._say_seconds, "chains are adapted and take")
            drawn = chains.run(state, len(state.final.draws), said)
            where = replace(where, server=chained(self.rounds, state, drawn), table=table)
            try:
                while not federation.server.finished(where.server):
                    where = one_round(federation, where, where.round + 2)
            except NotFinite:  # no factor of these rows: what is sampled of all clients stays
                where = replace(where, server=closed(where.server))
        if len(where.history) == before:
            record = {"round": where.round, **federation.server.logged(where.server)}
            where = where.advanced(where.server, where.table, [record])
        return replace(where, ended=f"{chains.count} chains on all clients' rows, since {why}")

    def _say_seconds(self, what: str, usual: float, most: float) -> None:
        if self.say is not None:
            longest = f", or up to {in_words(most)} if they mix slowly" if most > usual else ""
            self.say(f"{what} {in_words(usual)}{longest}")
