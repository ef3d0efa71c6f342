# %% [markdown]
# # Shrinkage: what 85 counties borrow
#
# A county with two homes has no good estimate of its own. A hierarchical model pulls it toward the mean of all counties:
# the fewer homes, the stronger the pull.

# %%
import matplotlib.pyplot as plt
import numpy as np

import hierfl
from hierfl import models

radon = hierfl.datasets.radon()
# an intercept of each county, shrunk
county = models.regression("gaussian", x=None, y="y")
fit = hierfl.fit(county, radon, seed=0)
print(fit.chosen)

# %%
draws = fit.posterior(draws=1000, seed=0).posterior
together = draws["intercept"].mean(("chain", "draw")).values.ravel()
y, of_county = radon.fields["y"].numpy(), radon.row_client.numpy()
alone = np.array([y[of_county == k].mean() for k in range(radon.num_clients)])
homes = radon.counts.numpy()
center = float(np.average(together))

figure, ax = plt.subplots(figsize=(5.2, 4.8), layout="constrained")
hierfl.plots.shrinkage(ax, alone, together, rows=homes, center=center)
ax.set(
    xlabel="mean log radon of a county's own homes",
    ylabel="hierarchical estimate",
)
ax.legend(frameon=False, loc="upper left")
plt.show()

# %% [markdown]
# A point on the dashed diagonal borrows nothing, and one on the dotted line borrows everything. Large points (counties with many homes) stay
# near the diagonal. The points that moved a long way are counties with one to five homes.

# %%
three, many = homes <= 3, homes >= 20
for title, some in (
    ("three homes or fewer", three),
    ("twenty homes or more", many),
):
    moved = 1 - (together[some] - center) @ (alone[some] - center) / np.sum(
        (alone[some] - center) ** 2
    )
    print(
        f"{title}: {some.sum()} counties, moved {moved:.0%} of the way to the center"
    )
