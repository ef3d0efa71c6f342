"""Mail, what a server has for each client by itself: delivered in order, counted, kept out of methods of sums."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

import hierfl
from hierfl import Client, Clock, Method, Program, Server, Share
from hierfl.core.trees import Tree
from hierfl.engine import client_store
from hierfl.guides.delta import delta
from hierfl.method import Each, Up
from tests.methods.test_one_of_k import center, numbers
from tests.programs import fit

VALUES, COUNTS = (1.0, 2.0, 4.0, 8.0), (3, 1, 4, 2)


class DoublingState(NamedTuple):
    """What a client got by itself."""

    mail: Tree


def doubling(**options: object) -> Method:
    """Each client sends back twice what it got by itself; it first gets its place in the data."""

    def client(program: Program) -> Client:
        def finish(work: Tree, message: Tree, own: Tree, rows: torch.Tensor) -> tuple[Up, Tree]:
            up: Up = {"twice": Each(2.0 * own.mail["it"]), "loss": Share(rows)}
            return up, own

        return Client(
            own=DoublingState({"it": torch.zeros(2), "also": torch.zeros(())}),
            start=lambda message, own: {},
            phases=(),
            finish=finish,
            params=lambda message, own: {"mu": own.mail["it"].sum()},
            mail=("mail",),
        )

    def server(program: Program) -> Server:
        def update(state: Tree, means: dict[str, Tree], clock: Clock) -> Tree:
            reports = means["twice"]
            return {"it": state["it"].index_copy(0, reports.ids, reports.value)}

        # the entries of mail in another order than those of the client state
        def mail(state: Tree) -> Tree:
            return {"also": state["it"].sum(1), "it": state["it"]}

        start = {"it": torch.arange(8.0).view(4, 2)}
        return Server(start, update, down=lambda state, clock: {}, mail=mail)

    made = Method("doubling", center, delta, client, server, discloses="summaries")
    return replace(made, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", [{}, {"chunk": 3}, {"engine": "sequential"}])
def test_each_client_gets_its_own(how: dict[str, object]) -> None:
    data = numbers(VALUES, COUNTS)
    fitted = fit(doubling(), data, rounds=2, **how)
    expected = 4.0 * torch.arange(8.0).view(4, 2)
    assert torch.equal(fitted.progress.table.mail["it"], expected)
    assert torch.equal(fitted.progress.table.mail["also"], expected.sum(1))
    means = fitted.predict(data.select([2, 0])).mean
    assert means.tolist() == [float(expected[2].sum())] * 4 + [float(expected[0].sum())] * 3


def test_mail_is_in_the_bytes_that_a_round_sends() -> None:
    fitted = fit(doubling(), numbers(VALUES, COUNTS), rounds=1, cohort=3)
    assert fitted.history["bytes_down"].tolist() == [3 * 3 * 8]
    assert fitted.history["bytes_up"].iloc[0] >= 3 * 2 * 8


def test_mail_reaches_states_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    data = numbers(VALUES, COUNTS)
    known = fit(doubling(), data, rounds=3).draws(1)
    monkeypatch.setattr(client_store, "IN_MEMORY", 0)
    stored = fit(doubling(), data, rounds=3)
    assert isinstance(stored.progress.table, client_store.Stored)
    rows = stored.progress.table.taken(torch.arange(4))
    assert torch.equal(rows.mail["it"], 8.0 * torch.arange(8.0).view(4, 2))
    assert known is not None


def without_a_place(method: Method) -> Method:
    def client(program: Program) -> Client:
        return replace(method.client(program), own={}, mail=())

    return replace(method, client=client)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: replace(m, discloses="sums"), 'declare Method\\(..., discloses="summaries"\\)'),
        (without_a_place, "name that in Client.mail"),
    ],
)
def test_mail_that_cannot_be_sent_is_refused(change: Callable[[Method], Method], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        hierfl.fit(change(doubling()), numbers(VALUES, COUNTS), rounds=1)
