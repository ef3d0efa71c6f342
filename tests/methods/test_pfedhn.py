"""pFedHN: reductions by simple hypernetworks, end-to-end gradients, and planted kinds of clients."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from hierfl import Method
from hierfl.core.trees import Tree
from hierfl.engine.federation import federate
from hierfl.engine.rounds import Progress, begin
from hierfl.methods import fedavg, local_only, pfedhn
from hierfl.methods.personalized.pfedhn import Mlp
from hierfl.optimizers import SGD
from hierfl.program.program import Params
from tests.methods.quadratics import START, B, H, at, clients
from tests.programs import fit


@dataclass(frozen=True)
class Itself(Mlp):
    """h(e) = start + e: each client's params are its embedding."""

    def start(self, like: Params, size: int, key: Tensor) -> Tree:
        return {}

    def params(self, weights: Tree, embedding: Tensor, like: Params) -> Params:
        return {"theta": embedding}


@dataclass(frozen=True)
class Alike(Mlp):
    """h(e) = phi: one model for all clients."""

    def start(self, like: Params, size: int, key: Tensor) -> Tree:
        return dict(like)

    def params(self, weights: Tree, embedding: Tensor, like: Params) -> Params:
        return {"theta": weights["theta"] + 0.0 * embedding.sum()}


LOCAL: dict[str, Any] = {"optimizer": SGD(0.1), "steps": 5, "batch_size": None}
PLAIN: dict[str, Any] = {"server_optimizer": SGD(1.0), "clipping_norm": None, **LOCAL}


def untouched(method: Method) -> Progress:
    """Return what server and clients hold before the first round."""
    return begin(federate(method, clients()))


def test_an_embedding_that_is_the_model_fits_each_client_alone() -> None:
    method = pfedhn(at(START), hypernetwork=Itself(), embedding_size=2, **PLAIN)
    first = untouched(method).table.mail["theta"]
    fitted = fit(method, clients(), rounds=3).progress.table.mail["theta"]
    for k in range(3):
        alone = fit(local_only(at(first[k]), **LOCAL), clients(), rounds=3)
        expected = alone.progress.table.params["theta"][k]
        assert torch.allclose(fitted[k], expected, rtol=0.0, atol=1e-10)


def test_one_model_for_all_is_fedavg_with_one_client_a_round() -> None:
    method = pfedhn(at(START), hypernetwork=Alike(), embedding_size=1, **PLAIN)
    one = fit(method, clients(), rounds=6, cohort=1, seed=3).progress.table.mail["theta"]
    plain = fit(fedavg(at(START), **LOCAL), clients(), rounds=6, cohort=1, seed=3)
    assert torch.allclose(one, plain.message["theta"].expand(3, 2), rtol=0.0, atol=1e-10)


def test_a_round_of_one_step_is_a_gradient_step_through_the_hypernetwork() -> None:
    """The server's step is along the derivative of f_i(h(e_i; phi)), by autograd through the whole."""
    inner, outer = 0.05, 0.3
    how: dict[str, Any] = {"optimizer": SGD(inner), "server_optimizer": SGD(outer), "steps": 1}
    how |= {"hypernetwork": Mlp((4,)), "embedding_size": 3}
    method = pfedhn(at(START), **how, clipping_norm=None, batch_size=None)
    before = untouched(method).server.params
    after = fit(method, clients(), rounds=1).progress.server.params
    embedding = before.embedding.clone().requires_grad_()
    bias = before.phi["heads"]["theta"]["bias"].clone().requires_grad_()
    heads = {"theta": {**before.phi["heads"]["theta"], "bias": bias}}
    phi = {"layers": before.phi["layers"], "heads": heads}
    w = torch.stack([Mlp((4,)).params(phi, e, {"theta": START})["theta"] for e in embedding])
    away = w - B
    loss = 0.5 * (away * (H @ away[..., None])[..., 0]).sum()
    by_embedding, by_bias = torch.autograd.grad(loss, [embedding, bias])
    moved = before.embedding - after.embedding
    assert torch.allclose(inner * outer * by_embedding, moved, rtol=0.0, atol=1e-12)
    moved = bias.detach() - after.phi["heads"]["theta"]["bias"]
    assert torch.allclose(inner * outer * by_bias, moved, rtol=0.0, atol=1e-12)


def test_the_gradient_is_clipped() -> None:
    how = {**PLAIN, "clipping_norm": 0.01}
    method = pfedhn(at(START), hypernetwork=Itself(), embedding_size=2, **how)
    before = untouched(method).server.params.embedding
    after = fit(method, clients(), rounds=1).progress.server.params.embedding
    assert float((before - after).norm()) == pytest.approx(0.01)


def test_embeddings_follow_clients_names() -> None:
    """Clients in another order get the same models."""
    method = pfedhn(at(START), **LOCAL)
    order = [2, 0, 1]
    one = fit(method, clients(), rounds=2).progress.table.mail["theta"]
    two = fit(method, clients().select(torch.tensor(order)), rounds=2).progress.table.mail
    assert torch.allclose(one[order], two["theta"], rtol=0.0, atol=1e-12)
