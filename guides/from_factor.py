"""The guide of two_stage: local sites drawn from their prior times the client's own Gaussian factor, and weighed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor

from hierfl.core import noise
from hierfl.data.batch import ClientBatch
from hierfl.guides.global_sites import Drawn, Shared, emit
from hierfl.laplace.mode import client_density
from hierfl.laplace.trials import first_row
from hierfl.program.sites import Latents, Model, family
from hierfl.summaries.hierarchy import Hierarchy

WIDER = 1.1  # scale of the candidates, in those of the prior times the factor
PRECISION, SHIFT = "_factor.precision", "_factor.shift"  # the local params


class FromFactor:
    """A guide that draws local sites given the global ones by the client's factor.

        q(w | z) = Normal, proportional to p(w | z) exp(eta . v - v' Lambda v / 2),    v = (w, u)

    Of several candidates from q, widened by a tenth, one is kept with a probability proportional to its
    importance weight p(y, w | z) / q(w | z). Its own density is p(y, w | z) over the mean weight, which is an
    unbiased estimate of p(y | z).

    The hierarchy is found once the program has been read, which takes the guide: `hold` hands it over. Before,
    the guide draws standard normals, which tell the reader its sites.

    Args:
        model: the model.
        latents: its latent sites.
        posterior: of the global sites.
        candidates: M.
    """

    def __init__(
        self,
        model: Model,
        latents: Latents,
        posterior: Callable[[ClientBatch], Drawn],
        candidates: int,
    ) -> None:
        self.model, self.latents, self.posterior = model, latents, posterior
        self.candidates = candidates
        self.hierarchy: Hierarchy | None = None

    def hold(self, hierarchy: Hierarchy) -> None:
        """Take the hierarchy of the program that the guide belongs to."""
        self.hierarchy = hierarchy

    def __call__(self, batch: ClientBatch) -> None:
        """Draw all sites of the clients of a batch."""
        drawn, block = self._shared(batch), self.latents.local_block
        if not block.size:
            return
        size = block.size if self.hierarchy is None else self.hierarchy.reading.size
        with batch.clients():
            precision = pyro.param(PRECISION, torch.zeros(batch.num_clients, 1, size, size))
            shift = pyro.param(SHIFT, torch.zeros(batch.num_clients, 1, size))
        if self.hierarchy is None:
            eye = torch.eye(block.size).expand(batch.num_clients, 1, -1, -1)
            normal = dist.MultivariateNormal(eye[..., 0] * 0.0, scale_tril=eye)
        else:
            with poutine.block(hide_types=["sample", "observe"]):  # evaluations, not its own sites
                normal = _given(self.hierarchy, drawn.vector, precision, shift, batch)
        with batch.clients():
            first = pyro.sample("_local", normal, infer={"is_auxiliary": True})
        if self.hierarchy is None:
            emit(block, first, batch)
            return
        vector, log_q = self._chosen(drawn, normal, first, batch)
        moved = dist.Delta(torch.zeros_like(log_q), log_density=log_q - normal.log_prob(first))
        with batch.clients():
            pyro.sample("_local.chosen", moved, infer={"is_auxiliary": True})
        emit(block, vector, batch)

    def _shared(self, batch: ClientBatch) -> Drawn:
        """Draw the global sites; a program without any is refused once it has been read."""
        if self.latents.global_block.size:
            return self.posterior(batch)
        none = torch.zeros(0)
        return Drawn(none, none, {})

    def _chosen(
        self, drawn: Drawn, normal: Any, first: Tensor, batch: ClientBatch
    ) -> tuple[Tensor, Tensor]:
        """Choose one of the candidates by importance weights.

        Returns:
            The local vector that is kept (C, 1, D), and the log density (C, 1) of the choice.
        """
        assert self.hierarchy is not None
        key = noise.fold(batch.key, noise.word("_local.candidates"))
        away = noise.normals(
            key, (self.candidates - 1, first.shape[-1]), first.dtype
        )  # (C, M - 1, D)
        others = normal.loc + away @ normal.scale_tril[:, 0].mT
        each = torch.cat([first, others], 1).movedim(1, 0)[:, :, None]  # (M, C, 1, D)
        log_normal = normal.log_prob(each)
        with poutine.block(hide_types=["sample", "observe"]):
            each, log_scale = self.hierarchy.local_vectors(each, drawn.vector)
        density = client_density(self.model, self.latents.local_block, drawn.values, batch)
        joint = torch.vmap(density)(each)[..., None]  # (M, C, 1)
        log_weights = joint - log_normal - log_scale
        uniform = noise.uniforms(
            noise.fold(batch.key, noise.word("_local.choice")), (1,), first.dtype
        )
        at = (log_weights.softmax(0).cumsum(0) < uniform).sum(0, keepdim=True)
        at = at.clamp(max=self.candidates - 1)
        kept = each.gather(0, at[..., None].expand(1, *each.shape[1:]))[0]
        evidence = log_weights.logsumexp(0) - math.log(self.candidates)
        return kept, joint.gather(0, at)[0] - evidence


@family
def from_factor(
    model: Model, latents: Latents, *, shared: Shared, candidates: int = 16
) -> FromFactor:
    """Build the guide of two_stage.

    Args:
        model: the model.
        latents: its latent sites.
        shared: posterior of the global sites.
        candidates: M.
    """
    return FromFactor(model, latents, shared(latents.global_block), candidates)


from_factor.build.reads_all_rows = True  # type: ignore[attr-defined]


def _given(
    hierarchy: Hierarchy, z: Tensor, precision: Tensor, shift: Tensor, batch: ClientBatch
) -> Any:
    """Return the Normal distribution of the local numbers, of batch shape (C, 1), widened."""
    local = hierarchy.local(z, first_row(batch))
    given = hierarchy.given(local, z, precision[:, 0], shift[:, 0])
    _, covariance = given.log_integral()
    mean = (covariance @ given.shift[..., None])[..., 0]
    tril = WIDER * torch.linalg.cholesky_ex(covariance).L
    return dist.MultivariateNormal(mean[:, None], scale_tril=tril[:, None])
