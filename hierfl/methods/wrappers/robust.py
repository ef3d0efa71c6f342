"""Robust means that a few wrong clients cannot move far, for any averaging method.

    v_k      what client k sends; f <= tolerated * C clients may send anything
    median   coordinate by coordinate, the median of v_k over the C clients
    trimmed  coordinate by coordinate, the mean without the f largest and the f smallest
    krum     the mean of the C - f updates whose C - f - 2 nearest neighbors are nearest
    clipped  m + mean_k min(1, r / |v_k - m|) (v_k - m),    m the medians, r the median |v_k - m|

Sources: Yin et al. 2018, arXiv:1803.01498, Definitions 1 and 2 (median, trimmed); Blanchard et al.
2017, arXiv:1703.02757, section 4 (Multi-Krum); Karimireddy et al. 2021, arXiv:2012.10333, section 4
(clipped, there about the last mean, here about the medians). Nothing in them is Bayesian: of a
posterior's mean they make a robust estimate with no known standard deviation.
"""

from dataclasses import replace
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from hierfl.core.arguments import expect
from hierfl.core.trees import Tree, add, tree_leaves, tree_map
from hierfl.method import Client, Clock, Each, Method, Reports, Server, Share, Up
from hierfl.methods.about import Wrapper
from hierfl.methods.parts.stacked import distances, flat, mixed
from hierfl.methods.wrappers.wrapping import as_share, check_takes_means, is_logged
from hierfl.program.program import Program, ProgramError

Rule = Literal["median", "trimmed", "krum", "clipped"]
RULES: tuple[Rule, ...] = get_args(Rule)
LEAST = 1e-9  # a weight below it says that a client is left out, as by averaging_some


@Wrapper(
    call="(method, rule=)",
    adds="the server takes a mean that a few wrong clients cannot move far: medians, trimmed means, Krum, clipping",
)
def robust(method: Method, *, rule: Rule = "trimmed", tolerated: float = 0.2) -> Method:
    """Return the method with a robust mean in place of the server's weighted mean.

    Every client counts as one, whatever its number of rows: a weight sent by a client may be wrong
    too. Scalar shares are only logged, and stay means. The server has to see each client's update,
    so that the method discloses summaries. Updates that are not finite are refused before
    (`Settings(on_client_error="skip")` leaves their clients out).

    Args:
        method: any method whose server averages its clients' copies of the global params; or
            fedsvi, whose server takes the mean of their gradients.
        rule: "median", "trimmed", "krum" or "clipped". The default loses least where all clients
            are honest.
        tolerated: share of a round's clients that may be wrong, in [0, 0.5); of "trimmed" and
            "krum". Default: 0.2, hierfl's own choice. "median" and "clipped" tolerate less than
            half.

    Raises:
        ValueError: `rule` is none of the four, or `tolerated` is outside [0, 0.5).
        ProgramError: (at fit) the server does more than average (scaffold); it sums factors of all
            clients (pvi, bfi, fedep, fedlaplace); or it needs summaries itself (two_stage, fedamp).
            (In a round) a client sends a share of weight 0 (averaging_some); or there are too few
            clients for "krum".
    """
    expect(rule=(rule, RULES), tolerated=(tolerated, "[0, 0.5)"))

    def client(program: Program) -> Client:
        plain = method.client(program)

        def finish(work: Tree, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
            up, after = plain.finish(work, message, own, rows)
            return {name: _by_itself(name, share) for name, share in up.items()}, after

        return replace(plain, finish=finish)

    def server(program: Program) -> Server:
        plain = method.server(program)
        check_takes_means("robust", method, program, plain)

        def update(state: Tree, means: dict[str, Tree], clock: Clock) -> Tree:
            sent = {
                k: _checked(k, reports)
                for k, reports in means.items()
                if isinstance(reports, Reports)
            }
            robust_means = cast(dict[str, Tree], _mean(rule, tolerated, sent))
            return plain.update(state, {**means, **robust_means}, clock)

        return replace(plain, update=update)

    name = f"{method.name} {rule}"
    return replace(method, name=name, client=client, server=server, discloses="summaries")


def _by_itself(name: str, sent: object) -> Share | Each:
    share = as_share(sent, name, "robust takes the place of means")
    if is_logged(share.value):
        return share
    return Each({"value": share.value, "weight": torch.as_tensor(share.weight)})


def _checked(name: str, reports: Reports) -> Tree:
    weight = reports.value["weight"]
    if weight.dim() != 1 or not bool((weight > LEAST).all()):
        raise ProgramError(
            f"robust counts every client as one, and some have nothing to say of {name}, with "
            "weight 0: wrap another method, such as fedavg"
        )
    return reports.value["value"]


def _mean(rule: Rule, tolerated: float, values: Tree) -> Tree:
    count = len(tree_leaves(values)[0])
    wrong = int(tolerated * count + 1e-9)  # 29 of 100 at 0.29, which is less in binary
    if rule == "median":
        return tree_map(_median, values)
    if rule == "trimmed":
        return tree_map(lambda v: v.sort(0).values[wrong : count - wrong].mean(0), values)
    if rule == "krum":
        chosen = _nearest(values, wrong)
        return tree_map(lambda v: v[chosen].mean(0), values)
    middle = tree_map(_median, values)
    away = tree_map(lambda v, m: v - m, values, middle)
    distance = flat(away).double().norm(dim=1)
    factor = (_median(distance) / distance.clamp(min=1e-30)).clamp(max=1.0)
    return add(middle, mixed(factor / count, away))


def _median(values: Tensor) -> Tensor:
    """Return the median over the first dimension, the mean of the middle two if even."""
    ordered, count = values.sort(0).values, len(values)
    return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2.0


def _nearest(values: Tree, wrong: int) -> Tensor:
    vectors = flat(values).double()
    count = len(vectors)
    if count < 2 * wrong + 3:
        raise ProgramError(
            f"Krum with {wrong} wrong clients needs {2 * wrong + 3} in a round, and there are "
            f"{count}: use a larger cohort, a smaller `tolerated`, or rule='median'"
        )
    # the first is the client itself
    near = distances(vectors).sort(1).values[:, 1 : count - wrong - 1]
    return near.sum(1).argsort(stable=True)[: count - wrong].sort().values
