"""CPU seconds of programs with a label of each row, beside the same programs summed out by hand.

python -m benchmarks.zoo.label_cost
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

import hierfl
from hierfl import guides
from hierfl.core.process import double_precision
from hierfl.data.batch import full_batch
from hierfl.program.handlers import log_joint, unchecked
from hierfl.program.read import read

CLIENTS, ROWS = 8, 50
POINTS, REPEATS = 64, 20  # at which densities are evaluated together, and how often
PAIRS = 9  # of both forms by turns; the fastest of each counts, since other work only adds to it


def data() -> hierfl.ClientData:
    """Return numbers of two kinds, and counts of which some are 0 at any rate."""
    rng = np.random.default_rng(0)
    count = CLIENTS * ROWS
    kind = rng.random(count) < 0.4
    y = np.where(kind, 3.0, 0.0) + 0.8 * rng.standard_normal(count)
    n = np.where(rng.random(count) < 0.3, 0, rng.poisson(2.0, count))
    columns: dict[str, Any] = {"y": y.astype("float32"), "n": n.astype("float32")}
    return hierfl.ClientData.from_arrays(np.arange(count) % CLIENTS, **columns)


def shared() -> tuple[Tensor, Tensor, Tensor]:
    """Sample what both programs have: a share, a location and a positive number."""
    share = pyro.sample("share", dist.Beta(2.0, 2.0))
    low = pyro.sample("low", dist.Normal(0.0, 1.0))
    return share, low, pyro.sample("size", dist.LogNormal(0.0, 1.0))


def mixture(batch: Any, *, by_hand: bool) -> None:
    """Two kinds of rows."""
    share, low, step = shared()
    with batch.clients():
        own = pyro.sample("own", dist.Normal(low, 0.5))
        with batch.data():
            if not by_hand:
                kind = pyro.sample("kind", dist.Bernoulli(share))
                pyro.sample("y", dist.Normal(own + step * kind, 0.8), obs=batch.y)
                return
            first = torch.log1p(-share) + dist.Normal(own, 0.8).log_prob(batch.y)
            second = share.log() + dist.Normal(own + step, 0.8).log_prob(batch.y)
            pyro.factor("y", torch.logaddexp(first, second))


def zeros(batch: Any, *, by_hand: bool) -> None:
    """Counts of which some are 0 at any rate."""
    share, low, _ = shared()
    with batch.clients():
        own = pyro.sample("own", dist.Normal(low, 0.5))
        with batch.data():
            if not by_hand:
                is_open = pyro.sample("is_open", dist.Bernoulli(share))
                pyro.sample("n", dist.Poisson(is_open * own.exp()), obs=batch.n)
                return
            counted = share.log() + dist.Poisson(own.exp()).log_prob(batch.n)
            closed = torch.log1p(-share).expand_as(counted)
            pyro.factor("n", torch.where(batch.n > 0, counted, torch.logaddexp(counted, closed)))


PROGRAMS: dict[str, Callable[..., None]] = {"mixture": mixture, "zeros": zeros}


def seconds_of_gradients(model: Callable[[Any], None], rows: hierfl.ClientData) -> float:
    """Return the CPU seconds of gradients of a program's log density at many points."""
    program, batch = read(model, guides.delta, rows), full_batch(rows, torch.arange(CLIENTS))

    def total(point: Tensor) -> Tensor:
        own = point[3].expand(CLIENTS, 1)
        values = {"share": point[0].sigmoid(), "low": point[1], "size": point[2].exp(), "own": own}
        log: Tensor = log_joint(program.model, values, batch, {})[0].sum()
        return log

    gradient = torch.func.vmap(torch.func.grad(total))
    with unchecked(), double_precision():
        at = 0.1 * torch.randn(POINTS, 4)
        gradient(at)
        began = time.process_time()
        for _ in range(REPEATS):
            gradient(at)
        return time.process_time() - began


def seconds_of_fit(model: Callable[[Any], None], rows: hierfl.ClientData) -> float:
    """Return the CPU seconds of a fit."""
    began = time.process_time()
    hierfl.fit(model, rows, seed=0, progress=False)
    return time.process_time() - began


def main(argv: Sequence[str] | None = None) -> None:
    """Print the seconds of both forms of each program, and their ratio."""
    argparse.ArgumentParser(prog="python -m benchmarks.zoo.label_cost").parse_args(argv)
    torch.set_num_threads(1)
    rows = data()
    for name, program in PROGRAMS.items():
        forms = [lambda batch, h=h, p=program: p(batch, by_hand=h) for h in (True, False)]
        seconds_of_fit(forms[0], rows)  # imports
        for what, measure in (("gradients", seconds_of_gradients), ("fit", seconds_of_fit)):
            turns = ([measure(form, rows) for form in forms] for _ in range(PAIRS))
            by_hand, enumerated = map(min, zip(*turns, strict=True))
            ratio = enumerated / by_hand
            print(
                f"{name}, {what}: {by_hand:.2f} s by hand, {enumerated:.2f} s with labels, {ratio:.2f}"
            )


if __name__ == "__main__":
    main()
