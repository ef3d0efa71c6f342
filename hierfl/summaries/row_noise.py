"""A client's factor with differential privacy of its rows: clipped rows, and noise on their sums.

    a_i     the coefficients of row i in its linear predictor, shortened to norm R
    g, H    sum_i s_i a_i and sum_i c_i a_i a_i'; s_i, c_i are the expected first and minus second
            derivative of log p(y_i | a_i . v) in the predictor under q, |s_i| <= S, 0 <= c_i <= K
    g~, H~  the same with noise of sd z 2 S R and z sqrt(2) K R^2: z times as far as one row
            moves them
    factor  g~ ~ Normal(H~ (v - m), H~ + t^2 I), m the mean of q, t^2 the variance of the noise of g
            and of that of H times (v - m) under q:
            Lambda = H~ (H~ + t^2)^-1 H~,  eta = H~ (H~ + t^2)^-1 g~ + Lambda m
    q       Normal(v; the server's belief) times that factor, iterated

The rows are read through g~ and H~ alone, so the budget is that of two Gaussian mechanisms per
step. Sources: perturbed sufficient statistics, Foulds et al. 2016 (UAI), applied to the steps of
Khan and Lin 2017, arXiv:1703.04265; the noise as part of the likelihood, Bernstein and Sheldon 2019
(NeurIPS).
"""

import hashlib
import math
import secrets
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from hierfl.core import noise
from hierfl.core.arguments import expect
from hierfl.core.extras import extras_for
from hierfl.core.gaussians import Factor
from hierfl.core.secret_noise import normals_at
from hierfl.program.program import ProgramError
from hierfl.summaries.packed_rows import PackedRows
from hierfl.summaries.reading import Line, QuadratureNodes


