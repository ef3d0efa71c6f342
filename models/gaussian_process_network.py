"""A common embedding, and a Gaussian process of each client's own rows above it."""

import math

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn

from hierfl.core.arguments import expect, spelled
from hierfl.data.batch import ClientBatch
from hierfl.models.functional import apply, frozen_copy, weights
from hierfl.models.likelihood import field, observe
from hierfl.models.memory_network import memory_of

positive = dist.constraints.softplus_positive
JITTER = 1e-4  # of the kernel's scale, on its diagonal
AT_ONCE = 16  # processes whose matrices are in memory together


@spelled
class GaussianProcessNetwork:
    """Labels by a Gaussian process on the embedding of rows, given the rows that a client keeps.

        f_k ~ GP(0, s^2 exp(-|e(x) - e(x')|^2 / (2 D l^2))),    e(x) of D numbers, by the network
        real labels:   y = f_k(x) + Normal(0, v^2)
        classes:       one process each, of the labels log a_c - t_c / 2 with noise t_c = log(1 + 1 / a_c),
                       a_c = 1[y = c] + label_noise;   p = softmax(mean / sqrt(1 + pi variance / 8))

    The embedding and s, l and v are common; predictions for a client without rows are the prior's.
    An instance is a model, to be called on a batch. Params:

    * `theta.<tensor>` (*shape), global: the weights of the network.
    * `gp.length` () > 0, `gp.scale` () > 0, and `gp.noise` () > 0 of real labels, global.
    * `memory.x` (C, 1, R, *row), `memory.y` (C, 1, R) and `memory.there` (C, 1, R), local: rows,
      their labels, and 1 where there is a row.

    Args:
        module: maps rows (B, ...) to their embedding (B, D).
        classes: number of classes; None: real labels.
        memory: R, rows that a client keeps at most, > 0. One with more keeps R of them, evenly
            spread.
        length: l before the first round, > 0. length, scale: the authors'.
        scale: s before the first round, > 0.
        noise: v before the first round, > 0.
        label_noise: a of the classes that a label is not, > 0; the default is that of Milios et al.
        x: name of the field of inputs.
        y: name of the field of labels.

    Raises:
        ValueError: a number is out of range, or `network` does not accept the module.

    References: Achituve et al. 2021, arXiv:2106.15482. Classes are those of Milios et al. 2018,
    arXiv:1805.10915, in place of a tree of Polya-Gamma classifiers.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        classes: int | None = None,
        memory: int = 200,
        length: float = 1.0,
        scale: float = 8.0**0.5,
        noise: float = 0.5,
        label_noise: float = 0.01,
        x: str = "x",
        y: str = "y",
    ) -> None:
        expect(
            memory=(memory, "[1, inf)"),
            length=(length, "(0, inf)"),
            scale=(scale, "(0, inf)"),
            noise=(noise, "(0, inf)"),
            label_noise=(label_noise, "(0, inf)"),
            classes=(classes, "[2, inf) or None"),
        )
        self.net = frozen_copy(module)
        self.classes, self.memory = classes, memory
        self.length, self.scale, self.noise = length, scale, noise
        self.label_noise, self.x, self.y = label_noise, x, y
        self.tensors = weights(self.net)
        self.__name__ = "gaussian_process_network"

    def __call__(self, batch: ClientBatch) -> None:
        """Run the model on a batch."""
        theta = {name: pyro.param(f"theta.{name}", v.clone()) for name, v in self.tensors.items()}
        length = pyro.param("gp.length", torch.tensor(self.length), constraint=positive)
        scale = pyro.param("gp.scale", torch.tensor(self.scale), constraint=positive)
        rows = field(batch, self.x)
        spread = None
        if self.classes is None:
            spread = pyro.param("gp.noise", torch.tensor(self.noise), constraint=positive)
        features = apply(self.net, {}, theta, rows, mask=batch.rows)
        far = length * math.sqrt(features.shape[-1])
        with batch.clients():
            mine = memory_of(batch.num_clients, self.memory, rows)
            at, there = features / far, mine["there"] > 0.0
            memory = apply(self.net, {}, theta, mine["x"], mask=there)
            labels, variance = self._seen(mine["y"], spread)
            mean, wide = conditioned(scale**2, at, memory / far, labels, variance, there)
            if spread is not None:
                fn = dist.Normal(mean[..., 0], (wide[..., 0] + spread**2).sqrt())
            else:
                fn = dist.Categorical(logits=mean / (1.0 + math.pi / 8.0 * wide).sqrt())
            with batch.data():
                observe(self.y, fn, batch)

    def _seen(self, y: Tensor, spread: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return what the processes see of labels (C, R), and its noise's variance, (C, R, processes)."""
        if spread is not None:
            return y[..., None], (spread**2).expand(y[..., None].shape)
        hot = (y[..., None] == torch.arange(self.classes or 0)).to(y.dtype)
        weight = hot + self.label_noise
        variance = (1.0 + 1.0 / weight).log()
        return weight.log() - 0.5 * variance, variance


def conditioned(
    scale: Tensor, at: Tensor, memory: Tensor, labels: Tensor, variance: Tensor, there: Tensor
) -> tuple[Tensor, Tensor]:
    """Return means and variances of processes (C, B, P) at rows `at`, given noisy `labels` of `memory`, if `there`."""

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        """Return the covariance of a (..., A, D) and b (..., B, D), in units of the length."""
        middle = b.mean(-2, keepdim=True).detach()  # near which squares round little
        a, b = a - middle, b - middle
        squares_a, right = a.square().sum(-1)[..., :, None], b.square().sum(-1)[..., None, :]
        return scale * (a @ b.mT - 0.5 * (squares_a + right)).clamp(max=0.0).exp()

    inside = there.to(memory.dtype)[:, None]
    # rows that are not there: far from all others, with label 0
    cross = (kernel(at, memory) * inside).mT[:, None]
    own = (kernel(memory, memory) * inside * inside.mT)[:, None]

    def of_block(y: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        noise_ = torch.where(there[:, None], variance + JITTER * scale, 1.0)
        tril = torch.linalg.cholesky_ex(own + noise_.diag_embed()).L
        half = torch.linalg.solve_triangular(tril, cross, upper=False)
        seen = torch.linalg.solve_triangular(tril, (y * inside)[..., None], upper=False)
        return (half.mT @ seen)[..., 0], scale - half.square().sum(-2)

    blocks = zip(labels.mT.split(AT_ONCE, 1), variance.mT.split(AT_ONCE, 1), strict=True)
    mean, wide = zip(*(of_block(y, v) for y, v in blocks), strict=True)
    return torch.cat(mean, 1).mT, torch.cat(wide, 1).mT.clamp(min=0.0)
