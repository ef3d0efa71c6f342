"""Posterior draws as Pyro's own functions take them."""

from __future__ import annotations

from torch import Tensor

from hierfl.core.arguments import spelled
from hierfl.posterior.draws import local_plates, posterior_draws
from hierfl.posterior.snapshot import Snapshot


@spelled
def get_samples(fit: Snapshot, *, draws: int = 1000, seed: int = 0) -> dict[str, Tensor]:
    """Draw the latent sites in the shapes of the program, as `pyro.infer.Predictive` takes them.

    A local site is (S, *plates, N, 1, *event), for the N clients of `hierfl.full_batch(data)`:

        >>> model = pyro.poutine.uncondition(fit.program.model)  # doctest: +SKIP
        >>> Predictive(model, fit.get_samples())(hierfl.full_batch(data))["y"]  # doctest: +SKIP

    Args:
        fit: whose posterior is drawn from.
        draws: S.
        seed: of the draws.
    """
    drawn, plates = posterior_draws(fit, draws=draws, seed=seed), local_plates(fit.program)
    samples = dict(drawn.shared)
    for name, value in drawn.own.items():  # (S, N, *plates, *event)
        at_clients = value.movedim(1, 1 + plates[name])
        samples[name] = at_clients.unsqueeze(2 + plates[name])
    return samples
