"""Similarity of clients: coherence of their gradients, losses by class (PRIOR)."""

import math
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor
from torch.func import grad

from hierfl.core.arguments import expect_count, shown
from hierfl.core.process import one_at_a_time
from hierfl.data.batch import ClientBatch
from hierfl.method import over_draws
from hierfl.posterior.client_loop import each_client
from hierfl.posterior.prediction import Prediction, expect_prediction
from hierfl.posterior.snapshot import Snapshot, expect_fit
from hierfl.posterior.weights import already_weighted
from hierfl.program.program import Params


@dataclass(frozen=True)
class Coherence:
    """The generalized coherence of N vectors (Gish and Cochran 1988), as in PRIOR's Fig. 2.

    Args:
        estimate: 1 - det G, with G the Gram matrix of the normalized vectors: 0 where all are
            orthogonal, 1 where they are linearly dependent.
        minus_log_det: -log det G >= 0, informative where `estimate` is close to 1; infinite at 1.
        vectors: N.
    """

    estimate: float
    minus_log_det: float
    vectors: int


def coherence(vectors: Tensor) -> Coherence:
    """Measure the coherence of vectors (N, d), whatever their lengths.

    Raises:
        TypeError: they are no tensor.
        ValueError: there are fewer than two vectors, or one has length 0.

    >>> coherence(torch.tensor([[1.0, 0.0], [1.0, 1.0]])).estimate.__round__(3)
    0.5
    """
    if not isinstance(vectors, Tensor):
        raise TypeError(
            f"vectors is {shown(vectors)}: it must be a tensor (N, d), as of client_gradients(fit)"
        )
    if vectors.dim() != 2 or len(vectors) < 2:
        raise ValueError(
            f"vectors have shape {tuple(vectors.shape)}: it must be (N, d), with N at least 2"
        )
    of_unit = vectors.double()
    lengths = of_unit.norm(dim=1, keepdim=True)
    if not bool((lengths > 0.0).all()):
        raise ValueError(
            f"vector {int((lengths[:, 0] == 0.0).nonzero()[0, 0])} has length 0: it has no "
            "direction"
        )
    of_unit = of_unit / lengths
    sign, log_det = torch.linalg.slogdet(of_unit @ of_unit.T)
    singular = len(vectors) > vectors.shape[1] or float(sign) <= 0.0
    log = -math.inf if singular else min(float(log_det), 0.0)
    return Coherence(-math.expm1(log), -log, len(vectors))


@one_at_a_time
def client_gradients(fit: Snapshot, *, draws: int = 20, seed: int = 0) -> Tensor:
    """Return each client's gradient in the global params, d (NLL_i + KL_i) / d theta, (N, P).

    At a client's own optimum this is the gradient of its envelope, the minimum over w_i of its
    objective. For a delta guide under a Gaussian prior it is proportional to lam (theta - w_i), as
    in PRIOR and pFedMe. Each client uses its training rows.

    Args:
        fit: with at least one global param.
        draws: of the guide to average over; 1 is enough for point estimates.
        seed: of the draws.

    Raises:
        ValueError: the fit has no global param, or weighted draws in place of them.
    """
    expect_fit(fit)
    draws, program = expect_count(draws, "draws"), fit.program
    shared = list(program.start()[0])
    if not shared or already_weighted(fit):
        why = f"'{fit.method.name}' has weighted its draws" if shared else "it has no global param"
        fix = "fit with another method, such as methods.fedsvi(model)"
        raise ValueError(f"the fit has no gradients of clients to compare, since {why}: {fix}")

    def one(params: Params, own: ClientBatch, asked: ClientBatch) -> Tensor:
        def objective(above: Params) -> Tensor:
            def once(batch: ClientBatch) -> Tensor:
                terms = program.terms({**params, **above}, batch)
                return (terms.nll + terms.local_kl).sum()

            return over_draws(once, own, draws, keyed=program.in_vmap)

        slopes = grad(objective)({name: params[name] for name in shared})
        return torch.cat([slopes[name].flatten() for name in shared])

    chunks = each_client(fit, one, seed=seed, salt="client_slopes")
    return torch.cat([chunk.found for chunk in chunks]).detach()


def loss_deviations(prediction: Prediction) -> pd.DataFrame:
    """Return each client's loss by class minus the mean over clients (PRIOR, Figs. 3 and 9).

        d_ic = l_ic - sum_j n_jc l_jc / sum_j n_jc

    l_ic is the mean negative log score of client i's n_ic rows of class c. The deviation is 0 where
    a client has no rows of a class. On every client's own test rows these are the paper's local
    deviations, and where each client predicts a copy of the same rows its global ones.

    Args:
        prediction: of labeled rows; binary or categorical, else a ValueError.

    Returns:
        One row per client, one column per class that occurs.
    """
    expect_prediction(prediction, "prediction")
    prediction = prediction.by_client()
    label, log_score = prediction.known()
    if prediction.kind not in ("binary", "categorical"):
        raise ValueError(
            f"site '{prediction.site}' is {prediction.kind}, and deviations are by class"
        )
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
