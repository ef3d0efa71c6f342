"""FedOpt: an optimizer at the server, for any method that averages.

    theta <- theta + optimizer(theta - theta')      theta' the method's own next theta

Source: Reddi et al. 2021, arXiv:2003.00295, Algorithm 1: the mean change of the clients, negated,
is taken for a gradient. SGD(1.0) is the method itself, SGD(lr, momentum) FedAvgM, Adam(lr) FedAdam.
"""

from __future__ import annotations

from hierfl.core.trees import Tree, sub
from hierfl.method import Clock, Method, Server
from hierfl.methods.about import Wrapper
from hierfl.methods.wrapping import check_averages, wrapped
from hierfl.optimizers import Optimizer, Stepped, step
from hierfl.program.program import Program


@Wrapper(
    call="(method, optimizer)",
    adds="FedOpt: the server's change is taken by an optimizer (FedAvgM, FedAdam)",
)
def server_optimized(method: Method, optimizer: Optimizer) -> Method:
    """Return the method with its server's change taken by an optimizer.

    Params that the server does not send in a round, such as a head, are left as they are.

    Args:
        method: any method whose server averages its clients' copies of the global params.
        optimizer: of the server; its state is kept from round to round.

    Raises:
        ProgramError: (at fit) the server does more than average.
    """

    def server(program: Program) -> Server:
        plain = method.server(program)
        fix = "set the options of its own server"
        check_averages("server_optimized", method, program, plain, fix)
        return with_optimizer(plain, optimizer)

    return wrapped(method, f"{method.name}+opt", server=server)


def with_optimizer(plain: Server, optimizer: Optimizer) -> Server:
    """Return a server of state `theta` and `memory`, whose change an optimizer takes for a gradient."""
    moved = tuple(plain.down(plain.state, Clock(0, 1)))

    def part(theta: Tree) -> Tree:
        return {name: theta[name] for name in moved}

    def update(state: Tree, means: dict[str, Tree], clock: Clock) -> Tree:
        before = part(state["theta"])
        change = sub(before, part(plain.update(state["theta"], means, clock)))
        new = step(optimizer, change, Stepped(before, state["memory"]))
        return {"theta": {**state["theta"], **new.params}, "memory": new.state}

    return Server(
        state={"theta": plain.state, "memory": optimizer.init(part(plain.state))},
        update=update,
        down=lambda state, clock: plain.down(state["theta"], clock),
        final=lambda state, clock: plain.last(state["theta"], clock),
        finished=lambda state: plain.finished(state["theta"]),
        logged=lambda state: plain.logged(state["theta"]),
    )
