"""How alike clients are: the angle between what they ask of the global params, and between their losses class by class (PRIOR)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor
from torch.func import grad

from hierfl.data.batch import ClientBatch
from hierfl.method import over_draws
from hierfl.posterior.client_loop import each_client
from hierfl.posterior.prediction import Prediction
from hierfl.posterior.snapshot import Snapshot
from hierfl.program.program import Params


@dataclass(frozen=True)
class Coherence:
    """The generalised coherence estimate of N vectors (Gish and Cochran 1988), which PRIOR's Fig. 2 shows of clients' gradients.

    Args:
        estimate: 1 - det G, G the Gram matrix of the vectors at length 1: 0 where all are at right angles, 1 where one of them
            depends on the others, as it must where there are more vectors than dimensions.
        minus_log_det: -log det G >= 0, which still tells many vectors apart where `estimate` is all but 1; infinite at 1.
        vectors: N.
    """

    estimate: float
    minus_log_det: float
    vectors: int


def coherence(vectors: Tensor) -> Coherence:
    """The coherence of vectors (N, d); the length of none matters.

    Raises:
        ValueError: fewer than two vectors, or one of length 0.

    >>> coherence(torch.tensor([[1.0, 0.0], [1.0, 1.0]])).estimate.__round__(3)
    0.5
    """
    if vectors.dim() != 2 or len(vectors) < 2:
        raise ValueError(
            f"vectors have shape {tuple(vectors.shape)}: (N, d) are needed, N at least 2"
        )
    of_unit = vectors.double()
    lengths = of_unit.norm(dim=1, keepdim=True)
    if not bool((lengths > 0.0).all()):
        raise ValueError(
            f"vector {int((lengths[:, 0] == 0.0).nonzero()[0, 0])} has length 0: it has no direction"
        )
    of_unit = of_unit / lengths
    sign, log_det = torch.linalg.slogdet(of_unit @ of_unit.T)
    singular = len(vectors) > vectors.shape[1] or float(sign) <= 0.0
    log = -math.inf if singular else min(float(log_det), 0.0)
    return Coherence(-math.expm1(log), -log, len(vectors))


def client_slopes(fit: Snapshot, *, draws: int = 20, seed: int = 0) -> Tensor:
    """What each client asks of the global params: d (NLL_i + KL_i) / d (global params), (N, P).

    At a client's own optimum this is the gradient of its envelope, min over w_i of all that it minimises: for a delta guide under
    a Gaussian prior lam (theta - w_i), PRIOR's and pFedMe's, its length aside. Each client computes its own on its training rows.

    Args:
        fit: with at least one global param.
        draws: of the guide, a mean over which each is; 1 for point estimates.
        seed: of the draws.

    Raises:
        ValueError: there is no global param.
    """
    program = fit.program
    shared = list(program.start()[0])
    if not shared:
        raise ValueError(
            "the program has no global param: clients have nothing to ask of one another"
        )

    def one(params: Params, own: ClientBatch, asked: ClientBatch) -> Tensor:
        def objective(above: Params) -> Tensor:
            def once(batch: ClientBatch) -> Tensor:
                terms = program.terms({**params, **above}, batch)
                return (terms.nll + terms.local_kl).sum()

            return over_draws(once, own, draws, keyed=program.keyed)

        slopes = grad(objective)({name: params[name] for name in shared})
        return torch.cat([slopes[name].flatten() for name in shared])

    chunks = each_client(fit, one, seed=seed, salt="client_slopes")
    return torch.cat([chunk.found for chunk in chunks]).detach()


def loss_deviations(prediction: Prediction) -> pd.DataFrame:
    """How far each client's loss on each class is from the mean over clients (PRIOR, Fig. 3 and 9), nats; 0 without rows of it.

        d_ic = l_ic - sum_j n_jc l_jc / sum_j n_jc,    l_ic the mean minus log score of client i's n_ic rows of class c

    On every client's own test rows these are the paper's local deviations; where all clients predict the same rows (each client's
    rows in `prediction` a copy of them) all n_ic of a class are equal, and they are its global ones.

    Args:
        prediction: of labelled rows, of labels 0/1 or classes.

    Returns:
        A row a client, a column a class that some row has.

    Raises:
        ValueError: the rows have no labels, or those are numbers.
    """
    label, log_score = prediction.known()
    if prediction.kind == "numeric":
        raise ValueError(f"site '{prediction.site}' is numeric: deviations are by class")
    names = pd.Categorical.from_codes(
        prediction.data.row_client.numpy(), categories=list(prediction.data.names)
    )
    frame = pd.DataFrame(
        {"client": names, "class": label.long().numpy(), "loss": -log_score.double().numpy()}
    )
    losses = frame.pivot_table("loss", "client", "class", aggfunc="mean", observed=False)
    deviations = (losses - frame.groupby("class")["loss"].mean()).fillna(0.0)
    deviations.index = pd.Index(list(deviations.index), name="client")
    return deviations
