"""Checks that a program is a function of its params, rows and keys, and that clients stay private."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor

from hierfl.core import noise
from hierfl.data.batch import ClientBatch, mapped
from hierfl.program.handlers import ModuleWeights, Substitute, untouched_store
from hierfl.program.program import Program, ProgramError
from hierfl.program.traces import Site, in_clients, samples


def leaves(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the leaves of a tensor's graph, which require a gradient."""
    if tensor.requires_grad and tensor.grad_fn is None:
        yield tensor
    seen: set[Any] = set()
    ahead = [tensor.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        ahead.extend(following for following, _ in node.next_functions)


class _Marked(Messenger):
    """Marks values of local sites and params by `requires_grad`, which dependents inherit."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: set[Tensor] = set()
        self._weights = ModuleWeights()

    def __exit__(self, *error: Any) -> None:
        self._weights.leave()
        super().__exit__(*error)

    def marked(self, value: Tensor) -> Tensor:
        """Return a copy of a tensor that carries a mark, if its dtype can."""
        if not value.is_floating_point():
            return value
        copy = value.detach().clone().requires_grad_()
        self.marks.add(copy)
        return copy

    def _pyro_post_sample(self, msg: Site) -> None:
        if in_clients(msg) and not msg["is_observed"]:
            msg["value"] = self.marked(msg["value"])

    def _pyro_post_param(self, msg: Site) -> None:
        msg["value"] = self.marked(msg["value"]) if in_clients(msg) else msg["value"].detach()
        self._weights.take(msg)


def check_boundary(
    program: Callable[[ClientBatch], Any], batch: ClientBatch, what: str, *handlers: Messenger
) -> None:
    """Refuse a global site that depends on rows, local sites or params, or means over clients."""
    handler = _Marked()
    marked = mapped(batch, handler.marked)
    with untouched_store(), ExitStack() as stack, torch.enable_grad():
        for messenger in (handler, *handlers):
            stack.enter_context(messenger)
        try:
            trace: Any = poutine.trace(program).get_trace(marked)
        except RuntimeError:
            return  # the program takes values out of autograd (`.numpy()`), and cannot be checked
        for name, site in samples(trace):
            depends = chain.from_iterable(map(leaves, _tensors(site)))
            if not in_clients(site) and not handler.marks.isdisjoint(depends):
                raise ProgramError(
                    f"site '{name}' is outside the clients plate in the {what}, but depends on "
                    "something inside it (a client's rows, local sites or local params): move it "
                    "inside `with batch.clients():`, or remove the dependence"
                )


NUMPY = "NumPy's global generator (np.random)"
PYTHON = "Python's global generator (random)"
TORCH = "torch's global generator (torch.randn, torch.bernoulli, dropout, ...)"
# a seed that no model sets itself: a generator seeded and drawn from has moved too
UNUSUAL = 1_618_033_988


class Generator(NamedTuple):
    """How a global generator is seeded, read and restored."""

    seed: Callable[[int], object]
    state: Callable[[], Any]
    restore: Callable[[Any], object]

    def as_bytes(self) -> bytes:
        """Return the state, to compare it with a later one."""
        state = self.state()
        return state.numpy().tobytes() if isinstance(state, Tensor) else pickle.dumps(state)


GENERATORS: Mapping[str, Generator] = {
    NUMPY: Generator(np.random.seed, np.random.get_state, np.random.set_state),
    PYTHON: Generator(random.seed, random.getstate, random.setstate),
    TORCH: Generator(noise.seed_torch, torch.random.get_rng_state, torch.random.set_rng_state),
}


@contextmanager
def _drawn_here() -> Iterator[list[str]]:
    """Note this thread's calls of Python's global generator; other threads draw too."""
    calls: list[str] = []

    def note(frame: object, event: str, called: Any) -> None:
        if event == "c_call" and getattr(called, "__self__", None) is random.random.__self__:  # type: ignore[attr-defined]
            calls.append(called.__name__)

    if sys.getprofile() is not None:  # a profiler is at work, and there can be one only
        yield ["unknown"]
        return
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


@contextmanager
def no_global_draws(what: str, *, starts: bool = False) -> Iterator[None]:
    """Refuse a model or guide that moves a global generator in this context; restore all."""
    before, moved = {}, []
    with ExitStack() as stack:
        for name, generator in GENERATORS.items():
            if not (starts and name == TORCH):
                stack.callback(generator.restore, generator.state())
                generator.seed(UNUSUAL)
                before[name] = generator.as_bytes()
        with _drawn_here() as drawn:
            yield
        for name, state in before.items():
            if GENERATORS[name].as_bytes() != state:
                moved.append(name)
    if moved and (moved != [PYTHON] or drawn):
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
                _check_site(name, what, site, again.get(name))


def _traces(program: Program, params: Mapping[str, Tensor], batch: ClientBatch) -> dict[str, Any]:
    with untouched_store(), Substitute(params, batch):
        with no_global_draws("guide"):
            guided = poutine.trace(program.guide).get_trace(batch)
        with no_global_draws("model"):
            modeled = poutine.trace(poutine.replay(program.model, guided)).get_trace(batch)
    return {"guide": guided, "model": modeled}


def _tensors(site: Site) -> Iterator[Tensor]:
    if isinstance(site["value"], Tensor):
        yield site["value"]
    try:
        density = site["fn"].log_prob(site["value"])
    except (NotImplementedError, ValueError, RuntimeError, AssertionError):
        return  # other checks say so
    if isinstance(density, Tensor):
        yield density


def _check_site(name: str, what: str, site: Site, again: Site | None) -> None:
    """Refuse a site that differs between two equal runs, or needs a gradient that is no param's."""
    first, second = list(_tensors(site)), [] if again is None else list(_tensors(again))
    if len(first) != len(second) or not all(map(_equal, first, second)):
        raise ProgramError(
            f"site '{name}' of the {what} differs between two runs with the same params, rows and "
            f"noise, so the {what} has a generator (np.random.default_rng, torch.Generator) or "
            "another state of its own: draw with pyro.sample, and compute the site from rows, "
            "params and other sites alone"
        )
    for leaf in chain.from_iterable(map(leaves, first)):
        raise ProgramError(
            f"site '{name}' of the {what} depends on a tensor of shape {tuple(leaf.shape)}, which "
            "requires a gradient and is no param, so that no method learns it: register it "
            "(pyro.module('net', net), pyro.param), or freeze it on purpose with "
            "requires_grad_(False)"
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
