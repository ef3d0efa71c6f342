"""Updates quantized to 8 or 16 bits, with error feedback, for any averaging method.

    p_k = v_k - v + e_k      v_k what client k would send, v the same before its first step
    sent: C(p_k)             C(p) = s round(p / s),  s = max |p| / (2^(bits - 1) - 1) per tensor
    e_k <- p_k - C(p_k)      at first 0
    server: v + the weighted mean of C(p_k), in place of the weighted mean of v_k

Sources: Karimireddy et al. 2019, arXiv:1901.09847, Algorithm 2 (EF-SGD); Seide et al. 2014,
Interspeech, section 3. The compressor is ours.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from hierfl.core.arguments import expect
from hierfl.core.trees import (
    DTYPES,
    Tree,
    add,
    has_rounded,
    restored,
    rounded,
    sub,
    tree_leaves,
    zeros_like,
)
from hierfl.method import Client, Clock, Method, Server, Share, Up
from hierfl.methods.about import Wrapper
from hierfl.methods.wrappers.wrapping import beside, check_takes_means, is_logged, wrapped
from hierfl.program.program import Params, Program, ProgramError


@Wrapper(
    call="(method, bits=8)",
    adds="updates are sent in 8 or 16 bits per scalar, and rounding errors are sent later",
)
def quantized(method: Method, *, bits: Literal[8, 16] = 8, feedback: bool = True) -> Method:
    """Return the method with its clients' updates sent as integers of few bits.

    A client sends how far its steps moved what it would send, rounded, with one scale for each
    tensor. It keeps what rounding lost, and adds it to the next round's. Shares that are a single
    number stay as they are, and so does what the server sends. Each client keeps as many more
    scalars as it sends.

    Rounding is the same on every engine. Where the float noise of two engines puts a number on
    either side of a half, their updates differ by one step of the scale, which the next rounds make
    good.

    Args:
        method: any method whose server averages its clients' copies of the global params; or
            fedsvi, whose server takes the mean of their gradients.
        bits: of a number, 8 or 16. Default: 8, a quarter of the bytes of single precision.
        feedback: keep what rounding lost; False: it is lost for good, and the fit ends further from
            that of the method itself.

    Raises:
        ValueError: `bits` is neither 8 nor 16.
        ProgramError: (at fit) the server does more than average (scaffold); it sums factors of all
            clients (pvi, bfi, fedep, fedlaplace); it needs summaries (two_stage, fedamp, robust);
            or a client sends something else than copies of the global params (fedabml with
            server="exact").
    """
    expect(bits=(bits, DTYPES))

    def parts(program: Program) -> tuple[Client, Server]:
        plain = method.server(program)
        check_takes_means("quantized", method, program, plain)
        return method.client(program), plain

    def client(program: Program) -> Client:
        plain, plain_server = parts(program)
        up = _up(plain, plain_server.down(plain_server.state, Clock(0, 1)))
        _check_copies(method.name, up, program.start()[0])
        return _rounding(plain, zeros_like(_values(up)), bits, feedback=feedback)

    def server(program: Program) -> Server:
        plain, plain_server = parts(program)
        return _adding(plain_server, plain)

    name = f"{method.name} {bits} bits"
    return wrapped(method, name, trait="rounded", client=client, server=server)


def _up(client: Client, message: Tree) -> Up:
    """Return what a new client would send without a step; clients and server both know it."""
    up, _ = client.finish(client.start(message, client.own), message, client.own, torch.ones(()))
    return up


def _values(up: Up) -> dict[str, Tree]:
    """Return the values that are rounded, by share: all but scalars, which are logged."""
    return {name: share.value for name, share in up.items() if not is_logged(share.value)}


def _check_copies(name: str, up: Up, params: Params) -> None:
    """Refuse a client that sends something else than values of the global params."""
    for share, value in _values(up).items():
        if has_rounded(value):
            raise ProgramError(f"'{name}' is in few bits already: wrap the method once")
        if not (isinstance(up[share], Share) and _are_params(value, params)):
            raise ProgramError(
                f"quantized rounds copies of the global params, and '{name}' sends {share}, which "
                "is none: wrap a method whose clients send copies, such as fedavg"
            )


def _are_params(value: Tree, params: Params) -> bool:
    return isinstance(value, Mapping) and all(
        name in params and v.shape == params[name].shape for name, v in value.items()
    )


def _sent(
    plain: Client, message: Tree, up: Up, unsent: dict[str, Tree], bits: int
) -> tuple[Up, Tree]:
    """Return an update with its shares rounded, and what rounding lost."""
    sent, lost = dict(up), {}
    for name, before in _values(_up(plain, message)).items():
        change = sub(up[name].value, before)
        whole = add(change, unsent[name]) if unsent else change
        value = rounded(whole, bits)
        sent[name] = up[name]._replace(value=value)
        lost[name] = sub(whole, restored(value))
    return sent, lost


def _rounding(plain: Client, nothing: dict[str, Tree], bits: int, *, feedback: bool) -> Client:
    """Return a client that rounds what it sends; with feedback it keeps what rounding lost."""
    whole = beside(plain, nothing) if feedback else plain

    def finish(work: Tree, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
        up, after = whole.finish(work, message, own, rows)
        up, lost = _sent(plain, message, up, own.extra if feedback else {}, bits)
        return up, after._replace(extra=lost) if feedback else after

    # a client without a state of its own has nothing to infer from its rows
    adapt = () if feedback and not tree_leaves(plain.own) else plain.adapt
    return replace(whole, finish=finish, adapt=adapt)


def _adding(plain: Server, client: Client) -> Server:
    """Return a server that adds the mean change to what clients would send without a step."""

    def update(state: Tree, means: dict[str, Tree], clock: Clock) -> Tree:
        before = _values(_up(client, plain.down(state, clock)))
        copies = {name: add(value, means[name]) for name, value in before.items()}
        return plain.update(state, {**means, **copies}, clock)

    relaxed = plain.relaxed
    return replace(
        plain,
        update=update,
        relaxed=None if relaxed is None else lambda beta: _adding(relaxed(beta), client),
    )
