"""Conditional Laplace: each client, given the global sites, takes the Gaussian at the mode of its own log joint."""

from __future__ import annotations

import pyro
import pyro.distributions as dist

from hierfl.data.batch import ClientBatch
from hierfl.guides.global_sites import Shared, emit, full_normal
from hierfl.laplace.mode import client_density, climb, mode_and_precision, prior_centre
from hierfl.program.sites import Guide, Latents, Model, family


@family
def conditional(
    model: Model, latents: Latents, *, shared: Shared = full_normal, newton_steps: int = 5
) -> Guide:
    """q(z) q(w_k | z), the latter Normal(mode, minus the inverse Hessian) of client k's log p(y_k, w_k | z): no local params.

    Exact for linear-Gaussian clients; what INLA (Rue, Martino and Chopin 2009) does for generalised linear ones, here in each
    client. The global sites' own posterior is Gaussian in unconstrained numbers: a scale with a long tail (eight schools: few
    clients, half-Cauchy prior) needs `shared=spline_flow`, since a Normal in its logarithm gives 0.6 of its standard deviation.

    Needs every row of a client at each step, and local sites whose log joint has one mode, curved there.

    Args:
        model: the program; its own log joint is what is climbed.
        latents: the model's.
        shared: the posterior of the global sites (`hierfl.guides.global_sites`).
        newton_steps: safeguarded steps to the mode before the one that gradients flow through; 0 is enough, and exact, where
            rows and local sites are Gaussian.
    """
    block = latents.local_block
    posterior = shared(latents.global_block) if latents.global_block.size else None

    def guide(batch: ClientBatch) -> None:
        values = posterior(batch).values if posterior else {}
        if not block.size:
            return
        density = client_density(model, block, values, batch)
        held = client_density(
            model, block, {name: value.detach() for name, value in values.items()}, batch
        )
        near = climb(held, prior_centre(model, latents, values, batch), steps=newton_steps)
        mode, precision = mode_and_precision(density, near)
        with batch.clients():
            try:
                normal = dist.MultivariateNormal(mode, precision_matrix=precision)
            except (RuntimeError, ValueError):  # torch prints the whole matrix
                raise ValueError(
                    f"guides.conditional: where newton_steps={newton_steps} ended, a client's log joint is not curved like a Gaussian's: "
                    f"take more newton_steps, or guides.structured if its local sites have no single mode"
                ) from None
            vector = pyro.sample("_local", normal, infer={"is_auxiliary": True})
        emit(block, vector, batch)

    return guide


conditional.build.reads_all_rows = True  # type: ignore[attr-defined]
