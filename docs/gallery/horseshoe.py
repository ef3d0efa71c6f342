# %% [markdown]
# # Your own prior: a horseshoe over hospitals
#
# Which of 13 columns matter for heart disease? A regularized horseshoe
# ([Piironen and Vehtari 2017](https://doi.org/10.1214/17-EJS1337SI)) lets a few slopes be large and shrinks all others to zero. hierfl has no
# horseshoe built in: this is a Pyro program.
#
# $$\text{slope}_j \sim \mathrm{Normal}(0, \tau \lambda_j), \qquad
# \lambda_j^2 = \frac{c^2 \kappa_j^2}{c^2 + \tau^2 \kappa_j^2}, \qquad \kappa_j \sim \mathrm{HalfCauchy}(1)$$

# %%
import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch

import hierfl

COLUMNS, EXPECTED, PATIENTS = 13, 3, 920
TAU = EXPECTED / (COLUMNS - EXPECTED) * 2.0 / PATIENTS**0.5


def model(batch):
    tau = pyro.sample("tau", dist.HalfCauchy(TAU))[..., None]
    own = pyro.sample("own", dist.HalfCauchy(torch.ones(COLUMNS)).to_event(1))
    c2 = pyro.sample("c2", dist.InverseGamma(2.0, 8.0))[..., None]
    softened = own * (c2 / (c2 + tau**2 * own**2)).sqrt()
    slope = pyro.sample("slope", dist.Normal(0.0, tau * softened).to_event(1))
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    spread = pyro.sample("spread", dist.HalfNormal(1.0))
    with batch.clients():
        # of the hospital
        shift = pyro.sample("shift", dist.Normal(mu, spread))
        with batch.data():
            logits = shift + (batch.x * slope).sum(-1)
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=batch.y)


patients = hierfl.datasets.heart_disease()
patients = patients.with_fields(x=patients.fields["x"][:, :COLUMNS])
fit = hierfl.fit(model, patients, seed=0)
print(fit.chosen)

# %%
slope = fit.posterior(draws=2000, seed=0).posterior["slope"]
low, q1, middle, q3, high = slope.quantile(
    [0.05, 0.25, 0.5, 0.75, 0.95], ("chain", "draw")
).values
order = abs(middle).argsort()[::-1]
features = hierfl.datasets.heart_disease().features["x"]
names = [features[j] for j in order]

figure, ax = plt.subplots(figsize=(5.8, 3.6), layout="constrained")
at = range(COLUMNS)
ax.hlines(
    at, low[order], high[order], color=hierfl.plots.COLORS[0], linewidth=1
)
ax.hlines(at, q1[order], q3[order], color=hierfl.plots.COLORS[0], linewidth=3)
ax.plot(
    middle[order],
    at,
    "o",
    color=hierfl.plots.COLORS[0],
    markeredgecolor="white",
)
ax.axvline(0, color="0.45", linewidth=0.8, linestyle=":")
ax.set_yticks(at, names, fontsize=8)
ax.set(
    xlabel="change in log odds of heart disease", ylim=(COLUMNS - 0.4, -0.6)
)
ax.spines[["top", "right", "left"]].set_visible(False)
plt.show()
