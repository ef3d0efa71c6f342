# %% [markdown]
# # Posterior predictive checks in ArviZ
#
# `fit.posterior()` is ArviZ's InferenceData (DataTree with ArviZ 1), so ArviZ's plots and tables work on it. Does a Normal model of log radon
# produce data like those that were measured?

# %%
import arviz as az
import matplotlib.pyplot as plt
import numpy as np

import hierfl

radon = hierfl.datasets.radon()
fit = hierfl.fit(
    hierfl.models.regression("gaussian", slopes="global"), radon, seed=0
)
replicated = fit.replicate(radon, draws=100, seed=0)
observed = radon.fields["y"].numpy()
print("draws of every home's log radon:", tuple(replicated.shape))

# %% [markdown]
# ## Densities
#
# Thin lines are data sets drawn from the posterior; the thick line is what was measured.

# %%
from scipy.stats import gaussian_kde

grid = np.linspace(observed.min() - 1, observed.max() + 1, 200)
figure, (left_ax, right) = plt.subplots(
    1, 2, figsize=(8.0, 3.4), layout="constrained"
)
for made in replicated[:40].numpy():
    left_ax.plot(
        grid,
        gaussian_kde(made)(grid),
        color=hierfl.plots.COLORS[5],
        linewidth=0.5,
    )
left_ax.plot(
    grid,
    gaussian_kde(observed)(grid),
    color="black",
    linewidth=2,
    label="measured",
)
left_ax.set(xlabel="log radon", yticks=[])
left_ax.legend(frameon=False)
# PIT values are uniform where the model is right
pit = (replicated.numpy() < observed).mean(0)
right.hist(pit, bins=20, color=hierfl.plots.COLORS[0], edgecolor="white")
right.axhline(len(pit) / 20, color="0.45", linestyle="--")
right.set(xlabel="PIT value of a home", ylabel="homes")
for ax in (left_ax, right):
    ax.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# The left tail is heavier than the model's: homes without measurable radon were recorded at the smallest value.
#
# ## The posterior in ArviZ

# %%
summary = az.summary(
    fit.posterior(draws=1000, seed=0), var_names=["~intercept"], kind="stats"
)
print(summary.head(6))
