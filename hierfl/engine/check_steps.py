"""Checks of cohort and mini-batches against method and program, before the first round."""

from __future__ import annotations

from hierfl.data.clients import ClientData
from hierfl.engine.settings import Settings
from hierfl.method import Client, Method, Server
from hierfl.program.check_padding import check_mini_batches
from hierfl.program.program import Program


def check_everyone(method: Method, settings: Settings, *, all_clients: bool) -> None:
    """Refuse smaller cohorts and skipped clients where a method needs all clients each round."""
    if settings.on_client_error == "skip":
        raise ValueError(
            f"{method.name} sums the updates of all clients in each round, so none can be left "
            "out: use on_client_error='raise', or remove the client from the data"
        )
    if not all_clients:
        raise ValueError(
            f"{method.name} sums the updates of all clients in each round, which a smaller cohort "
            "cannot replace: leave cohort=None, or use a method of many small rounds (fedsvi)"
        )


def check_mail(method: Method, client: Client, server: Server) -> None:
    """Refuse mail of a method that discloses sums, and mail without a place in the client state."""
    if server.mail is None:
        return
    if method.discloses == "sums":
        raise TypeError(
            f"{method.name} sends mail to single clients, so its server knows more than sums: "
            "declare "
            f'Method(..., discloses="summaries")'
        )
    if "mail" not in client.own:
        raise TypeError(
            f"{method.name} sends mail to single clients, and their state has no place for it: "
            "give "
            f'Client.own an entry "mail"'
        )


def check_steps_fit(program: Program, client: Client, data: ClientData) -> None:
    """Refuse mini-batches or halves that the program gives another density for.

    Raises:
        ValueError: a factor of all of a client's rows, with mini-batches or halves of them.
        ProgramError: a site that depends on several rows, with mini-batches or halves of them.
    """
    _check_factors(program, client, int(data.counts.max()))
    each = [p for p in (*client.phases, *(client.adapt or ())) if p.count]
    phases = [p for p in each if p.batch_size or p.rows != "all"]
    if phases:
        check_mini_batches(
            program,
            data,
            priors_alone=not any(p.scores_rows for p in phases),
            halves=any(p.rows != "all" for p in each),
        )


def _check_factors(program: Program, client: Client, most: int) -> None:
    """Refuse mini-batches under a factor of all of a client's rows, which cannot be scaled up."""
    whole = [name for name, of_rows in program.factors.items() if not of_rows]
    sizes = [
        p.batch_size for p in client.phases if p.count and p.batch_size and p.batch_size < most
    ]
    if whole and sizes:
        raise ValueError(
            f"factor '{whole[0]}' has one value a client, computed from its rows, and a mini-batch "
            f"of {sizes[0]} rows does not give it: use batch_size=None, or a factor inside "
            "batch.data()"
        )
    if whole and any(p.count and p.rows != "all" for p in client.phases):
        raise ValueError(
            f"factor '{whole[0]}' has one value a client, computed from its rows, and half of its "
            "rows do not give it: set split=False, or use a factor inside batch.data()"
        )
