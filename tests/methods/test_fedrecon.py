"""FedRecon: fixed points on quadratics, Danskin's gradient, and FedAvg with a server optimizer."""

from typing import Any

import pytest
import torch

from hierfl import Clock
from hierfl.core.trees import tree_map
from hierfl.engine.chunks import client_round
from hierfl.engine.federation import federate
from hierfl.engine.rounds import begin
from hierfl.methods import fedrecon, fedrep, server_optimized
from hierfl.optimizers import SGD, Adam
from tests.methods.cases import shared
from tests.methods.quadratics import B, P
from tests.methods.split_quadratics import EVERY_ROW, HC, at, best_v, clients, profile
from tests.programs import federation, fit

HEAD = ("theta.2.weight", "theta.2.bias")
WHOLE: dict[str, Any] = {"split": False, **EVERY_ROW}
# rows are weighted by how many the query went through: with full batches of a fixed number of steps
# that is n_k


@pytest.mark.slow
@pytest.mark.parametrize("plate", [False, True])
def test_exact_reconstruction_reaches_the_joint_optimum(plate: bool) -> None:
    head = None if plate else "v"
    method = fedrecon(
        at(plate=plate), head=head, head_optimizer=SGD(0.5), body_optimizer=SGD(0.5),
        head_steps=25, **WHOLE,
    )  # fmt: skip
    fitted = fit(method, clients(), rounds=20)
    u = fitted.message["u"]
    assert torch.allclose(u, (P * profile() * B[:, 0]).sum() / (P * profile()).sum(), atol=1e-5)
    assert float(u) == pytest.approx(0.345658, abs=1e-5)
    assert torch.allclose(fitted.progress.table.params["v"].flatten(), best_v(u), atol=1e-4)


def test_a_query_step_is_a_gradient_step_on_the_profile_likelihood() -> None:
    method = fedrecon(
        at(1.7), head="v", head_optimizer=SGD(0.4), body_optimizer=SGD(0.3), head_steps=80, **WHOLE
    )
    after = fit(method, clients(), rounds=1).message["u"]
    gradient = (P * profile() * (1.7 - B[:, 0])).sum()
    assert torch.allclose(after, 1.7 - 0.3 * gradient, atol=1e-10)


@pytest.mark.slow
def test_few_steps_of_reconstruction_have_a_fixed_point_of_their_own() -> None:
    """.430653 for 10 steps of size .1 from 0, which is not FedRep's: the head starts again each round."""
    method = fedrecon(
        at(), head="v", head_optimizer=SGD(0.1), body_optimizer=SGD(0.5), head_steps=10, **WHOLE
    )
    u = fit(method, clients(), rounds=40).message["u"]
    shrunk = 1.0 - (1.0 - 0.1 * HC[:, 1, 1]) ** 10  # v = shrunk * best_v(u)
    h, cross = HC[:, 0, 0], HC[:, 0, 1]
    # sum p [ h (u - b0) + cross (shrunk best_v(u) - b1) ] = 0, linear in u
    weight = P * (h - shrunk * cross.square() / HC[:, 1, 1])
    wanted = (weight * B[:, 0] + P * cross * (1.0 - shrunk) * B[:, 1]).sum() / weight.sum()
    assert torch.allclose(u, wanted, atol=1e-9)
    assert float(u) == pytest.approx(0.430653, abs=1e-6)


def test_rounds_do_not_read_what_a_client_kept() -> None:
    """A client state of other numbers changes no round: clients are stateless."""
    method = fedrecon(shared(), head=HEAD, batch_size=2)
    run = federate(method, federation())
    start = begin(run)
    message = run.server.down(start.server, Clock(0, 1))
    assert set(message) == {"theta.0.weight", "theta.0.bias"}
    tables = (start.table, tree_map(lambda v: v + 1.0, start.table))
    (up, kept), (up_, kept_) = (
        client_round(run, run.client.phases, message, table, torch.arange(4), 0) for table in tables
    )
    for name, value in up["theta"].value.items():
        assert torch.equal(value, up_["theta"].value[name])
    for name in HEAD:
        assert torch.equal(kept.params[name], kept_.params[name])
    assert up["theta"].weight.tolist() == [2.0, 1.0, 3.0, 1.0], "rows of the query"


def test_personalize_reconstructs_on_all_rows_from_the_fixed_start() -> None:
    method = fedrecon(at(0.5, 0.2), head="v", head_optimizer=SGD(0.1), head_steps=7, **EVERY_ROW)
    fitted = fit(method, clients(), rounds=2)
    u = float(fitted.message["u"])
    for rounds in (1, 3):
        new = fitted.personalize(clients(), rounds=rounds).progress.table.params["v"].flatten()
        for k in range(3):
            v = torch.tensor(0.2)
            for _ in range(7):
                v = v - 0.1 * (HC[k] @ (torch.stack([torch.tensor(u), v]) - B[k]))[1]
            assert new[k].item() == pytest.approx(v.item(), abs=1e-12)


def test_the_server_optimizer_does_not_move_the_start_of_the_head() -> None:
    """Not even one that decays its params."""
    server = Adam(0.1, weight_decay=0.5)
    for method in (
        fedrecon(shared(), head=HEAD, server_optimizer=server, batch_size=2),
        server_optimized(fedrep(shared(), head=HEAD, batch_size=2), server),
    ):
        fitted = fit(method, federation(), rounds=2)
        for name, value in fitted.message.items():
            assert torch.equal(value, fitted.program.start()[0][name]) == (name in HEAD)
