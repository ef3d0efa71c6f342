"""pFedGP: a common embedding, and a Gaussian process of each client's own rows.

    client:  w <- theta;  splits its rows at random in two halves
             for every mini-batch of the second:  w <- w - lr grad nll(second | first; w)
             keeps some of all its rows
    server:  theta <- sum_k (n_k / n) w_k
    predict: the process given the rows kept, at the last theta

Only the embedding and the kernel are learned; each client's process has no params of its own, so
that a client that joins later keeps its rows, and trains nothing.

Source: Achituve, Shamsian, Navon, Chechik and Fetaya 2021, arXiv:2106.15482, where clients train on
the predictive likelihood of a split. Differences: classes are processes of transformed labels
(`hierfl.models.GaussianProcessNetwork`), in closed form, in place of a tree of classifiers by Gibbs
draws; inducing points are common and learned; means are by rows.

Its Bayesian part is each client's process. What is common is a point.
"""

from __future__ import annotations

from typing import Literal

from hierfl.core.trees import Tree
from hierfl.data.batch import ClientBatch
from hierfl.guides.delta import delta
from hierfl.method import Client, Method, Phase
from hierfl.methods.about import About
from hierfl.methods.parts.averaging import Descent, expect_model, plain_average
from hierfl.methods.personalized.knn_per import remembering
from hierfl.models.gaussian_process_network import GaussianProcessNetwork
from hierfl.optimizers import SGD, Optimizer
from hierfl.program.program import Program


@About(
    infers="a Gaussian process of each client's rows, on a common embedding",
    source="Achituve et al. 2021, arXiv:2106.15482",
    common="weights of an embedding, and a kernel",
    own="a Gaussian process",
    guide="a Gaussian process, exact given its rows",
    kept="some of its rows and their labels",
    crosses="its copy of the weights",
    new="its own process, from its rows",
    up="`theta`*: its weights after training; `loss`*",
)
def pfedgp(
    model: GaussianProcessNetwork,
    *,
    optimizer: Optimizer = SGD(0.05, momentum=0.9),  # noqa: B008 (frozen)
    steps: int = 1,
    unit: Literal["step", "epoch"] = "step",
    batch_size: int | None = None,
) -> Method:
    """Return pFedGP of `hierfl.models.GaussianProcessNetwork(module, classes=...)`.

    Args:
        model: an embedding and a kernel, of real labels or of classes.
        optimizer: of the client, restarted in each round. optimizer, steps, unit and batch_size:
            the authors', without their weight decay.
        steps: mini-batches of a round, or passes over the second half of the rows (`unit`).
        unit: "step" or "epoch".
        batch_size: rows of a mini-batch; None: all of the second half.

    Raises:
        TypeError: the model is another one.
    """
    expect_model(model, GaussianProcessNetwork, "pfedgp", "classes=...")
    descent = Descent(optimizer, steps, unit, batch_size)

    def client(program: Program) -> Client:
        blank = program.start()[1]

        def remember(work: Tree, message: Tree, batch: ClientBatch) -> Tree:
            return {**work, "own": model.remembered(batch)}

        def move(work: Tree, message: Tree, batch: ClientBatch) -> Tree:
            return descent.moved(work, lambda w: program.mean_loss({**w, **work["own"]}, batch))

        split = Phase(remember, rows="support"), Phase(move, steps, unit, batch_size, rows="query")
        return remembering(blank, descent, model.remembered, split)

    return Method("pfedgp", model, delta, client, plain_average)
