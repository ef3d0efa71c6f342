# %% [markdown]
# # Every plot, at the width of a journal column
#
# Each function in `hierfl.plots` draws on the Matplotlib axes that you pass and returns them, so you lay out a paper's figure yourself. All pictures
# on this page are 3.5 inches wide. Colors are those of [Okabe and Ito](https://jfly.uni-koeln.de/color/), which people with any color vision can
# distinguish.

# %%
import tempfile
from pathlib import Path

import arviz as az
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
from torch import nn

import hierfl
from hierfl import diagnostics, guides, methods, models, optimizers, plots

plt.rcParams |= {"font.size": 8, "figure.dpi": 130}


def column(height=2.4):
    """Return the axes of a figure as wide as a column."""
    return plt.subplots(figsize=(3.5, height), layout="constrained")[1]


radon = hierfl.datasets.radon()
fit = hierfl.fit(models.regression("gaussian", x=None, y="y"), radon, seed=0)
draws = az.extract(fit.posterior(draws=1000, seed=0))
levels = draws["intercept"].transpose("sample", "client").values
names, homes = list(fit.clients), radon.counts.numpy()
new = np.random.default_rng(0).normal(
    draws["intercept_loc"], draws["intercept_scale"]
)
largest = np.argsort(-homes)

# %% [markdown]
# ## Clients
#
# `client_forest`, `shrinkage`, `prior_and_clients` and `client_map`; `forest` draws several coefficients of each client over what the global level
# predicts for a county.

# %%
ax = column(3.0)
some = largest[
    [*range(6), *range(-6, 0)]
]  # six counties with the most homes, and six with the fewest
plots.client_forest(
    ax, levels[:, some], [names[k] for k in some], rows=homes[some], prior=new
)
ax.set_xlabel("level of the county, log radon")
plt.show()

# %%
y = radon.fields["y"].numpy()
alone = np.array(
    [y[radon.row_client.numpy() == k].mean() for k in range(len(names))]
)
ax = plots.shrinkage(
    column(3.2), alone, levels.mean(0), rows=homes, center=float(new.mean())
)
ax.legend(frameon=False, fontsize=7)
plt.show()

# %%
ax = plots.prior_and_clients(
    column(), new, levels[:, largest[:4]], [names[k] for k in largest[:4]]
)
ax.set_xlabel("level of the county, log radon")
ax.legend(frameon=False, fontsize=7)
plt.show()

# %%
means = np.column_stack(
    [alone, levels.mean(0), radon.client_fields["log_uranium"].numpy()]
)
plots.client_map(
    column(2.8), means[largest[:7]], [names[k] for k in largest[:7]]
)
plt.show()

# %%
slopes = hierfl.fit(models.regression("gaussian", y="y"), radon, seed=0)
posterior = slopes.posterior(draws=1000, seed=0).posterior
noise = np.random.default_rng(0).standard_normal(
    posterior["slope_scale"].shape
)
of_a_county = posterior["slope_loc"] + posterior["slope_scale"] * noise
ax = plots.forest(
    column(2.6),
    posterior["slope"].sel(client=[names[k] for k in largest[:4]]),
    of_a_county,
)
ax.set_xlabel("slope, log radon")
ax.legend(frameon=False, fontsize=7, loc="lower left")
plt.show()

# %% [markdown]
# ## Predictions
#
# `coverage`, `pit`, `rates`, `reliability` and `entropies`.

# %%
replicates = fit.replicate(radon, draws=200, seed=0).numpy()
plots.coverage(column(2.8), replicates, y)
plt.show()

# %%
ax = plots.pit(column(), replicates, y)
ax.legend(
    frameon=False, fontsize=7, loc="lower right", bbox_to_anchor=(1.0, 1.0)
)
plt.show()

# %%
few = radon.select([names[k] for k in largest[:12]])
table = diagnostics.client_rates(
    fit.predict(few), fit.replicate(few, draws=200, seed=0)
)
ax = plots.rates(column(2.8), table)
ax.set_xlabel("mean log radon")
plt.show()

# %%
train, test = hierfl.datasets.heart_disease().split(0.7, seed=0)
net = models.network(
    nn.Linear(27, 1), likelihood=models.likelihood.bernoulli()
)
average = methods.fedavg(net, optimizer=optimizers.SGD(0.1), steps=5)
runs = [hierfl.fit(average, train, rounds=25, seed=seed) for seed in range(3)]
found = runs[0].predict(test, draws=1)
ax = plots.reliability(
    column(2.8), {"fedavg": (found.mean.numpy(), found.label.numpy())}
)
plt.show()

# %%
chance = found.mean.numpy()
entropy = -(chance * np.log(chance) + (1 - chance) * np.log1p(-chance))
va = test.row_client.numpy() == test.names.index("va")
ax = plots.entropies(
    column(), entropy[~va], entropy[va], labels=("other hospitals", "va")
)
ax.legend(frameon=False, fontsize=7, loc="upper left")
plt.show()

# %% [markdown]
# ## Formulas
#
# Effects, ranks of clients and [survival curves](survival.py) draw themselves on the `ax=` that you pass.

# %%
frame = hierfl.datasets.heart_disease("nan").frame("hospital")
text = "y ~ age + sex + (1 | hospital)"
formula = hierfl.formula(text, "bernoulli", clients="hospital")
mixed = hierfl.fit(formula, frame, seed=0)
mixed.effects("age", client="each").plot(ax=column())
plt.show()

# %%
mixed.profile().plot_ranks(ax=column(2.2))
plt.show()

# %% [markdown]
# ## Runs
#
# `convergence` draws the median of three seeds and their range; `k_hats`, each client's Pareto k-hat; `messages`, what left each node.

# %%
ax = plots.convergence(
    column(),
    {"fedavg": [run.history for run in runs]},
    column="loss",
    settled=0,
)
plt.show()

# %%
plots.k_hats(column(1.9), diagnostics.loo(mixed, "client").table["k_hat"])
plt.show()

# %%
home = Path(tempfile.mkdtemp())
frames = {name: rows for name, rows in frame.groupby("hospital")}
hierfl.nodes.fit(
    hierfl.formula(text, "bernoulli", clients="hospital"),
    hierfl.nodes.in_process(frames, home),
)
logs = {
    name: pd.read_json(home / name / "left.jsonl", lines=True)
    for name in frames
}
plots.messages(column(2.2), logs)
plt.show()

# %% [markdown]
# ## Sensitivity
#
# `sensitivity` shows by how many posterior sds each parameter moves without one hospital, or "?" if the weights cannot tell.

# %%
plots.sensitivity(column(2.2), diagnostics.sensitivity(mixed))
plt.show()

# %% [markdown]
# ## Ranks
#
# `rank_ecdf` draws [simulation-based calibration](../diagnostics.md): the rank of each true value among draws of its posterior.


# %%
def schools(batch):
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    with batch.clients():
        theta = pyro.sample("theta", dist.Normal(mu, 1.0))
        with batch.data():
            pyro.sample(
                "y", dist.Normal(theta, batch.sigma / 10), obs=batch.y
            )


eight = hierfl.datasets.eight_schools()
ranks = diagnostics.sbc(
    schools, guides.mean_field, eight, replications=200, steps=200
)
plots.rank_ecdf(column(), ranks, "mu")
plt.show()

# %% [markdown]
# The mean-field guide treats `mu` as independent of the schools' own means, so its draws are too narrow, and true values lie too often at the
# ends.
