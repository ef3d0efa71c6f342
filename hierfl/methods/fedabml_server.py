"""FedABML's server: the clients' copies of the prior averaged, or the prior that fits their posteriors best."""

from __future__ import annotations

from hierfl.core.trees import Tree
from hierfl.method import Server
from hierfl.methods.averaging_server import averaging_server
from hierfl.methods.prior_params import moments_of
from hierfl.program.program import Params, Program


def abml_server(program: Program, *, exact: bool) -> Server:
    """The server of one program.

    Args:
        program: the program.
        exact: means of `moments` come in, else of `theta`.
    """
    if not exact:
        return averaging_server(program.start()[0])
    moments = moments_of(program)

    def best(theta: Params, means: dict[str, Tree]) -> Params:
        return moments.best(theta, means["moments"])

    return averaging_server(program.start()[0], best)
