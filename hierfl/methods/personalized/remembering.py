"""Clients of FedAvg that keep some of their rows: kNN-Per and pFedGP.

kNN-Per: FedAvg's network, mixed at each client with the labels of its nearest own rows.

    client:  w <- theta;  for every mini-batch:  w <- w - lr grad nll(w)     (as in FedAvg)
             keeps some of its rows
    server:  theta <- sum_k (n_k / n) w_k
    predict: (1 - weight) softmax f(x; theta) + weight p_k(x), by the k rows kept whose features are
    nearest

Source: Marfoq et al. 2022, arXiv:2111.09360. Features are those of the last theta: a client keeps
rows, not features. A client that joins later keeps its rows, and trains nothing.

Nothing in it is Bayesian: theta is a point, and the prediction a mix of two with a weight that is
given.

pFedGP: a common embedding, and a Gaussian process of each client's own rows.

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
draws; without inducing points; means are by rows.

Its Bayesian part is each client's process. What is common is a point.
"""

from functools import partial
from typing import Literal

from torch import Tensor

from hierfl.core.trees import Tree
from hierfl.data.batch import ClientBatch
from hierfl.guides.delta import delta
from hierfl.method import Client, Method, Phase
from hierfl.methods.about import About
from hierfl.methods.parts.averaging import (
    Descent,
    DescentState,
    copies,
    expect_model,
    plain_average,
)
from hierfl.models.gaussian_process_network import GaussianProcessNetwork
from hierfl.models.memory_network import MemoryNetwork, remembered, without_memory
from hierfl.optimizers import SGD, Optimizer
from hierfl.program.program import Params, Program


@About(
    infers="FedAvg's network, mixed with the labels of the client's nearest rows",
    source="Marfoq et al. 2022, arXiv:2111.09360",
    common="weights",
    own="a memory of rows",
    kept="some of its rows and their labels",
    new="its own memory",
    up="`theta`*: its weights after training; `loss`*",
)
def knn_per(
    model: MemoryNetwork,
    *,
    optimizer: Optimizer = SGD(0.03),  # noqa: B008 (frozen)
    steps: int = 1,
    unit: Literal["step", "epoch"] = "epoch",
    batch_size: int | None = 128,
) -> Method:
    """Return kNN-Per of `hierfl.models.MemoryNetwork(module, features=...)`.

    Args:
        model: a network with memory, which holds the number of neighbors and the memory's weight.
        optimizer: of the client, restarted in each round. Defaults: the authors' for FEMNIST,
            without their schedule of step sizes.
        steps: mini-batches of a round, or passes over the rows (`unit`).
        unit: "step" or "epoch".
        batch_size: rows of a mini-batch; None: all.

    Raises:
        TypeError: the model is another one.
    """
    expect_model(model, MemoryNetwork, "knn_per", "features=...")
    descent = Descent(optimizer, steps, unit, batch_size)

    def client(program: Program) -> Client:
        blank = program.start()[1]

        def loss(w: Params, work: DescentState, message: Tree, batch: ClientBatch) -> Tensor:
            with without_memory():
                return program.mean_loss({**w, **blank}, batch)

        return remembering(model, blank, descent, (descent.phase(loss),))

    return Method("knn_per", model, delta, client, plain_average)


def remembering(
    model: MemoryNetwork | GaussianProcessNetwork,
    blank: Params,
    descent: Descent,
    phases: tuple[Phase, ...],
) -> Client:
    """Return a client of FedAvg that keeps some of its rows after its phases, first `blank`."""
    last = Phase(partial(remember, model))
    return Client(
        own=blank,
        start=descent.begin,
        phases=(*phases, last),
        finish=lambda work, message, own, rows: (copies(work, rows), work.beside),
        adapt=(last,),
        most_adapting=1,
        keeps_rows=True,
    )


def remember(
    model: MemoryNetwork | GaussianProcessNetwork,
    work: DescentState,
    message: Tree,
    batch: ClientBatch,
) -> DescentState:
    """Keep some of the rows of a batch of all the client's rows, as its local params."""
    return work._replace(beside=remembered(batch, model.x, model.y, model.memory))


@About(
    infers="a Gaussian process for each client, on a common embedding",
    source="Achituve et al. 2021, arXiv:2106.15482",
    common="weights of an embedding, and a kernel",
    own="a Gaussian process",
    guide="a Gaussian process, exact given its rows",
    kept="some of its rows and their labels",
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

        def move(work: DescentState, message: Tree, batch: ClientBatch) -> DescentState:
            return descent.moved(work, lambda w: program.mean_loss({**w, **work.beside}, batch))

        first = Phase(partial(remember, model), rows="support")
        split = first, Phase(move, steps, unit, batch_size, rows="query")
        return remembering(model, blank, descent, split)

    return Method("pfedgp", model, delta, client, plain_average)
