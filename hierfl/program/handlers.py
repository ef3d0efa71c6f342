"""Effect handlers that make a Pyro program a pure function of its params, a batch and the batch's keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor
from torch.distributions import transform_to

from hierfl.core import noise
from hierfl.data.batch import ClientBatch
from hierfl.program.keyed_draws import Noise, NoKeyedDraw, NoSampler, draw, seeded
from hierfl.program.module_weights import ModuleWeights
from hierfl.program.traces import Site, in_clients


class Answer(Messenger):
    """Answers every `pyro.param` from a dict, and every draw with noise made from the batch's keys.

    Args:
        params: unconstrained values by name; a param that is not in it is left to Pyro.
        batch: the clients and rows that the program runs on; None: draws are left to other handlers.
        reparameterized: refuse a distribution whose draws have no gradient; False: such draws are fine, as
            those of a prior.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        batch: ClientBatch | None,
        *,
        reparameterized: bool = True,
    ) -> None:
        super().__init__()
        self.params, self.batch, self.reparameterized = params, batch, reparameterized
        self._weights = ModuleWeights()

    def __exit__(self, *error: Any) -> None:
        self._weights.leave()
        super().__exit__(*error)

    def _pyro_param(self, msg: Site) -> None:
        if msg["name"] in self.params:
            constraint = msg["kwargs"].get("constraint", dist.constraints.real)
            free = self.params[msg["name"]]
            msg["value"] = (
                free if constraint is dist.constraints.real else transform_to(constraint)(free)
            )
            msg["done"] = True

    def _pyro_post_param(self, msg: Site) -> None:
        self._weights.take(msg)

    def _pyro_sample(self, msg: Site) -> None:
        if msg["done"] or msg["is_observed"] or isinstance(msg["fn"], _Subsample):
            return
        if self.batch is None:
            return
        if isinstance(msg["fn"], dist.Delta):
            # making a key takes a fair part of a small eager step, and a Delta needs none
            msg["value"], msg["done"] = msg["fn"].v, True
            return
        key = self.batch.key if in_clients(msg) else self.batch.shared_key
        key = noise.fold(key, noise.word(msg["name"]))
        try:
            msg["value"] = draw(msg["fn"], Noise(key, axis=len(msg["fn"].batch_shape) - 2))
        except NoKeyedDraw:
            msg["value"] = self._seeded(msg, key)
        msg["done"] = True

    def _seeded(self, msg: Site, key: Tensor) -> Tensor:
        """Return a draw by torch's own sampler; where there is none, the error names the site."""
        try:
            return seeded(msg["fn"], key, reparameterized=self.reparameterized)
        except NoSampler as error:
            raise NoSampler(f"site '{msg['name']}' ({error})") from error


@contextmanager
def unchecked() -> Iterator[None]:
    """Let no distribution check its arguments or values, nor those made earlier, as priors outside a program are.

    A check reads a tensor's value, which a traced function has not.
    """
    checks = torch.distributions.Distribution._validate_sample
    torch.distributions.Distribution._validate_sample = _accept  # type: ignore[method-assign]
    try:
        with pyro.validation_enabled(False):
            yield
    finally:
        torch.distributions.Distribution._validate_sample = checks  # type: ignore[method-assign]


def _accept(self: torch.distributions.Distribution, value: Tensor) -> None:
    """Accept a value, whatever it is."""


@contextmanager
def untouched_store() -> Iterator[None]:
    """Restore Pyro's param store and torch's generator on leaving."""
    with pyro.get_param_store().scope(), torch.random.fork_rng(devices=[]):
        yield
