"""The contract of a method, and the few functions that methods are written with.

A client's functions are written for *one* client, in plain shapes: `start(message, own) -> work`,
phases of `step(work, message, batch) -> work`, `finish(work, message, own, rows) -> (up, own)`.
`message` is what the server sends, `own` the client state, kept from round to round, `work` the
working state of one round, and `up` the update that the client sends. The engine runs these
functions one client after another, or for a chunk of clients at once under `torch.vmap`; a node of
a real federation runs them as they are. They are pure: tensors in, tensors out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value

from hierfl.core.arguments import expect, expect_count, spelled
from hierfl.core.process import unpickled
from hierfl.core.trees import Tree, sizes, tree_map
from hierfl.data.batch import ClientBatch
from hierfl.program.program import Params, Program
from hierfl.program.sites import Family, Guide, Model


class Clock(NamedTuple):
    """When a server acts.

    round: from 0.
    rounds: how many are planned.
    clients: that take part in the round, 0 when clients adapt.
    left_out: positions in the data of clients that failed in the round (on_client_error="skip").
    """

    round: int
    rounds: int
    clients: int = 0
    left_out: tuple[int, ...] = ()


class Share(NamedTuple):
    """A client's term of a weighted mean.

    The server sees the cohort's sums of weight * value and of weight, and nothing else.
    """

    value: Tree
    weight: float | Tensor = 1.0


class LogShare(NamedTuple):
    """A share with the logarithm of its weight.

    Only ratios of weights count, so that weights as small as exp(-1e6) do not underflow. A cohort's
    sum holds the weighted mean, and the logs of the sums of weights and of squared weights; the
    effective number of clients, (sum of weights)^2 / sum of squares, is logged.
    """

    value: Tree
    log_weight: float | Tensor = 0.0


class Each(NamedTuple):
    """A client's value that the server sees individually, if `discloses` is "summaries"."""

    value: Tree


class Reports(NamedTuple):
    """What the server gets of `Each`."""

    value: Tree  # of C clients, C in front of every tensor
    ids: Tensor  # (C,) int64, their positions in the data


class Surprise(NamedTuple):
    """How N clients' updates compare with what the others' predict of them; NaN: not judged."""

    p: Tensor  # (N,) probability of an update as far out, if the client is like the others
    away: Tensor  # (N,) how far out it is, 1 as far as updates lie on average
    least_rows: int = 1  # of a client, with fewer of which p may be far off


Up = Mapping[str, Share | LogShare | Each]
Step = Callable[[Tree, Tree, ClientBatch], Tree]
Rows = Literal["all", "support", "query"]


