"""Two-stage inference: the posterior of one's own hierarchy in two rounds, and a round or two to be sure of it.

Each client sends a Gaussian factor of its likelihood in v = (its own sites, those global sites that the
likelihood reads itself). The hierarchy above the factors is kept exact.

    server     tells all clients one thing: Normal(m, C), the mean and covariance of what it now believes of any
               client's v (at first: under the prior)
    client k   q_k(v) ~ Normal(v; m, C) p(y_k | v), made Gaussian by variational steps on its own rows;
               sends Lambda_k = -E_q[d^2 log p(y_k | v)],  eta_k = E_q[d log p(y_k | v)] + Lambda_k E_q[v]
    server     samples p(z) prod_k integral p(w | z) exp(eta_k . v - v' Lambda_k v / 2) dw by itself
    weigh      one round more: clients send log p(y_k | z) at the server's draws, by importance sampling about
               their factors; Pareto-smoothed weights make the draws those of the posterior itself

The answer of `fit` is weighed: no approximation is left in it, and k-hat says whether the weights can be
trusted. Clients keep nothing between rounds.

It is conjugate-computation variational inference (Khan and Lin 2017, arXiv:1703.04265) on the likelihoods, with
the hierarchical prior kept exact; near to expectation propagation over sites of data (Vehtari et al. 2020, JMLR
21(17)), without its divisions. To a medical statistician it is a two-stage random-effects meta-analysis, made
exact.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from hierfl.core.trees import Tree
from hierfl.data.batch import ClientBatch
from hierfl.guides.conditional import conditional
from hierfl.guides.global_sites import empirical
from hierfl.method import Client, Each, Method, Phase, Server, Share, Up
from hierfl.methods.two_stage_server import Rounds, finished, logged
from hierfl.program.program import Program, ProgramError
from hierfl.program.recipes import recorded
from hierfl.program.sites import Model
from hierfl.summaries.expectations import Line, nodes_of, rows_of, seen_line
from hierfl.summaries.factor import factor_of
from hierfl.summaries.hierarchy import Hierarchy
from hierfl.summaries.reading import read_likelihood
from hierfl.summaries.seen_hierarchy import seen_hierarchy
from hierfl.summaries.surrogate import Surrogate
from hierfl.summaries.weighing import Weigher, standard_points

MOST_ROUNDS = 60  # it stops by itself; cohorts of some clients take longest
CANDIDATES = 32  # draws of a client's Laplace approximation, of which one is kept


class Seen(NamedTuple):
    """What was found of a program: its prior, and the linear predictors of its likelihood."""

    hierarchy: Hierarchy
    line: Line


@recorded
def two_stage(model: Model, *, draws: int = 4000, seed: int = 0) -> Method:
    """Return two-stage inference of a program, centred or non-centred.

    `fit` stops by itself. Its history has the next stage (0 gather, 1 weigh, 2 done), how far means moved (in
    posterior sds, `moved`) and sds (as ratios, `changed`), split R-hat of the server's chains, the number of
    eigenvalues of factors that were raised to 0 (`raised`), k-hat and the number of effective draws, and the
    largest k-hat of a single client's ratio.

    Every client sends a summary of its own, as in a meta-analysis (`Method.discloses`).

    Args:
        model: any program whose local sites are Normal or LogNormal given the global ones, with any likelihood;
            centred, or non-centred with a linear predictor. Every unknown has a prior.
        draws: S, of the global sites.
        seed: of the server's draws.

    Raises:
        ValueError: `draws` is below 100.
        ProgramError: (at fit) a param would be learned, a local site is not Normal, or the program is
            non-centred in a form that is not recognised; the message names the site and the mend.
    """
    if draws < 100:
        raise ValueError(f"draws is {draws}: Pareto-smoothed weights need 100 or more")

    @lru_cache(maxsize=1)
    def seen(program: Program) -> Seen:
        _check_priors(program)
        reading = read_likelihood(program)
        return Seen(seen_hierarchy(reading), seen_line(reading))

    def server(program: Program) -> Server:
        rounds = Rounds(Surrogate(seen(program).hierarchy), draws, seed)
        return Server(
            state=rounds.begin(),
            update=rounds.update,
            down=rounds.down,
            final=lambda state, clock: {"params": rounds.params(state)},
            finished=finished,
            logged=logged,
        )

    guide = conditional(shared=partial(empirical, size=draws), candidates=CANDIDATES)
    return Method(
        "two_stage",
        model,
        guide,
        lambda program: _client(seen(program)),
        server,
        discloses="summaries",
        most_rounds=MOST_ROUNDS,
    )


def _client(seen: Seen) -> Client:
    hierarchy = seen.hierarchy
    nodes = nodes_of(seen.line)
    weigher = Weigher(hierarchy, *standard_points(hierarchy.reading.own_size))

    def step(work: Tree, message: Tree, batch: ClientBatch) -> Tree:
        with torch.no_grad():
            rows = rows_of(seen.line, batch)
            factor = factor_of(rows, message["loc"], message["covariance"], nodes)
            if "draws" in message:
                found = weigher.marginals(rows, factor, message["draws"])
                return {"log_marginals": found.log, "inner": found.effective.mean()}
        fields = {name: batch.client_fields[name][0, 0] for name in hierarchy.fields}
        return {
            "factor": {"precision": factor.precision, "shift": factor.shift, "fields": fields},
            "raised": factor.raised,
        }

    def finish(work: Tree, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
        if "draws" in message:
            return {
                "log_marginals": Each(work["log_marginals"]),
                "inner_effective": Share(work["inner"]),
            }, own
        return {"factor": Each(work["factor"]), "raised": Share(work["raised"])}, own

    return Client(
        own={},
        start=lambda message, own: {},
        phases=(Phase(step, nested=True),),
        finish=finish,
        params=lambda message, own: message["params"],
        adapt=(),
        like_rows=lambda message: True,
    )


def _check_priors(program: Program) -> None:
    """Refuse params to be learned, and a program without global sites."""
    learned = [spec.name for spec in program.params if not spec.name.startswith("_shared.")]
    if learned:
        raise ProgramError(
            f"param '{learned[0]}' would be learned, but two_stage infers sites alone: sample it with a prior, "
            f"pyro.sample, or use fedsvi"
        )
    if not program.latents.global_block.size:
        raise ProgramError(
            "the program has no global site, so there is nothing to infer in common: sample a site outside "
            "the clients plate"
        )
