"""The conditional guide: a Laplace approximation in each client, given the global sites."""

import pyro
import pyro.distributions as dist

from hierfl.data.batch import ClientBatch
from hierfl.guides.global_sites import Shared, emit, full_normal
from hierfl.laplace.mode import client_density, climb, mode_and_precision, prior_center
from hierfl.program.sites import Guide, Latents, Model, family


@family
def conditional(
    model: Model, latents: Latents, *, shared: Shared = full_normal, newton_steps: int = 5
) -> Guide:
    """Build a guide in which each client uses Laplace's approximation, given the global sites.

        q(z) q(w_k | z),    q(w_k | z) = Normal(mode, (-Hessian)^-1)  of log p(y_k, w_k | z) in w_k

    There are no local params. The approximation is exact for linear-Gaussian clients; for
    generalized linear ones it is what INLA does (Rue, Martino and Chopin 2009), here in each
    client.

    The default posterior of the global sites is Gaussian in unconstrained coordinates. A scale with
    a long tail (eight schools: few clients, half-Cauchy prior) needs `shared=spline_flow`: a Normal
    for its logarithm gives only 0.6 of its standard deviation.

    The guide needs all rows of a client at each step. It needs local sites whose log joint has a
    single mode and is curved there.

    Params: those of `shared`.

    Args:
        model: the model, whose log joint is maximized over the local sites.
        latents: the latent sites of the model.
        shared: posterior of the global sites, from `hierfl.guides.global_sites`.
        newton_steps: safeguarded Newton steps to the mode, before the one that gradients flow
            through. 0 is enough, and exact, where the rows and the local sites are Gaussian.

    Raises:
        ValueError: after these steps, minus the Hessian of a client is not positive definite. This
            is found when the guide runs.
    """
    block = latents.local_block
    posterior = shared(latents.global_block) if latents.global_block.size else None

    def guide(batch: ClientBatch) -> None:
        values = posterior(batch).values if posterior else {}
        if not block.size:
            return
        density = client_density(model, block, values, batch)
        fixed = {name: value.detach() for name, value in values.items()}
        held = client_density(model, block, fixed, batch)
        near = climb(held, prior_center(model, latents, values, batch), steps=newton_steps)
        try:
            mode, precision = mode_and_precision(density, near)
            normal = dist.MultivariateNormal(mode, precision_matrix=precision)
        except (RuntimeError, ValueError):  # torch's own message prints the whole matrix
            sites = ", ".join(f"'{site.name}'" for site in block.sites)
            raise ValueError(
                f"guides.conditional: after newton_steps={newton_steps}, the log joint of a "
                f"client is not curved like that of a Gaussian in {sites}: use more newton_steps, "
                "a prior that curves, or guides.structured if there is no single mode"
            ) from None
        with batch.clients():
            vector = pyro.sample("_local", normal, infer={"is_auxiliary": True})
        emit(block, vector, batch)

    return guide


conditional.build.reads_all_rows = True  # type: ignore[attr-defined]
