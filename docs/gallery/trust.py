# %% [markdown]
# # When not to trust a fit: k-hat and calibration
#
# Variational inference always returns an answer. `hierfl.diagnostics` measures how far it is from the posterior: k-hat, the tail of the
# importance weights, should be below 0.7.
#
# Here the same hierarchy is fitted with a good guide and with one that is known to be too narrow.

# %%
import matplotlib.pyplot as plt
import pandas as pd
import pyro
import pyro.distributions as dist

import hierfl
from hierfl import diagnostics, guides, methods, optimizers

schools = hierfl.datasets.eight_schools()


def model(batch):
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfNormal(5.0))
    with batch.clients():
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        with batch.data():
            pyro.sample("y", dist.Normal(theta, batch.sigma), obs=batch.y)


exact = hierfl.fit(model, schools, seed=0)
fits = {}
for name in ("conditional", "mean_field"):
    method = methods.fedsvi(
        model, getattr(guides, name), optimizer=optimizers.Adam(0.05)
    )
    fits[name] = hierfl.fit(method, schools, rounds=400, seed=0)
for name, fit in fits.items():
    print(f"{name}: {diagnostics.convergence(fit)}\n")

# %% [markdown]
# ## What is off: the spread between schools


# %%
figure, ax = plt.subplots(figsize=(6.0, 3.2), layout="constrained")
shown = {
    "two_stage, exact": exact,
    **{f"fedsvi, {n}": fit for n, fit in fits.items()},
}
for k, (name, fit) in enumerate(shown.items()):
    tau = fit.posterior(draws=2000, seed=0).posterior["tau"].values.ravel()
    pd.Series(tau).plot.density(
        ax=ax,
        color=hierfl.plots.COLORS[k],
        linestyle=("-", "--", ":")[k],
        label=name,
    )
ax.set(
    xlabel="sd of the effects of schools",
    xlim=(0, 20),
    ylabel="density",
    yticks=[],
)
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# `fit.summary()` prints the same verdict, and `fit.report("report.html")` has each check with the number behind it. What to do about a bad
# k-hat: [diagnostics](../diagnostics.md#correct-the-draws).
