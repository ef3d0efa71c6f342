"""pFedMe: personalized models that are pulled toward a local copy of the global one.

    client:  w <- theta, v <- theta;  for every mini-batch:
                 K times  v <- v - lr grad_v [ nll(v) + prox D(v, w) ]
                 w <- w - eta grad_w prox D(v, w)
    server:  theta <- mean_k w_k

Source: T. Dinh et al. 2020, arXiv:2006.08848, Algorithm 1; its beta is that of `over_relaxed`. In a
program v is the client's own site, w its prior's mean, and D = |v - w|^2 / 2 minus the log density
of a prior of unit scale, constants apart; another prior gives another D. As in the paper the mean
over clients is uniform (its code weights by rows: `by_rows`); as in its code a round's first prox
starts at the global model.
"""

from __future__ import annotations

from hierfl.guides.delta import delta
from hierfl.method import Method
from hierfl.methods.about import About
from hierfl.methods.alternating import Alternating
from hierfl.methods.averaging import plain_average
from hierfl.optimizers import SGD, Optimizer
from hierfl.program.sites import Model


@About(
    infers="each client's point estimate near a local copy of the global model",
    source="T. Dinh et al. 2020, arXiv:2006.08848",
    common="a prior mean",
    own="weights",
    kept="its weights",
    crosses="its copy of the mean",
    new="proximal steps",
    down="the prior's means",
    up="`theta`: its copy of them after training; `loss`",
)
def pfedme(
    model: Model,
    *,
    prox: float = 15.0,
    optimizer: Optimizer = SGD(0.1),  # noqa: B008 (frozen)
    global_optimizer: Optimizer = SGD(0.005),  # noqa: B008
    inner_steps: int = 5,
    steps: int = 20,
    batch_size: int | None = 20,
) -> Method:
    """Return pFedMe of a hierarchical program, by point estimates.

    Args:
        model: local sites of unit prior scale whose mean is a global param, such as
            `hierfl.models.bayesian_network(module, prior_loc="learned", prior_scale=1.0)`.
        prox: weight of the prior, beside the mean negative log likelihood of a row; lambda in the
            paper. All defaults: the authors' README.
        optimizer: of the personalized model, alpha in the paper; started from scratch in each
            round.
        global_optimizer: of the client's copy of the global model, eta in the paper; likewise.
        inner_steps: K, steps of the personalized model on each mini-batch.
        steps: R, mini-batches of a round.
        batch_size: rows of a mini-batch; None: all.

    Raises:
        ProgramError: (at fit) the model has no local site, or nothing global to learn.
    """
    core = Alternating(
        loss=lambda terms, rows: terms.nll / rows + prox * terms.local_kl,
        local=optimizer,
        shared=global_optimizer,
        inner=inner_steps,
        steps=steps,
        batch_size=batch_size,
        restarts=True,
    )
    return Method("pfedme", model, delta, core.client, plain_average)
