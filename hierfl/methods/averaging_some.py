"""All clients train and some are averaged, for any method that averages.

    S <- each client with probability `share`, redrawn in each round
    theta <- the weighted mean of theta_k over k in S      (over all clients where S is empty)

Source: Shi et al. 2023, arXiv:2310.09183, Algorithm 1, and T. Dinh et al. 2020, arXiv:2006.08848,
Algorithm 1: all clients train in every round, and the server averages S of the N. A `cohort` is
something else: clients outside it rest.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hierfl.core import noise
from hierfl.core.trees import Tree
from hierfl.data.batch import ClientBatch
from hierfl.method import Client, Method, Server, Share, Up
from hierfl.methods.about import Wrapper
from hierfl.methods.wrapping import check_averages, inside, is_logged, wrapped
from hierfl.program.program import Program

LEFT_OUT = 1e-12  # weight of a client left out, so that a mean of such clients is defined


@Wrapper(
    call="(method, share=...)",
    adds="all clients train, and a random share of them is averaged",
)
def averaging_some(method: Method, *, share: float) -> Method:
    """Return the method with a random part of the clients in the server's mean.

    Shares that are a single number are only logged: they stay means over all clients of the round.

    Args:
        method: any method whose server averages its clients' copies of the global params.
        share: probability that a client is in the mean, in (0, 1]; S / N for S of N clients on
            average.

    Raises:
        ValueError: `share` is outside (0, 1].
        ProgramError: (at fit) the server does more than average.
    """
    if not 0.0 < share <= 1.0:
        raise ValueError(
            f"share is {share}: the probability that a client is averaged must be above 0 and at "
            "most 1"
        )

    def client(program: Program) -> Client:
        return _drawn(method.client(program), share)

    def server(program: Program) -> Server:
        plain = method.server(program)
        fix = "sample clients with fit(..., cohort=...)"
        check_averages("averaging_some", method, program, plain, fix)
        return plain

    name = f"{method.name} averaging {share:g}"
    return wrapped(method, name, trait="leaves out", client=client, server=server)


def _drawn(plain: Client, share: float) -> Client:
    """Return a client that draws, with the key of its last step, whether it is averaged."""

    def start(message: Tree, own: Tree) -> Tree:
        return {"method": plain.start(message, own), "weight": torch.ones(())}

    def finish(work: Tree, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
        up, kept = plain.finish(work["method"], message, own, rows)
        return {name: _weighted(sent, work["weight"]) for name, sent in up.items()}, kept

    def draw(work: Tree, message: Tree, batch: ClientBatch) -> Tree:
        return {**work, "weight": _weight(batch, share)}

    phases = inside(plain.phases, "method", draw)
    adapt = None if plain.adapt is None else inside(plain.adapt, "method")
    return replace(plain, start=start, phases=phases, finish=finish, adapt=adapt)


def _weight(batch: ClientBatch, share: float) -> Tensor:
    key = noise.fold(batch.key[0], noise.word("averaged"))
    drawn = noise.uniforms(key, (), torch.get_default_dtype())
    return torch.where(drawn < share, 1.0, LEFT_OUT)


def _weighted(sent: object, weight: Tensor) -> Share:
    if not isinstance(sent, Share):
        raise TypeError(
            f"averaging_some weights a Share, and a client sends a {type(sent).__name__}"
        )
    return sent if is_logged(sent.value) else Share(sent.value, sent.weight * weight)