@spelled
@dataclass(frozen=True)
class Phase:
    """Local steps of one kind.

    Args:
        step: (work, message, batch) -> work, on one mini-batch or on all rows.
        count: number of steps, or of epochs (`unit`), 0 or more.
        unit: "step": mini-batches from reshuffled passes over the rows; "epoch": whole passes,
            whose last mini-batch may be smaller.
        batch_size: rows of a mini-batch; None: all rows at each step.
        rows: those that the phase takes for all of the client's: "all"; or "support" or "query",
            halves of a split redrawn in each round: one row is in both, of an odd number the support
            has one more.
        scores_rows: the step evaluates the likelihood of its rows; otherwise at most the priors, so
            that any row will do.
        nested: the step takes derivatives of derivatives, which take minutes to compile:
            `Settings(compile="auto")` leaves the method eager.
        together: the step is given all clients that are carried at once, with C in front of every
            tensor of `work`, and their batch. Otherwise it is given one client.
        eager: inductor does not lower the step: `compile=True` leaves the method eager, and says so.
        turns: how often a step goes through its rows: its inner steps times its draws or points. A
            node's policy bounds these passes.
        alone: rows on which a step's result may rest: of a part of its mini-batch, or infinite if it
            adds up what all of them give. Default None: those of the smallest mini-batch.

    Raises:
        TypeError: `count`, `batch_size` or `turns` is not an integer.
        ValueError: `count` is negative, `batch_size` or `turns` is below 1, or `unit` is neither word.
    """

    step: Step
    count: int = 1
    unit: Literal["step", "epoch"] = "step"
    batch_size: int | None = None
    rows: Rows = "all"
    scores_rows: bool = True
    nested: bool = False
    together: bool = False
    eager: bool = False
    turns: int = 1
    alone: float | None = None

    def __post_init__(self) -> None:
        expect(unit=(self.unit, ("step", "epoch")))
        expect_count(self.count, f"the number of {self.unit}s of a phase", least=0)
        expect_count(self.turns, "turns")
        if self.batch_size is not None:
            expect_count(self.batch_size, "batch_size")

    def passes(self, rows: int) -> int:
        """Return how often a round of the phase goes through rows of a client with so many."""
        by_epoch = self.unit == "epoch" and self.batch_size is not None
        return self.turns * self.count * (-(-rows // (self.batch_size or rows)) if by_epoch else 1)

    def rows_of(self, rows: int) -> tuple[int, int]:
        """Return how many of a client's rows a step uses at least, and a round of the phase together.

        All where it reads none. A later step may undo what earlier ones did, as a strong pull does.
        """
        rows = rows if self.rows == "all" else max(1, rows // 2)
        if not (self.scores_rows and self.count) or self.batch_size is None:
            return rows, rows
        by_epoch, size = self.unit == "epoch", min(self.batch_size, rows)
        smallest = (rows % size or size) if by_epoch else size
        together = rows if by_epoch else min(rows, self.count * size)
        return int(min(rows, self.alone or smallest)), together


def _never(state: Tree) -> bool:
    return False


@spelled
@dataclass(frozen=True, eq=False)
class Client:
    """One round of one client.

    Args:
        own: client state before the first round, such as a named tuple (`{}`: the client is
            stateless).
        start: (message, own) -> work, the working state.
        phases: the local steps of a round.
        finish: (work, message, own, number of rows) -> (up, own): the update, all that leaves the
            client, and the new client state. A share that is a single number is logged.
        params: (message, own) -> the program's params, for the posterior and predictions.
        adapt: phases of a new client, with the global params fixed; None: `phases`.
        most_adapting: rounds of `adapt` after which another one changes nothing; None: each counts.
        like_rows: message -> whether to put clients of similar numbers of rows into one chunk: for
            steps that go through the rows so often that padded rows cost more than more chunks.
        seen: own -> (), above 0 once the client has been through a round; None: it is not known.
        new: message -> client state of a client that joins after the last round; None: `own`.
        settle: (last message, own, batch of all its rows) -> client state with what predictions
            need of the client's rows, when a run ends, before a score or a checkpoint, and after a
            new client's last round; nothing leaves the client. None: nothing to do.
        refuses: (message, the server's first one) -> why a message of a round cannot be this
            method's, or None; a node asks it. Default None: it must have the form of the first.
        rests_on: (message, own after the round, batch of all its rows) -> (C,) how many rows an
            update rests on. Default None: as many as the phases' batches hold.
        rowless: own -> whether draws need no rows, (), above 0; and the state by which `params` makes
            draws read none. Default None: draws may read rows.
        row_noise: the budget that each round spends (`summaries.row_noise.RowNoise`). Default None.
        mail: names of the fields, the outermost first, that lead to the part of the client state
            which the server writes, if the method has `Server.mail`. Default none.
        sums_by: a field of codes, of each of which sums over rows leave the client. Default none.
        keeps_rows: whether the client state holds rows, so that what is predicted tells of single ones.
    """

    own: Tree
    start: Callable[[Tree, Tree], Tree]
    phases: tuple[Phase, ...]
    finish: Callable[[Tree, Tree, Tree, Tensor], tuple[Up, Tree]]
    params: Callable[[Tree, Tree], Params] = lambda message, own: {**message, **own}
    adapt: tuple[Phase, ...] | None = None
    most_adapting: int | None = None
    like_rows: Callable[[Tree], bool] = _never
    seen: Callable[[Tree], Tensor] | None = None
    new: Callable[[Tree], Tree] | None = None
    settle: Callable[[Tree, Tree, ClientBatch], Tree] | None = None
    refuses: Callable[[Tree, Tree], str | None] | None = None
    rests_on: Callable[[Tree, Tree, ClientBatch], Tensor] | None = None
    rowless: Callable[[Tree], tuple[Tensor, Tree]] | None = None
    row_noise: Any = None
    mail: tuple[str, ...] = ()
    sums_by: str = ""
    keeps_rows: bool = False

    def __repr__(self) -> str:
        return f"Client(own {sizes(self.own)}; {len(self.phases)} phases)"

    def rows_of(self, rows: int) -> tuple[int, int]:
        """Return how many of its rows a client's steps use at least, and the phases together."""
        held = [phase.rows_of(rows) for phase in self.phases] or [(rows, rows)]
        alone, together = map(min, zip(*held, strict=True))
        return alone, together

    def mail_in(self, own: Tree) -> Tree:
        """Return the part of the client state that the server writes."""
        return reduce(getattr, self.mail, own)

    def with_mail(self, own: Tree, mail: Tree) -> Tree:
        """Return the client state with what the server writes."""
        for place in range(len(self.mail))[::-1]:
            outer = reduce(getattr, self.mail[:place], own)
            mail = outer._replace(**{self.mail[place]: mail})
        return mail


class WeightedDraws(NamedTuple):
    """Draws of the global sites that a server has weighted by the posterior itself."""

    k_hat: float  # of their weights
    effective: float  # number of draws
    draws: Tensor | None = None  # (S, K), unconstrained; None: they are not judged singly
    log_weights: Tensor | None = None  # (S,), normalized
    share: float = 1.0  # of the draws that would be effective with equal weights: of chains less
    # by how much a second set of draws differs, in posterior sds and as a log ratio of sds
    apart: float = 0.0
    error: float = 0.0  # sd of the error of their log weights, in nats


def _unjudged(state: Tree) -> None:
    return None


@spelled
@dataclass(frozen=True, eq=False)
class Server:
    """State, update and message of the server.

    Args:
        state: before the first round.
        update: (state, means, clock) -> state; `means` holds, by name, the cohort's weighted mean
            of each share, and the `Reports` of each `Each`.
        down: (state, clock) -> message, sent to every client of the cohort.
        final: (state, clock) -> message for the posterior, for predictions and for new clients;
            None: `down`.
        finished: state -> whether to stop before the last round.
        logged: state after a round -> scalars for its row of the history.
        relaxed: beta -> the same server with its step multiplied by beta; None:
            `methods.over_relaxed` multiplies it if the state is a dict of the global params, and
            refuses the method otherwise.
        mail: state -> what each client gets for itself, a tree with N clients in front, in the
            order of the data, in the part `Client.mail` of the client states, before the first round
            and after each; it needs `discloses="summaries"`. None: clients get the message alone.
        cohort_seed: clock -> the seed of a round's cohort, which nodes must not know; None: the run's.
        surprise: state after a round -> how surprising each client's update is given the others';
            None: it is too early, or unjudged. The history and a warning name those in conflict.
        wrong: (message, update of a client, its number of rows) -> what no honest client sends, by
            which a client at a node is left out of the round; or None.
        grows: names in the state, or in the last message, of tensors whose first dimension may change
            during a run.
        weighted: state after the last round -> the draws of its posterior, by which it is judged;
            None: they have no weights.
        usual_rounds: how many rounds a self-stopping method usually takes, to be shown before the
            first.
    """

    state: Tree
    update: Callable[[Tree, dict[str, Tree], Clock], Tree]
    down: Callable[[Tree, Clock], Tree] = lambda state, clock: state
    final: Callable[[Tree, Clock], Tree] | None = None
    finished: Callable[[Tree], bool] = _never
    logged: Callable[[Tree], dict[str, float]] = lambda state: {}
    relaxed: "Callable[[float], Server] | None" = None
    mail: Callable[[Tree], Tree] | None = None
    cohort_seed: Callable[[Clock], int] | None = None
    surprise: Callable[[Tree], Surprise | None] = _unjudged
    wrong: Callable[[Tree, Mapping[str, Any], int], str | None] | None = None
    grows: frozenset[str] = frozenset()
    weighted: Callable[[Tree], WeightedDraws | None] = _unjudged
    usual_rounds: int | None = None

    def __repr__(self) -> str:
        return f"Server(state {sizes(self.state)})"

    @property
    def stops_itself(self) -> bool:
        """Whether the method can end a run before its last round."""
        return self.finished is not _never

    def last(self, state: Tree, clock: Clock) -> Tree:
        """Return the message for the posterior, for predictions and for new clients."""
        return (self.final or self.down)(state, clock)


Trait = Literal[
    "gradients", "by rows", "leaves out", "rounded", "own statistics", "factors", "diagonal"
]


@unpickled("call its builder where it is needed, hierfl.methods.NAME(model)")
@spelled
@dataclass(frozen=True, eq=False)
class Method:
    """A federated method: a model, a guide, a client and a server.

    Args:
        name: shown in reports and messages.
        model: the generative program, a function of a `ClientBatch`.
        guide: a guide function, or a family from `hierfl.guides`.
        client: program -> Client; what it draws is a function of the run's seed, `program.seed`.
        server: program -> Server; likewise.
        everyone: whether every client must take part in every round; a smaller cohort is then
            refused.
        discloses: what the server has to see. "sums": only sums over clients, so that secure
            aggregation will do. "summaries": each client's own estimate and information matrix, as
            in a meta-analysis.
        most_rounds: the most rounds it takes before it stops automatically (`Server.finished`), 1
            or more: `fit(..., rounds=None)` allows so many. None: it never stops automatically.
        traits: what a wrapper around it must know; wrappers add their own. "gradients": clients
            send gradients, not copies. "by rows": its posterior needs a likelihood that is a
            product over rows. "leaves out": clients are left out of means by a draw that nodes
            know. "rounded": clients send rounded values. "own statistics": each client predicts
            with its own statistics of batch norm. "factors": clients send the change of a Gaussian
            factor that they keep; "diagonal": one without correlations.

    Raises:
        ValueError: `most_rounds` is below 1.
    """

    name: str
    model: Model
    guide: Guide | Family
    client: Callable[[Program], Client]
    server: Callable[[Program], Server]
    everyone: bool = False
    discloses: Literal["sums", "summaries"] = "sums"
    most_rounds: int | None = None
    traits: frozenset[Trait] = frozenset()

    def __post_init__(self) -> None:
        if self.most_rounds is not None:
            expect_count(self.most_rounds, "most_rounds")

    def __repr__(self) -> str:
        model, guide = (getattr(f, "__name__", type(f).__name__) for f in (self.model, self.guide))
        return f"Method({self.name}, model {model}, guide {guide})"


def slope(loss: Callable[[Tree], Tensor], params: Tree) -> tuple[Tree, Tensor]:
    """Return the gradient and the value of a loss, which is summed over clients if it is (C,)."""
    return grad_and_value(lambda p: loss(p).sum())(params)


def descend(loss: Callable[[Tree], Tensor], params: Tree, lr: float | Tensor) -> Tree:
    """Return params - lr * grad loss, one step of gradient descent."""
    gradient, _ = slope(loss, params)
    return tree_map(lambda p, g: p - lr * g, params, gradient)


def over_draws(
    loss: Callable[[ClientBatch], Tensor], batch: ClientBatch, draws: int, *, keyed: bool = True
) -> Tensor:
    """Return the mean of a loss over draws of its noise, vmapped where noise is `keyed`."""
    if draws == 1:
        return loss(batch)
    if not keyed:
        return torch.stack([loss(batch.redrawn(d)) for d in range(draws)]).mean(0)
    numbers = torch.arange(draws, dtype=torch.int32)
    return torch.vmap(lambda d: loss(batch.redrawn(d)))(numbers).mean(0)
