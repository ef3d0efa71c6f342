"""The check that a program is a function of its params, rows and noise keys alone."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from pyro import poutine
from torch import Tensor

from hierfl.data.batch import ClientBatch
from hierfl.program.check_boundary import leaves, named
from hierfl.program.handlers import Answer, untouched_store
from hierfl.program.program import Program, ProgramError
from hierfl.program.traces import Site, samples

PYTHON = "Python's global generator (random)"
TORCH = "torch's global generator (torch.randn, torch.bernoulli, dropout, ...)"
# a seed that no model sets itself: a generator seeded and drawn from has moved too
UNUSUAL = 1_618_033_988


def _as_bytes(state: Any) -> bytes:
    return state.numpy().tobytes() if isinstance(state, Tensor) else pickle.dumps(state)


class Generator(NamedTuple):
    """How a global generator is seeded, read and restored."""

    seed: Callable[[int], object]
    state: Callable[[], Any]
    restore: Callable[[Any], object]


GENERATORS: Mapping[str, Generator] = {
    "NumPy's global generator (np.random)": Generator(
        np.random.seed,
        np.random.get_state,
        np.random.set_state,
    ),
    PYTHON: Generator(random.seed, random.getstate, random.setstate),
    TORCH: Generator(torch.manual_seed, torch.random.get_rng_state, torch.random.set_rng_state),
}


@contextmanager
def _drawn_here() -> Iterator[list[str]]:
    """Note this thread's calls of Python's global generator; other threads draw too."""
    found: list[str] = []

    def note(frame: object, event: str, called: Any) -> None:
        if event == "c_call" and getattr(called, "__self__", None) is random.random.__self__:  # type: ignore[attr-defined]
            found.append(called.__name__)

    if sys.getprofile() is not None:  # a profiler is at work, and there can be one only
        yield ["unknown"]
        return
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


@contextmanager
def no_global_draws(what: str, *, starts: bool = False) -> Iterator[None]:
    """Refuse a model or guide that moves a global generator in this context; restore all."""
    watched = {name: g for name, g in GENERATORS.items() if not (starts and name == TORCH)}
    with ExitStack() as stack:
        before = {}
        for name, generator in watched.items():
            stack.callback(generator.restore, generator.state())
            generator.seed(UNUSUAL)
            before[name] = _as_bytes(generator.state())
        with _drawn_here() as drawn:
            yield
        moved = [name for name, g in watched.items() if _as_bytes(g.state()) != before[name]]
    if moved == [PYTHON] and not drawn:
        moved = []
    if moved:
        raise ProgramError(
            f"the {what} draws from {moved[0]}, which no seed of hierfl sets and whose draws "
            "differ between engines: draw with pyro.sample; the start of a param is drawn by a "
            "function, pyro.param(name, lambda: torch.randn(3))"
        )


def check_pure(program: Program, batch: ClientBatch) -> None:
    """Refuse a program with its own noise, state or weights, by running it twice."""
    shared, own = program.start()
    params = {**shared, **own}
    with torch.enable_grad():
        first, second = _traces(program, params, batch), _traces(program, params, batch)
        for what, trace in first.items():
            again = dict(samples(second[what]))
            for name, site in samples(trace):
                _check_site(name, what, site, again.get(name), program)


def _traces(program: Program, params: Mapping[str, Tensor], batch: ClientBatch) -> dict[str, Any]:
    """Trace guide and model once, with params and keys that are given."""
    with untouched_store(), Answer(params, batch):
        with no_global_draws("guide"):
            guided = poutine.trace(program.guide).get_trace(batch)
        with no_global_draws("model"):
            modeled = poutine.trace(poutine.replay(program.model, guided)).get_trace(batch)
    return {"guide": guided, "model": modeled}


def _tensors(site: Site) -> Iterator[Tensor]:
    """Yield the value of a site and its log density, where it has one."""
    if isinstance(site["value"], Tensor):
        yield site["value"]
    try:
        density = site["fn"].log_prob(site["value"])
    except (NotImplementedError, ValueError, RuntimeError, AssertionError):
        return  # other checks say so
    if isinstance(density, Tensor):
        yield density


def _check_site(name: str, what: str, site: Site, again: Site | None, program: Program) -> None:
    """Refuse a site that differs between two equal runs, or needs a gradient that is no param's."""
    first, second = list(_tensors(site)), [] if again is None else list(_tensors(again))
    if len(first) != len(second) or not all(map(_equal, first, second)):
        raise ProgramError(
            f"site '{name}' of the {what} differs between two runs with the same params, rows and "
            f"noise, so the {what} has a generator (np.random.default_rng, torch.Generator) or another "
            "state of its own: draw with pyro.sample, and compute the site from rows, params and "
            "other sites alone"
        )
    leaf = next((leaf for tensor in first for leaf in leaves(tensor)), None)
    if leaf is not None:
        raise ProgramError(
            f"site '{name}' of the {what} depends on {named(leaf, program.model, program.guide)}, "
            "which requires a gradient and is no param, so that no method learns it: register it "
            "(pyro.module('net', net), pyro.param), or freeze it on purpose with requires_grad_(False)"
        )


def _equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal up to rounding, which memory alignment may change."""
    a, b = a.detach(), b.detach()
    if a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    close = torch.finfo(a.dtype).eps ** 0.5
    return torch.allclose(a, b, rtol=close, atol=close, equal_nan=True)
