"""Weights by rows for any method that averages: a client with twice the rows counts twice.

theta <- sum_k (n_k / n) theta_k      in place of the uniform mean
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hierfl.core.trees import Tree
from hierfl.method import Client, Method, Server, Share, Up
from hierfl.methods.about import Wrapper
from hierfl.methods.wrapping import check_averages
from hierfl.program.program import Program


@Wrapper(adds="the server weights clients by their numbers of rows")
def by_rows(method: Method) -> Method:
    """Return the method with every mean over clients weighted by their rows.

    What the method's own weights hold apart from rows is kept. A method that weights by rows
    already, as `fedavg` does, stays as it is.

    Args:
        method: any method whose server averages its clients' copies of the global params.

    Raises:
        ProgramError: (at fit) the server does more than average.
    """

    def client(program: Program) -> Client:
        plain = method.client(program)

        def finish(work: Tree, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
            _, kept = plain.finish(work, message, own, rows)
            up, _ = plain.finish(work, message, own, torch.ones_like(rows))
            return {name: _weighted(share, rows) for name, share in up.items()}, kept

        return replace(plain, finish=finish)

    def server(program: Program) -> Server:
        plain = method.server(program)
        fix = "its weights are part of the method; fedmap takes them as omega"
        check_averages("by_rows", method, program, plain, fix)
        return plain

    return replace(method, name=f"{method.name} by rows", client=client, server=server)


def _weighted(share: object, rows: Tensor) -> Share:
    if not isinstance(share, Share):
        raise TypeError(f"by_rows weights a Share, and a client sends a {type(share).__name__}")
    return Share(share.value, rows * share.weight)
