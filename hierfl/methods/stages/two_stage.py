"""Two-stage inference: the posterior of a hierarchy in two rounds, and one or two more to check it.

Each client sends a Gaussian factor of its likelihood in v = (its own sites, those global sites that
the likelihood reads itself). The hierarchy above the factors is kept exact.

    server     sends all clients Normal(m, C), the mean and covariance of any client's v under its
               current posterior (at first: under the prior)
    client k   q_k(v) ~ Normal(v; m, C) p(y_k | v), made Gaussian by variational steps on its rows;
               sends Lambda_k = -E_q[d^2 log p(y_k | v)]
               and   eta_k = E_q[d log p(y_k | v)] + Lambda_k E_q[v]
    server     samples p(z) prod_k integral p(w | z) exp(eta_k . v - v' Lambda_k v / 2) dw
    weight     one more round: clients send how much log p(y_k | z) differs from their factors' at
               the server's draws; Pareto-smoothed weights make these draws from the posterior
    again      if some client's weights have a heavy tail, as its likelihood falls slower than its
               factor, or few draws are effective, draws about the weighted ones are weighted

The weighted draws have no approximation left, and k-hat says whether the weights can be trusted.
Clients keep only their last factor between rounds, by which they draw their own sites.

A client of 500 or more different rows also keeps the derivatives of its log likelihood in v up to the
fourth, where at most 12 numbers are read: a polynomial that takes one pass over its rows, and stands
for them at thousands of draws (`hierfl.summaries.expansion`). All rows are read at 8 draws, and the
polynomial is used where the sd of its error there is below 0.05 / sqrt(N) nats. What is sent is the
same. Elsewhere such a client weights 64 draws first, and the others where these are not flat.

A Gaussian likelihood takes one round: four sums of a client's rows say all that they do at every
noise scale (`hierfl.summaries.exact`). Where the scale is global or fixed, the server integrates
exactly; where it is a client's own, or local sites are not Normal, it takes the rounds above by
itself, with the sums in the place of rows (`hierfl.methods.stages.sums`).

It is conjugate-computation variational inference (Khan and Lin 2017, arXiv:1703.04265) on the
likelihoods, with the hierarchical prior kept exact; near to expectation propagation over sites of
data (Vehtari et al. 2020, JMLR 21(17)). It is a two-stage random-effects meta-analysis, made exact.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from hierfl.core.arguments import expect
from hierfl.core.process import double_precision
from hierfl.guides.from_factor import OWN_PARAM, FromFactor, from_factor
from hierfl.guides.global_sites import empirical
from hierfl.method import Client, Method, Phase, Server
from hierfl.methods.about import About
from hierfl.methods.stages.checks import MOST_ROUNDS, refused_message, wrong_update
from hierfl.methods.stages.client import RowWork
from hierfl.methods.stages.server import Rounds
from hierfl.methods.stages.state import TwoStageClientState, TwoStageWork
from hierfl.methods.stages.sums import RoundsOfSums
from hierfl.methods.stages.weighting import Weighting
from hierfl.program.handlers import unchecked
from hierfl.program.program import Program, ProgramError, once_a_program
from hierfl.program.sites import Model
from hierfl.summaries.exact import Spread, seen_spread
from hierfl.summaries.hierarchy import Hierarchy
from hierfl.summaries.reading import read_likelihood, seen_line
from hierfl.summaries.row_noise import RowNoise, check_line
from hierfl.summaries.seen_hierarchy import seen_hierarchy
from hierfl.summaries.surrogate import Surrogate
from hierfl.summaries.units import UnitScore

OWN = ("_shared.", f"{OWN_PARAM}.")  # params of the guide
USUAL = 5  # rounds
# candidates of a client's own sites where its factor is one round's, and knows the prior alone
OF_FIRST_FACTOR = 16
# candidates of many own scalars: means were off by 0.1 sd with 4 candidates of 10, by 0.04 with 8
OF_MANY, MANY = 8, 4
# candidates where sites of rows are integrated at each: sds were off by 2 %, by 0.3 % with the usual 4
OF_ROW_SITES = 2
# candidates where a row reads two or more of a client's scalars by no linear predictor, as in
# nonlinear growth: a factor then says little of a client far from where it was made. Of more
# scalars, as of a series, no draw of the prior is near the rows
OF_CURVED, LEAST_CURVED, MOST_CURVED = 66, 2, 8


class Seen(NamedTuple):
    """The prior of a program, the score of its rows, and the noise scale if they are Gaussian."""

    hierarchy: Hierarchy
    score: UnitScore
    spread: Spread | None


@once_a_program
def seen_in(program: Program) -> Seen:
    """Recognize the hierarchy and the linear predictors of a program."""
    _check_priors(program)
    hierarchy = seen_hierarchy(read_likelihood(program))
    reading = hierarchy.reading
    with double_precision(), torch.no_grad(), unchecked():
        score = UnitScore(seen_line(reading))
        spread = seen_spread(score)
        score.summed = spread is not None
        own = bool((score.line.rest < reading.own_size).any())
        if spread is not None and not own and hierarchy.mixing is None:
            # factors are Gaussian given the noise scale alone, whatever its prior
            at, end, scales = reading.shared[score.line.rest - reading.own_size].tolist(), 0, set()
            for site in program.latents.global_block.sites:
                first, end = end, end + site.size
                scales |= {site.name} if set(range(first, end)).intersection(at) else set()
            if scales.intersection(hierarchy.linear):
                hierarchy = seen_hierarchy(reading, frozenset(scales))
            hierarchy = replace(hierarchy, spread=spread)
    return Seen(hierarchy, score, spread)


def server_rounds(program: Program, draws: int, row_noise: RowNoise | None) -> Rounds:
    """Return the server's part of the rounds of a program."""
    hierarchy, score, spread = seen_in(program)
    if row_noise is not None:
        hierarchy = with_noise(hierarchy, score, row_noise)
        work = Weighting(Surrogate(hierarchy), program.seed)
        if hierarchy.noise is None:
            return Rounds(work, draws, row_noise.num_rounds)
        from hierfl.methods.stages.noisy import RoundsOfNoisySums  # here: few fits need it

        return RoundsOfNoisySums(work, draws, row_noise.num_rounds)
    work = Weighting(Surrogate(hierarchy), program.seed)
    if spread is None or hierarchy.spread is not None:
        return Rounds(work, draws)
    return RoundsOfSums(work, draws, client=RowWork(hierarchy, score, spread, None))


