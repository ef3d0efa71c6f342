"""Names that a saved recipe may hold, and what each of them stands for.

A recipe records a public name, such as "hierfl.models.regression" or "pyro.distributions.Normal",
never the module that happens to define it: modules may move, and runs saved before can still be
loaded.

The list is explicit. What it names makes a value and does nothing else, whatever the arguments are:
it reads and writes no file, starts no process and runs no code that it is given. A user's own
function has no public name (`hierfl.program.marked`).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Public module -> the names of it that a recipe may hold.
NAMES = {
    "hierfl": ("Formula", "Method", "Schema"),
    # not ResponseFamily: its likelihood is a text that is run
    "hierfl.formulas": ("Column", "Constants", "Grouping", "Margin"),
    "hierfl.guides": tuple(
        (
            "amortized conditional constructed delta diagonal_normal full_normal low_rank "
            "low_rank_normal mean_field spline_flow structured unrolled"
        ).split()
    ),
    "hierfl.methods": tuple(
        (
            "apfl averaging_some batch_normed bfi by_rows clustered_fl differentially_private "
            "ditto fedabml fedamp fedavg fedbabu fedbn fedem fedep fedfomo fedlaplace fedmap "
            "fedpa fedpac fedpop fedrecon fedrep fedsvi fedvi fine_tuned heur_fedamp ifca "
            "local_only knn_per over_relaxed per_fedavg pfedbayes pfedbred pfedhn pfedme pvi "
            "quantized robust scaffold server_optimized two_stage"
        ).split()
    ),
    "hierfl.methods.hypernetworks": ("Mlp",),
    "hierfl.models": tuple(
        (
            "HeadedNetwork MemoryNetwork PersonalHeads batch_norm_network bayesian_network "
            "bregman_network learned_prior_network mixture network regression"
        ).split()
    ),
    "hierfl.models.families": tuple(
        (
            "bernoulli beta beta_binomial binomial categorical cumulative exponential gamma "
            "gaussian lognormal negative_binomial piecewise_exponential poisson student weibull "
            "zero_inflated_poisson"
        ).split()
    ),
    "hierfl.models.bregman": tuple("BregmanPrior bernoulli exponential gaussian poisson".split()),
    "hierfl.models.likelihood": tuple(
        "Bernoulli Likelihood bernoulli categorical normal poisson".split()
    ),
    "hierfl.models.learned_priors": tuple(
        "InputConvex Isotropic LearnedNormal LearnedVariance Penalized".split()
    ),
    "hierfl.optimizers": tuple("SGD Adam TorchOptimizer".split()),
    # distributions of numbers alone; not those that take functions, search trees or compile code
    "pyro.distributions": tuple(
        (
            "AffineBeta AsymmetricLaplace Bernoulli Beta BetaBinomial Binomial Categorical Cauchy "
            "Chi2 ContinuousBernoulli Delta Dirichlet DirichletMultinomial Exponential "
            "FisherSnedecor Gamma GammaPoisson GeneralizedPareto Geometric Gumbel HalfCauchy "
            "HalfNormal InverseGamma Kumaraswamy LKJ LKJCholesky LKJCorrCholesky Laplace "
            "LogNormal Logistic LogisticNormal LowRankMultivariateNormal Multinomial "
            "MultivariateNormal MultivariateStudentT NegativeBinomial Normal OneHotCategorical "
            "OrderedLogistic Pareto Poisson SkewLogistic SoftAsymmetricLaplace SoftLaplace Stable "
            "StudentT Uniform VonMises Weibull Wishart ZeroInflatedNegativeBinomial "
            "ZeroInflatedPoisson"
        ).split()
    ),
    "torch.optim": tuple(
        ("ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD").split()
    ),
}

HAND_IN = "hand the method in: load(..., method=...)"


class CannotRemake(ValueError):
    """A recipe from which nothing can be made again. The message says why, and what to pass instead."""


def public_name(name: str) -> str:
    """Return the public name of "module:qualname"; the name itself where it has none.

    >>> public_name("hierfl.models.bayes_net:network"), public_name("pyro.distributions.torch:Normal")
    ('hierfl.models.network', 'pyro.distributions.Normal')
    >>> public_name("my_study:my_model")
    'my_study:my_model'
    """
    module, _, qualname = name.partition(":")
    for public in NAMES:
        ours, below = public.startswith("hierfl"), f"{module}.".startswith(f"{public}.")
        found = exported(public, qualname) if ours or below else None
        if found is not None and (found.__module__ == module or not ours):
            return f"{public}.{qualname}"
    return name


def exported(module: str, name: str) -> Any:
    """Return the function, class or guide family of a name on the list; None where it is not on it."""
    if name not in NAMES.get(module, ()):
        return None
    return getattr(import_module(module), name, None)  # an older Pyro or torch may lack one


def find(name: str) -> Any:
    """Return what a name in a recipe stands for.

    Args:
        name: a public name, such as "hierfl.models.regression".

    Raises:
        CannotRemake: the name is not on the list.
    """
    module, _, last = name.rpartition(".")
    found = exported(module, last)
    if found is None:
        raise CannotRemake(f"'{_short(name)}' is not a public name of hierfl: {HAND_IN}")
    return found


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
