# %% [markdown]
# # A hospital that leaves
#
# The patients of one hospital withdraw their consent. `two_stage` stores each hospital's factor separately, so the server can often compute the
# posterior without it, and needs no further round ([more](../living.md)). How much does the answer change, and could we have known in advance?

# %%
import matplotlib.pyplot as plt
import numpy as np
import pyro.distributions as dist

import hierfl
from hierfl import diagnostics, models

patients = hierfl.datasets.heart_disease()
names = patients.features["x"][:13]
patients = patients.with_fields(x=patients.fields["x"][:, :13])
model = models.regression(
    "bernoulli",
    slopes="global",
    prior_scale=dist.HalfNormal(0.5),
    centered=True,
)
everyone = hierfl.fit(model, patients, seed=0)
without = everyone.without("switzerland", rounds=4)

# %%
left_out = diagnostics.loo(everyone, "client")
print(left_out)

# %% [markdown]
# From the first fit alone, `loo` estimates how well the others predict each hospital. A k-hat above 0.7 says that this is rough: one hospital of
# four moves the posterior too far for weights, and only the fit without it answers. Here are the coefficients, before and after.


# %%
def moments(fit):
    """Return medians and 90% intervals of the common slopes."""
    slopes = fit.posterior(draws=2000, seed=0).posterior["slope"]
    return slopes.quantile([0.05, 0.5, 0.95], ("chain", "draw")).values


figure, ax = plt.subplots(figsize=(5.8, 3.8), layout="constrained")
for k, (label, fit) in enumerate(
    {"all four": everyone, "without Switzerland": without}.items()
):
    low, middle, high = moments(fit)
    at = np.arange(len(names)) + 0.3 * (k - 0.5)
    style = {"color": hierfl.plots.COLORS[k]}
    ax.hlines(at, low, high, linewidth=1.2, **style)
    ax.plot(
        middle,
        at,
        hierfl.plots.MARKERS[k],
        markersize=4,
        label=label,
        **style,
    )
ax.axvline(0, color="0.45", linewidth=0.8, linestyle=":")
ax.set_yticks(range(len(names)), names, fontsize=8)
ax.set(
    xlabel="change in log odds of heart disease",
    ylim=(len(names) - 0.4, -0.6),
)
ax.spines[["top", "right", "left"]].set_visible(False)
ax.legend(frameon=False)
plt.show()
