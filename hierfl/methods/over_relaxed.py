"""Over-relaxation of any averaging method, "+AM": the server's step is multiplied by beta.

    theta <- theta + beta (theta' - theta),      theta' the method's own next theta

Source: beta = 2 is the "+AM" of Shi et al. 2023, arXiv:2310.09183, appendix C.4.
"""

from __future__ import annotations

import math
from dataclasses import replace

from hierfl.core.trees import Tree, lerp
from hierfl.method import Clock, Method, Server
from hierfl.methods.about import Wrapper
from hierfl.methods.wrapping import check_averages, wrapped
from hierfl.program.program import Program


@Wrapper(
    call="(method, beta=2.0)",
    adds='"+AM": the server moves `beta` times as far as the clients\' mean',
)
def over_relaxed(method: Method, beta: float = 2.0) -> Method:
    """Return the method with its server's step multiplied by beta.

    Args:
        method: any method whose server averages its clients' copies of the global params.
        beta: factor of the server's step; 1 is the method itself, 0 a server that never moves.
            Factors multiply where a method is wrapped twice.

    Raises:
        ValueError: `beta` is negative or not finite.
        ProgramError: (at fit) the server does more than average.
    """
    if not (math.isfinite(beta) and beta >= 0.0):
        raise ValueError(f"beta is {beta}: it must be finite, 0 or more")

    def server(program: Program) -> Server:
        plain = method.server(program)
        if plain.relaxed is not None:
            return plain.relaxed(beta)
        fix = "give the optimizer of its server a larger step size, if it has one"
        check_averages("over_relaxed", method, program, plain, fix)
        return _relaxed(plain, beta)

    return wrapped(method, f"{method.name}+AM", server=server)


def _relaxed(server: Server, beta: float) -> Server:
    """Return a server that moves its state, a dict of tensors, beta times as far."""

    def update(state: Tree, means: dict[str, Tree], clock: Clock) -> Tree:
        return lerp(state, server.update(state, means, clock), beta)

    return replace(server, update=update, relaxed=lambda by: _relaxed(server, by * beta))
