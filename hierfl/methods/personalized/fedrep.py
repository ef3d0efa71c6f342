"""FedRep: a common body, and a head of each client's own; and FedPer, which moves both at once.

    client:  b <- theta, h <- its own last head, first the common start;
             for every mini-batch:  h <- h - lr grad_h nll(b, h)           with b fixed
             for every mini-batch:  b <- b - lr grad_b nll(b, h)           with h fixed
    server:  theta <- sum_k (n_k / n) b_k

Sources: Collins et al. 2021, arXiv:2102.07078, Algorithm 1; FedPer: Arivazhagan et al. 2019,
arXiv:1912.00818, Algorithms 1 and 2. Differences from the authors' code: each part has an optimizer
of its own (theirs keeps one with momentum, under which the frozen part moves on); there is no
weight decay (theirs is 1e-4); and no last round in which all clients refit their heads
(`fit.personalize` does so, from the common start). Nothing in it is Bayesian: the body is one point
for all clients and each head a point under a flat prior, so that heads do not borrow strength; the
guide is `delta`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hierfl.core.arguments import NameRule, names_by_rule
from hierfl.core.trees import Tree
from hierfl.data.batch import ClientBatch
from hierfl.guides.delta import delta
from hierfl.method import Client, Method, Phase, Server, Share, Step, Up, slope
from hierfl.methods.about import About
from hierfl.methods.parts.averaging import (
    OwnParams,
    TwoLevels,
    averaging_server,
    personal_client,
)
from hierfl.optimizers import SGD, Optimizer, Stepped, step
from hierfl.program.program import Params, Program, ProgramError
from hierfl.program.sites import Model

Part = Literal["theta", "phi"]  # the body, and the head
Optimizers = Mapping[Part, Optimizer]


@dataclass(frozen=True, eq=False)
class BodyAndHead:
    """The two parts of a program's params, at their starting values."""

    body: Params  # global params
    head: Params  # of one client
    in_program: bool  # whether the program declares the head inside the clients plate

    def first_head(self, message: Params) -> Params:
        """Return every client's first head: the server's, if the message holds it."""
        here = torch.zeros(()).device  # where the clients work
        return {n: message[n] if n in message else v.to(here) for n, v in self.head.items()}

    def work(
        self, message: Params, head: Params, optimizers: Optimizers, beside: Tree = ()
    ) -> TwoLevels:
        """Return the working state of a round."""

        def begun(part: Part, at: Params) -> Stepped:
            return Stepped(at, optimizers[part].init(at) if part in optimizers else {})

        body = {name: message[name] for name in self.body}
        none = torch.zeros(())
        return TwoLevels(begun("theta", body), begun("phi", head), none, beside)

    def sent(self, work: TwoLevels, weight: float | Tensor) -> dict[str, Share]:
        """Return a client's update: its body, if any, and the loss of its last step."""
        body = {"theta": Share(work.theta.params, weight)} if self.body else {}
        return {**body, "loss": Share(work.loss, weight)}

    def finished(
        self, work: TwoLevels, message: Tree, own: OwnParams, rows: Tensor
    ) -> tuple[Up, OwnParams]:
        """Return the update, weighted by rows, and the head, which is kept."""
        return self.sent(work, rows), OwnParams(work.phi.params, torch.ones(()))

    def client(
        self,
        start: Callable[[Params, OwnParams], TwoLevels],
        phases: tuple[Phase, ...],
        adapt: tuple[Phase, ...],
    ) -> Client:
        """Return a client that keeps its head, at first the common start."""
        return personal_client(
            OwnParams(self.head, torch.zeros(())),
            lambda message, own: own._replace(params=self.first_head(message)),
            start=start,
            phases=phases,
            finish=self.finished,
            params=lambda message, own: {**message, **own.params},
            adapt=adapt,
        )

    def server(self) -> Server:
        """Return the server that averages the bodies."""
        start = self.body if self.in_program else {**self.body, **self.head}
        return averaging_server(
            start,
            lambda body, means: means["theta"] if self.body else body,
            sent=None if self.in_program else tuple(self.body),
        )


