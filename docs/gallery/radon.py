# %% [markdown]
# # A group-level predictor: radon and uranium
#
# Radon was measured in 919 homes in 85 counties of Minnesota. Uranium in the soil is known for each county, and the floor for each home:
#
# $$\text{level}_j \sim \mathrm{Normal}(\mu + \beta\, \text{uranium}_j,\; \tau), \qquad
# y_{ij} \sim \mathrm{Normal}(\text{level}_j + \gamma\, \text{floor}_{ij},\; \sigma)$$

# %%
import matplotlib.pyplot as plt
import numpy as np
import pyro
import pyro.distributions as dist

import hierfl


def model(batch):
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    uranium = pyro.sample("uranium", dist.Normal(0.0, 2.0))
    ground_floor = pyro.sample("ground_floor", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with batch.clients():  # counties
        level = pyro.sample(
            "level", dist.Normal(mu + uranium * batch.log_uranium, tau)
        )
        with batch.data():  # homes
            pyro.sample(
                "y",
                dist.Normal(level + ground_floor * batch.floor, sigma),
                obs=batch.y,
            )


radon = hierfl.datasets.radon()
fit = hierfl.fit(model, radon, seed=0)
draws = fit.posterior(draws=1000, seed=0).posterior
for name in ("uranium", "ground_floor", "tau", "sigma"):
    low, middle, high = np.quantile(draws[name], [0.05, 0.5, 0.95])
    print(f"{name:13s} {middle:5.2f} (90% interval {low:.2f} to {high:.2f})")

# %% [markdown]
# Counties with more uranium have more radon. A county with few homes, as most of these are, stays near the line. The line is where a county
# without any home would be expected.

# %%
x = radon.client_fields["log_uranium"].numpy()
low, middle, high = (
    draws["level"].quantile([0.05, 0.5, 0.95], ("chain", "draw")).values
)
line = np.linspace(x.min() - 0.05, x.max() + 0.05, 50)
at = (
    draws["mu"].values.ravel()[:, None]
    + draws["uranium"].values.ravel()[:, None] * line
)

figure, ax = plt.subplots(figsize=(6.2, 3.8), layout="constrained")
band = np.quantile(at, [0.05, 0.95], axis=0)
ax.fill_between(line, *band, color="0.88", label="line: 90% interval")
ax.plot(line, at.mean(0), color="0.45")
ax.vlines(x, low, high, color=hierfl.plots.COLORS[0], linewidth=0.8)
ax.plot(
    x,
    middle,
    "o",
    color=hierfl.plots.COLORS[0],
    markersize=3.5,
    label="county",
)
ax.set(
    xlabel="log uranium in the soil of the county",
    ylabel="level of the county, log radon",
)
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False, loc="upper left")
plt.show()
