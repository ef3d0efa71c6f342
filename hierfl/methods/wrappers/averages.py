"""Wrappers of a server's average: by rows, of some clients, over-relaxed, by an optimizer."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from hierfl.core import noise
from hierfl.core.arguments import expect
from hierfl.core.trees import Tree, lerp, sub
from hierfl.data.batch import ClientBatch
from hierfl.method import Client, Clock, Method, Server, Share, Up
from hierfl.methods.about import Wrapper
from hierfl.methods.wrappers.wrapping import (
    WrappedState,
    as_share,
    averaging_server_of,
    check_averages,
    inside,
    is_logged,
    within,
    wrapped,
)
from hierfl.optimizers import Optimizer, Stepped, step
from hierfl.program.program import Program

LEFT_OUT = 1e-12  # weight of a client left out, so that a mean of such clients is defined


@Wrapper(adds="the server weights clients by their numbers of rows")
def by_rows(method: Method) -> Method:
    """Return the method with every mean over clients weighted by their rows.

        theta <- sum_k (n_k / n) theta_k      in place of the uniform mean

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
            _, after = plain.finish(work, message, own, rows)
            up, _ = plain.finish(work, message, own, torch.ones_like(rows))
            shares = {n: as_share(sent, n, "by_rows weights shares") for n, sent in up.items()}
            return {n: Share(s.value, rows * s.weight) for n, s in shares.items()}, after

        return replace(plain, finish=finish)

    server = averaging_server_of("by_rows", method)
    return replace(method, name=f"{method.name} by rows", client=client, server=server)


@Wrapper(
    call="(method, share=...)",
    adds="all clients train, and a random share of them is averaged",
)
def averaging_some(method: Method, *, share: float) -> Method:
    """Return the method with a random part of the clients in the server's mean.

        S <- each client with probability `share`, redrawn in each round
        theta <- the weighted mean of theta_k over k in S      (over all clients where S is empty)

    All clients train in every round; a `cohort` is something else: clients outside it rest. Shares
    that are a single number are only logged: they stay means over all clients of the round.

    Args:
        method: any method whose server averages its clients' copies of the global params.
        share: probability that a client is in the mean, in (0, 1]; S / N for S of N clients on
            average.

    Raises:
        ValueError: `share` is outside (0, 1].
        ProgramError: (at fit) the server does more than average.

    Source: Shi et al. 2023, arXiv:2310.09183, Algorithm 1, and T. Dinh et al. 2020,
    arXiv:2006.08848, Algorithm 1, where the server averages S of the N.
    """
    expect(share=(share, "(0, 1]"))

    def client(program: Program) -> Client:
        return _drawn(method.client(program), share)

    server = averaging_server_of("averaging_some", method)
    name = f"{method.name} averaging {share:g}"
    return wrapped(method, name, trait="leaves out", client=client, server=server)


def _drawn(plain: Client, share: float) -> Client:
    """Return a client that draws, with the key of its last step, whether it is averaged."""

    def start(message: Tree, own: Tree) -> WrappedState:
        return WrappedState(plain.start(message, own), torch.ones(()))

    def finish(work: WrappedState, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
        up, after = plain.finish(work.method, message, own, rows)
        shares = {n: as_share(s, n, "averaging_some weights shares") for n, s in up.items()}
        return {
            name: sent if is_logged(sent.value) else Share(sent.value, sent.weight * work.extra)
            for name, sent in shares.items()
        }, after

    def draw(work: WrappedState, message: Tree, batch: ClientBatch) -> WrappedState:
        key = noise.fold(batch.key[0], noise.word("averaged"))
        drawn = noise.uniforms(key, (), torch.get_default_dtype())
        return WrappedState(work.method, torch.where(drawn < share, 1.0, LEFT_OUT))

    phases = inside(plain.phases, draw)
    adapt = None if plain.adapt is None else inside(plain.adapt)
    return replace(plain, start=start, phases=phases, finish=finish, adapt=adapt)


@Wrapper(
    call="(method, beta=2.0)",
    adds='"+AM": the server moves `beta` times as far as the clients\' mean',
)
def over_relaxed(method: Method, beta: float = 2.0) -> Method:
    """Return the method with its server's step multiplied by beta.

        theta <- theta + beta (theta' - theta),      theta' the method's own next theta

    Args:
        method: any method whose server averages its clients' copies of the global params.
        beta: factor of the server's step; 1 is the method itself, 0 a server that never moves.
            Factors multiply where a method is wrapped twice.

    Raises:
        ValueError: `beta` is negative or not finite.
        ProgramError: (at fit) the server does more than average.

    Source: beta = 2 is the "+AM" of Shi et al. 2023, arXiv:2310.09183, appendix C.4.
    """
    expect(beta=(beta, "[0, inf)"))

    def server(program: Program) -> Server:
        plain = method.server(program)
        if plain.relaxed is not None:
            return plain.relaxed(beta)
        check_averages("over_relaxed", method, program, plain)
        return _relaxed(plain, beta)

    return wrapped(method, f"{method.name}+AM", server=server)


def _relaxed(server: Server, beta: float) -> Server:
    """Return a server that moves its state, a dict of tensors, beta times as far."""

    def update(state: Tree, means: dict[str, Tree], clock: Clock) -> Tree:
        return lerp(state, server.update(state, means, clock), beta)

    return replace(server, update=update, relaxed=lambda by: _relaxed(server, by * beta))


@Wrapper(
    call="(method, optimizer)",
    adds="FedOpt: the server's change is taken by an optimizer (FedAvgM, FedAdam)",
)
def server_optimized(method: Method, optimizer: Optimizer) -> Method:
    """Return the method with its server's change taken by an optimizer: FedOpt.

        theta <- theta + optimizer(theta - theta')      theta' the method's own next theta

    The mean change of the clients, negated, is taken for a gradient. SGD(1.0) is the method itself,
    SGD(lr, momentum) FedAvgM, Adam(lr) FedAdam. Params that the server does not send in a round,
    such as a head, are left as they are.

    Args:
        method: any method whose server averages its clients' copies of the global params.
        optimizer: of the server; its state is kept from round to round.

    Raises:
        ProgramError: (at fit) the server does more than average.

    Source: Reddi et al. 2021, arXiv:2003.00295, Algorithm 1.
    """
    change = partial(with_optimizer, optimizer=optimizer)
    server = averaging_server_of("server_optimized", method, change)
    return wrapped(method, f"{method.name}+opt", server=server)


def with_optimizer(plain: Server, optimizer: Optimizer) -> Server:
    """Return a server whose change is an optimizer's gradient; it keeps the optimizer's memory."""
    moved = tuple(plain.down(plain.state, Clock(0, 1)))

    def part(theta: Tree) -> Tree:
        return {name: theta[name] for name in moved}

    def update(state: WrappedState, means: dict[str, Tree], clock: Clock) -> WrappedState:
        before = part(state.method)
        change = sub(before, part(plain.update(state.method, means, clock)))
        new = step(optimizer, change, Stepped(before, state.extra))
        return WrappedState({**state.method, **new.params}, new.state)

    start = WrappedState(plain.state, optimizer.init(part(plain.state)))
    return Server(start, update, **within(plain))