def body_and_head(program: Program, head: NameRule | None, method: str) -> BodyAndHead:
    """Split the params of a program without latent sites; `head` is as in `fedrep`."""
    above, mine = program.start()
    if program.latents.sites:
        raise ProgramError(
            f"{method} fits params only, and this model has latent sites: use models.network, or fedsvi"
        )
    if mine and head is not None:
        raise ProgramError(
            f"head is given, and the model has params of each client ({', '.join(mine)}), which "
            f"are the head of {method}: leave head out"
        )
    if mine:
        return BodyAndHead(above, mine, in_program=True)
    if head is None:
        raise ProgramError(
            f"{method} needs a head, and all params of this model are global: give head=, a rule "
            f"that chooses some of {', '.join(above)}"
        )
    own = names_by_rule(list(above), head, option="head", of="the model's params")
    if len(own) == len(above) and head != "all":
        raise ProgramError(
            f"head: the rule matches every param ({', '.join(above)}), which leaves {method} no "
            'body: choose fewer, or say head="all"'
        )
    if not own and head != "none":
        raise ProgramError('head is empty: name a prefix of some param, or say head="none"')
    body = {name: value for name, value in above.items() if name not in own}
    mine = {name: value for name, value in above.items() if name in own}
    return BodyAndHead(body, mine, in_program=False)


def body_below(program: Program, head: NameRule | None, method: str) -> BodyAndHead:
    """Split params, for methods whose clients have nothing to send without a body."""
    split = body_and_head(program, head, method)
    if not split.body:
        raise ProgramError(
            f"{method} has nothing to learn together, as every param is in the head: choose a "
            "smaller head, or use local_only"
        )
    return split


def moving(program: Program, optimizers: Optimizers) -> Step:
    """Return a step on the parts that have an optimizer, with the others fixed."""

    def move(work: TwoLevels, message: Tree, batch: ClientBatch) -> TwoLevels:
        def loss(params: Mapping[Part, Params]) -> Tensor:
            body = params.get("theta", work.theta.params)
            return program.mean_loss({**body, **params.get("phi", work.phi.params)}, batch)

        before: dict[Part, Stepped] = {part: getattr(work, part) for part in optimizers}
        gradient, value = slope(loss, {part: at.params for part, at in before.items()})
        moved = {p: step(opt, gradient[p], before[p]) for p, opt in optimizers.items()}
        return work._replace(loss=value, **moved)

    return move


@About(
    infers="a common body, and a head for each client; FedPer with `joint=True`",
    source="Collins et al. 2021, arXiv:2102.07078; FedPer: Arivazhagan et al. 2019",
    common="a body",
    own="a head",
    kept="its head",
    new="fits a head",
    down="the body",
    up="`theta`*: its copy of it after training; `loss`*",
)
def fedrep(
    model: Model,
    *,
    head: NameRule | None = None,
    optimizer: Optimizer = SGD(0.01, 0.5),  # noqa: B008 (frozen)
    head_steps: int = 10,
    body_steps: int = 1,
    unit: Literal["step", "epoch"] = "epoch",
    batch_size: int | None = 10,
    joint: bool = False,
) -> Method:
    r"""Return FedRep of a program without latent sites, such as `hierfl.models.network`.

    Args:
        model: its params are all global, or the local ones are the head; the loss is the mean
            negative log likelihood of a row.
        head: which global params are the head, by the names in the program: a regular expression
            such as r"^theta\.4\.", a sequence of prefixes or a predicate; "none" is FedAvg, "all"
            each client alone. None where the model declares params inside `batch.clients()`: they
            are the head.
        optimizer: of either part, restarted in each round. Defaults: the authors' for CIFAR-10.
        head_steps: passes over the rows on the head, or mini-batches (`unit`); a new client takes
            these alone.
        body_steps: the same on the body.
        unit: "epoch" or "step".
        batch_size: rows of a mini-batch; None: all.
        joint: body and head move at once, `body_steps` times: FedPer.

    Raises:
        ValueError: (at fit) `head` matches no param.
        ProgramError: (at fit) `head` matches every param, is missing, or is given though the model
            has local params; or the model has latent sites.
    """
    name = "fedper" if joint else "fedrep"

    def client(program: Program) -> Client:
        split = body_and_head(program, head, name)
        optimizers: Optimizers = {"theta": optimizer, "phi": optimizer}

        on_head = Phase(moving(program, {"phi": optimizer}), head_steps, unit, batch_size)
        on_body = Phase(moving(program, {"theta": optimizer}), body_steps, unit, batch_size)
        on_all = Phase(moving(program, optimizers), body_steps, unit, batch_size)
        tuned = (on_head,) if split.head and head_steps else ()
        trained = (on_body,) if split.body and body_steps else ()
        return split.client(
            lambda message, own: split.work(message, own.params, optimizers),
            # a phase without steps is left out: mini-batches stay those of methods without it
            (on_all,) if joint else (*tuned, *trained),
            tuned,
        )

    def server(program: Program) -> Server:
        return body_and_head(program, head, name).server()

    return Method(name, model, delta, client, server)