def with_noise(hierarchy: Hierarchy, score: UnitScore, how: RowNoise) -> Hierarchy:
    """Return a hierarchy whose clients' rows have a budget: of noisy sums, or of factors by steps."""
    from hierfl.summaries.noisy_sums import noise_of  # here: few fits need it

    noise = noise_of(score, hierarchy.spread, how)
    if noise is not None:
        return replace(hierarchy, noise=noise)
    check_line(score.line)
    return replace(hierarchy, spread=None)


@About(
    infers=(
        "the posterior of a hierarchy in a few rounds, from a Gaussian factor of each "
        "client's likelihood; the server sees each client's factor"
    ),
    source="Khan and Lin 2017, arXiv:1703.04265, federated",
    common="any sites",
    own="any sites",
    guide="weighted draws of the exact posterior",
    kept=(
        "two factors of its own; the location of its scalars that are not Normal; with 500 or more "
        "different rows, the derivatives of its log likelihood up to the fourth"
    ),
    discloses="summaries",
    new="one round: its own factor",
    down=(
        "`loc` and `covariance` of the values that any client's v may have, v being the D + U "
        "scalars that a likelihood reads. If local sites are not Normal, also `few` draws of the "
        "global sites; in weighting rounds, S of them. For noisy sums of a Gaussian likelihood, "
        "also the values that any client's X'X may have"
    ),
    up=(
        "`factor`, seen individually: Lambda, (D + U, D + U), eta, (D + U,), and the client "
        "fields that the prior of its local sites reads; `raised` and `misread`, one scalar "
        "each; for a Gaussian likelihood, also its number of rows and its sum of squares (with "
        "row noise, all are noisy except the number). In weighting rounds, one scalar per draw, "
        "seen individually, and one more if D is 3 or more, or a local site is not Normal"
    ),
)
def two_stage(model: Model, *, draws: int = 4000, row_noise: RowNoise | None = None) -> Method:
    """Return two-stage inference of a program, centered or non-centered.

    It stops automatically, after one round where the likelihood is Normal or LogNormal about a linear
    predictor with a noise scale that is global, a client's own, or fixed: sums of rows then suffice.

    The history has the next stage (0 gather, 1 weight, 2 done); how far means moved (in posterior
    sds, `moved`) and sds changed (as ratios, `changed`); split R-hat of the server's chains; the
    number of eigenvalues of factors raised to 0 (`raised`); k-hat and the effective number of
    draws; and the largest k-hat of a single client's ratio. With three or more local unknowns, or
    some that are not Normal, clients integrate by quasi-random points: the history then has the
    variance of their error in a client's log ratio (`inner_variance`, a mean over clients), and the
    sd of the error of the log weights (`inner_error`, in nats).

    Every client sends a summary of its own, as in a meta-analysis (`Method.discloses`).

    Args:
        model: any program with a prior for every unknown, and any likelihood; centered, or
            non-centered with a linear predictor. Local sites that are Normal or LogNormal given the
            global ones are integrated out; of others (Student t, Cauchy, Laplace, the local scales
            of a horseshoe, Gamma rates) the server samples what it needs, one number for each of
            their entries and clients.
        draws: S, of the global sites.
        row_noise: differential privacy of each row: clients send factors from clipped rows with
            noise, in a fixed number of rounds that need every client, and draws are not weighted.
            Of a Gaussian likelihood they send sums with noise in one round, and `max_response` is
            needed. The posterior takes the noise for what it is, and is wider for it. Default None:
            no noise.

    Raises:
        ValueError: `draws` is below 100.
        ProgramError: (at fit) a param would be learned, the prior of a local site reads rows, or
            the program is non-centered with local sites that are not Normal; the message names the
            site and the fix. (After a round) a client's rows show that the program was misread.
    """
    expect(draws=(draws, "[100, inf)"))  # fewer are too few for Pareto-smoothed weights

    def server(program: Program) -> Server:
        rounds, budget = server_rounds(program, draws, row_noise), dict[str, float]()
        usual = 1 if seen_in(program).spread is not None else USUAL
        if row_noise is not None:
            usual = row_noise.num_rounds
            budget = {"epsilon": row_noise.epsilon, "delta": row_noise.delta}
        return Server(
            state=rounds.begin(),
            update=rounds.update,
            down=rounds.down,
            final=lambda state, clock: {**rounds.belief(state), "params": rounds.params(state)},
            finished=lambda state: state.is_done,
            logged=lambda state: {**state.logged(), **budget},
            surprise=rounds.surprise,
            weighted=rounds.weighted,
            wrong=wrong_update,
            grows=frozenset({"asked", "each", "draws", "log_p", "log_weights", "ratios"}),
            usual_rounds=usual,
        )

    def client(program: Program) -> Client:
        hierarchy, score, spread = seen_in(program)
        if row_noise is not None:
            hierarchy, spread = with_noise(hierarchy, score, row_noise), None
        guide: FromFactor = program.guide  # type: ignore[assignment]
        work = RowWork(hierarchy, score, spread, row_noise)
        guide.hierarchy, guide.shapes = hierarchy, work.shapes
        guide.spread = spread if work.by_grid else None
        if spread is not None and hierarchy.spread is None:
            guide.candidates = OF_FIRST_FACTOR
        elif hierarchy.normal_size >= MANY:
            guide.candidates = OF_MANY
        elif program.row_sites is not None:
            guide.candidates = OF_ROW_SITES
        # the density of rows whose own sites are integrated takes long: wide candidates do there
        guide.located = work.is_located and program.row_sites is None
        guide.with_prior = work.has_wide and not len(score.line.inside)
        guide.with_prior &= LEAST_CURVED <= hierarchy.normal_size <= MOST_CURVED
        if guide.with_prior:
            guide.candidates = OF_CURVED
        # a log ratio has no noise, and of sums nothing is asked
        weighted = draws if work.is_weighted else 0
        turns = max(1, weighted)
        phase = Phase(work.step, together=True, nested=True, eager=True, turns=turns)
        shared = len(hierarchy.reading.origin)
        return Client(
            own=work.nothing,
            start=lambda message, own: TwoStageWork(own, {}, {}),
            phases=(phase,),
            finish=work.finish,
            params=work.params,
            adapt=(replace(phase, step=partial(work.step, new=True)),),
            most_adapting=1,
            seen=lambda own: own.seen,
            refuses=lambda message, first: refused_message(message, first, weighted, shared),
            rests_on=work.rests_on,
            rowless=TwoStageClientState.without_rows if work.polynomials.coefficients else None,
            row_noise=row_noise,
        )

    return Method(
        "two_stage" if row_noise is None else "two_stage with row noise",
        model,
        from_factor(shared=partial(empirical, size=draws)),
        client,
        server,
        everyone=row_noise is not None,
        discloses="summaries",
        most_rounds=MOST_ROUNDS if row_noise is None else row_noise.num_rounds,
        traits=frozenset({"by rows"}),
    )


def _check_priors(program: Program) -> None:
    """Refuse params to be learned."""
    learned = [spec.name for spec in program.params if not spec.name.startswith(OWN)]
    if learned:
        raise ProgramError(
            f"param '{learned[0]}' would be learned, but two_stage infers sites alone: sample it "
            "with a prior, pyro.sample, or use fedsvi"
        )
