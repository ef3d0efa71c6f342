"""FedABML's server: the clients' copies of the prior averaged, or the prior that fits their posteriors best."""

from __future__ import annotations

from hierfl.core.trees import Tree, lerp
from hierfl.method import Clock, Server
from hierfl.methods.prior_params import moments_of
from hierfl.program.program import Program


def abml_server(program: Program, *, exact: bool, beta: float) -> Server:
    """The server of one program.

    Args:
        program: the program.
        exact: means of `moments` come in, else of `theta`.
        beta: over-relaxation.
    """
    moments = moments_of(program) if exact else None

    def update(theta: Tree, means: dict[str, Tree], clock: Clock) -> Tree:
        return lerp(
            theta,
            means["theta"] if moments is None else moments.best(theta, means["moments"]),
            beta,
        )

    return Server(program.start()[0], update)
