# %% [markdown]
# # Every plot, at the width of a journal column
#
# Each function of `hierfl.plots` draws on the Matplotlib axes that it is given and returns them, so that a paper's figure is yours to lay out. All
# pictures on this page are 3.4 inches wide. Colors are those of [Okabe and Ito](https://jfly.uni-koeln.de/color/), which all kinds of color
# vision tell apart.

# %%
import matplotlib.pyplot as plt
import numpy as np
from torch import nn

import hierfl
from hierfl import diagnostics, methods, models, optimizers, plots

plt.rcParams |= {"font.size": 8, "figure.dpi": 130}


def column(height=2.4):
    """Return the axes of a figure as wide as a column."""
    return plt.subplots(figsize=(3.4, height), layout="constrained")[1]


radon = hierfl.datasets.radon()
fit = hierfl.fit(models.regression("gaussian", x=None, y="y"), radon, seed=0)
draws = fit.posterior(draws=1000, seed=0).posterior.stack(s=("chain", "draw"))
levels = draws["intercept"].transpose("s", "client").values
names, homes = list(fit.clients), radon.counts.numpy()
new = np.random.default_rng(0).normal(draws["intercept_loc"], draws["intercept_scale"])
largest = np.argsort(-homes)

# %% [markdown]
# ## Clients
#
# `client_forest`, `shrinkage`, `prior_and_clients`, `client_map`; `forest` draws several coefficients ([results](../results.md)).

# %%
ax = column(3.0)
some = largest[
    [*range(6), *range(-6, 0)]
]  # six counties with the most homes, and six with the fewest
plots.client_forest(ax, levels[:, some], [names[k] for k in some], rows=homes[some], prior=new)
ax.set_xlabel("level of the county, log radon")
plt.show()

# %%
y = radon.fields["y"].numpy()
alone = np.array([y[radon.row_client.numpy() == k].mean() for k in range(len(names))])
ax = plots.shrinkage(column(3.2), alone, levels.mean(0), rows=homes, center=float(new.mean()))
ax.legend(frameon=False, fontsize=7)
plt.show()

# %%
ax = plots.prior_and_clients(column(), new, levels[:, largest[:4]], [names[k] for k in largest[:4]])
ax.set_xlabel("level of the county, log radon")
ax.legend(frameon=False, fontsize=7)
plt.show()

# %%
means = np.column_stack([alone, levels.mean(0), radon.client_fields["log_uranium"].numpy()])
plots.client_map(column(2.8), means[largest[:7]], [names[k] for k in largest[:7]])
plt.show()

# %% [markdown]
# ## Predictions
#
# `coverage`, `pit`, `rates`, `reliability`; `entropies` is on [another page](unknown_images.py).

# %%
replicates = fit.replicate(radon, draws=200, seed=0).numpy()
plots.coverage(column(2.8), replicates, y)
plt.show()

# %%
ax = plots.pit(column(), replicates, y)
ax.legend(frameon=False, fontsize=7, loc="lower right", bbox_to_anchor=(1.0, 1.0))
plt.show()

# %%
few = radon.select([names[k] for k in largest[:12]])
table = diagnostics.client_rates(fit.predict(few), fit.replicate(few, draws=200, seed=0))
ax = plots.rates(column(2.8), table)
ax.set_xlabel("mean log radon")
plt.show()

# %%
train, test = hierfl.datasets.heart_disease().split(0.7, seed=0)
net = models.network(nn.Linear(27, 1), likelihood=models.likelihood.bernoulli())
average = methods.fedavg(net, optimizer=optimizers.SGD(0.1), steps=5)
runs = [hierfl.fit(average, train, rounds=25, seed=seed) for seed in range(3)]
found = runs[0].predict(test, draws=1)
ax = plots.reliability(column(2.8), {"fedavg": (found.mean.numpy(), found.label.numpy())})
plt.show()

# %% [markdown]
# ## Runs
#
# `convergence`: the median of three seeds, and their range.

# %%
ax = plots.convergence(
    column(), {"fedavg": [run.history for run in runs]}, column="loss", settled=0
)
plt.show()
