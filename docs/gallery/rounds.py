# %% [markdown]
# # How many rounds until the posterior is right?
#
# If people approve messages, each round of a federation costs hours. Two methods fit radon in 20 counties. After every few rounds, the posterior
# mean of the counties' spread is compared with that of `two_stage`, which is exact here after one round.

# %%
import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist

import hierfl
from hierfl import guides, methods, optimizers

radon = hierfl.datasets.radon()
some = radon.select(radon.names[:20])


def model(batch):
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    log_tau = pyro.sample("log_tau", dist.Normal(-1.0, 0.7))
    with batch.clients():
        level = pyro.sample("level", dist.Normal(mu, log_tau.exp()))
        with batch.data():
            pyro.sample("y", dist.Normal(level, 0.8), obs=batch.y)


exact = hierfl.fit(model, some, seed=0).draws(4000, seed=0).shared["log_tau"]
runs = {
    "pvi": (methods.pvi(model), 6),
    "fedsvi, structured": (
        methods.fedsvi(
            model, guides.structured, optimizer=optimizers.Adam(0.05)
        ),
        200,
    ),
}
error = {}
for name, (method, rounds) in runs.items():
    seen = []
    every = max(1, rounds // 10)

    def look(fit, seen=seen, every=every):
        """Note the error of the mean, in posterior sds."""
        done = len(fit.history)
        if done % every == 0:
            mean = fit.draws(500, seed=0).shared["log_tau"].mean()
            seen.append(
                (done, float((mean - exact.mean()).abs() / exact.std()))
            )

    hierfl.fit(method, some, rounds=rounds, seed=0, callback=look)
    error[name] = seen

# %%
figure, ax = plt.subplots(figsize=(6.0, 3.4), layout="constrained")
for k, (name, seen) in enumerate(error.items()):
    rounds, off = zip(*seen, strict=True)
    style = {
        "color": hierfl.plots.COLORS[k + 1],
        "marker": hierfl.plots.MARKERS[k + 1],
    }
    ax.plot(rounds, off, markersize=4, label=name, **style)
ax.axhline(0.1, color="0.45", linestyle="--", linewidth=0.8)
ax.set(
    xscale="log",
    yscale="log",
    xlabel="round",
    ylabel="error of the mean, posterior sds",
)
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# An error below the dashed line, a tenth of a posterior standard deviation, hardly matters. Neither method gets there in these rounds.
# [Results](../results.md) has these numbers for real problems and all methods.