@dataclass(frozen=True)
class RowNoise:
    """A budget of differential privacy for each row, such as a patient, and how it is spent.

    Clients send factors with noise, step by step, or the sums of a Gaussian likelihood, once
    (`hierfl.summaries.noisy_sums`).

    Two sets of rows are neighbors if one row of one client is replaced by any other. The budget is
    of everything that a client sends in a run, and of the factor that it keeps. It does not cover
    the number of rows, client fields, or what is asked of the client after the run.

    Args:
        epsilon: above 0.
        delta: in (0, 1), well below 1 over the number of rows of a client.
        max_row_norm: R, the norm to which the coefficients of a row are shortened; of standardized
            covariates with an intercept about the square root of their number.
        rounds: how often the server asks for factors. Defaults of rounds and steps: hierfl's own
            choice.
        steps: of a client in each round.
        max_slope: S. Defaults of max_slope and max_curvature: those of a logistic regression, which
            never reaches beyond them.
        max_curvature: K.
        max_response: B. A Gaussian likelihood of one linear predictor, with a noise scale that is
            global or fixed, needs it and no other takes it: clients then send sums once (one round,
            one mechanism; `rounds`, `steps`, `max_slope` and `max_curvature` do not count). A row
            x_i, y_i, y_i its response less any offset, is shortened as a whole until
            |x_i|^2 / R^2 + y_i^2 / B^2 is 2. Of standardized responses about 3. Default None.
        secret: the noise is a function of it, so that a study can be repeated; anyone who knows it
            can subtract the noise. Default None: from the operating system.

    Raises:
        ValueError: a number is out of range.
    """

    epsilon: float
    delta: float
    max_row_norm: float
    rounds: int = 2
    steps: int = 2
    max_slope: float = 1.0
    max_curvature: float = 0.25
    max_response: float | None = None
    secret: int | None = None
    key: str = field(default="", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse numbers that are out of range, and draw the key of the noise."""
        bounds = ("epsilon", "max_row_norm", "max_slope", "max_curvature")
        expect(**{name: (getattr(self, name), "(0, inf)") for name in bounds})
        expect(max_response=(self.max_response, "(0, inf) or None"), delta=(self.delta, "(0, 1)"))
        expect(rounds=(self.rounds, "[1, inf)"), steps=(self.steps, "[1, inf)"))
        key = secrets.token_hex(32) if self.secret is None else f"{self.secret & (2**64 - 1):064x}"
        object.__setattr__(self, "key", key)

    @cached_property
    def noise(self) -> float:
        """z, the sd of the noise of one sum in units of how far one row moves it.

        n Gaussian mechanisms with noise z are together one with noise z / sqrt(n).

        Raises:
            ImportError: dp-accounting is not installed.
        """
        mechanisms = self.num_rounds * self.mechanisms
        return math.sqrt(mechanisms / self.worth(self.epsilon, self.delta))

    @property
    def num_rounds(self) -> int:
        """How often the server asks: once for the sums of a Gaussian likelihood."""
        return self.rounds if self.max_response is None else 1

    @property
    def mechanisms(self) -> int:
        """Gaussian mechanisms of a round: two of each step of a factor, or one of all sums."""
        return 2 * self.steps if self.max_response is None else 1

    @staticmethod
    def worth(epsilon: float, delta: float) -> float:
        """Return the largest sum of z^-2 over Gaussian mechanisms that a budget pays for."""
        with extras_for("row_noise"):
            from dp_accounting import get_sigma_gaussian
        with np.errstate(divide="ignore"):  # log(0) on the way to a noise of almost none
            return float(get_sigma_gaussian(epsilon, delta)) ** -2

    @property
    def spent_by_round(self) -> float:
        """The sum of z^-2 over the mechanisms of a round."""
        return self.mechanisms * self.noise**-2


def check_line(line: Line) -> None:
    """Refuse a program whose likelihood is not of one linear predictor a row alone."""
    if len(line.rest) or not len(line.inside):
        raise ProgramError(
            "row_noise needs a likelihood of one linear predictor a row and nothing else to "
            "infer, such as a logistic or Poisson regression: fix the other parameters of the "
            "likelihood, or leave row_noise out"
        )


def private_factor(
    rows: PackedRows,
    belief: tuple[Tensor, Tensor],
    before: Factor,
    nodes: QuadratureNodes,
    how: RowNoise,
    keys: Tensor,
) -> Factor:
    """Return clients' factors with noise, by `keys` (C, 2); refuse several predictors a row."""
    if not rows.score.by_row or rows.design.shape[1] != 1:
        raise ProgramError(
            f"row_noise needs one linear predictor a row, and a row has {rows.design.shape[1]}: "
            f"observe one site a row, which depends on that row alone"
        )
    loc, covariance = belief
    prior = torch.linalg.inv_ex(covariance).inverse
    prior = 0.5 * (prior + prior.mT)
    length, clipped = rows.design.norm(dim=2, keepdim=True), copy(rows)
    clipped.design = rows.design * (how.max_row_norm / length.clamp(min=how.max_row_norm))
    factor = before
    # another message or state gets other noise, even in the same round
    keys = noise.fold(keys, *words_of(before, loc, covariance))
    for step in range(how.steps):
        precision = prior + factor.precision
        pull = (prior @ loc + factor.shift)[..., None]
        mean = torch.linalg.solve(precision, pull)[..., 0]
        slope, second = clipped.by_predictor(mean, precision, nodes)
        # a row whose derivatives overflow must not show in a sum that is not finite
        slope = slope.nan_to_num(0.0).clamp(-how.max_slope, how.max_slope)
        curvature = (-second).nan_to_num(0.0).clamp(0.0, how.max_curvature)
        sums = clipped.summed(slope, curvature)
        noisy = torch.vmap(partial(_with_noise, how))
        factor = Factor(*noisy(*sums, mean, precision, noise.fold(keys, step)))
    return factor


def words_of(before: Factor, *message: Tensor) -> tuple[Tensor, ...]:
    """Return words that hash what each client's sums are taken at, (C,) int32 each."""
    common = b"".join(v.cpu().contiguous().numpy().tobytes() for v in message)
    own = zip(before.precision.cpu().numpy(), before.shift.cpu().numpy(), strict=True)
    digests = [hashlib.sha256(common + p.tobytes() + s.tobytes()).digest() for p, s in own]
    words = np.frombuffer(b"".join(digests), dtype="<i4").astype(np.int32).reshape(-1, 8)
    return torch.from_numpy(words).to(before.shift.device).unbind(1)


def _with_noise(
    how: RowNoise, slope: Tensor, curvature: Tensor, mean: Tensor, precision: Tensor, key: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return Lambda, eta and the raised eigenvalues of a factor that accounts for its noise."""
    size, z = len(slope), how.noise
    sd = z * 2.0 * how.max_slope * how.max_row_norm
    # an entry off the diagonal counts twice in a symmetric matrix's norm: half the variance
    sd_entry = z * how.max_curvature * how.max_row_norm**2
    drawn = normals_at(key, size + size * size, how.key).to(slope)
    square = drawn[size:].reshape(size, size)
    values, vectors = torch.linalg.eigh(
        curvature + sd_entry * (square + square.mT) / math.sqrt(2.0)
    )
    raised = (values < 0.0).sum().to(slope)
    values = values.clamp(min=0.0)
    away = torch.linalg.inv_ex(precision).inverse.diagonal().sum()  # E_q |v - m|^2
    share = values / (values + sd**2 + sd_entry**2 * away)
    shrunken = (vectors * (share * values)) @ vectors.mT
    shift = vectors @ (share * (vectors.mT @ (slope + sd * drawn[:size])))
    return shrunken, shift + shrunken @ mean, raised
