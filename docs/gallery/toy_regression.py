# %% [markdown]
# # Two clients that each measure one direction
#
# In a linear regression with two weights, each client's rows leave one direction undetermined. Together they determine both.

# %%
import matplotlib.pyplot as plt
import numpy as np
import pyro
import pyro.distributions as dist
import torch
from matplotlib.patches import Ellipse

import hierfl

truth = torch.tensor([1.0, -0.5])
generator = torch.Generator().manual_seed(0)
# of the features, by client
spread = torch.tensor([[1.5, 0.15], [0.15, 1.5]])
x = torch.randn(2, 30, 2, generator=generator) * spread[:, None]
y = x @ truth + 0.5 * torch.randn(2, 30, generator=generator)
clients = hierfl.ClientData.from_clients(
    {"one": {"x": x[0], "y": y[0]}, "two": {"x": x[1], "y": y[1]}}
)


def model(batch):
    mean = pyro.sample("mean", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    with batch.clients():
        w = pyro.sample("w", dist.Normal(mean, 0.05).to_event(1))
        with batch.data():
            pyro.sample(
                "y", dist.Normal((batch.x * w).sum(-1), 0.5), obs=batch.y
            )


together = hierfl.fit(model, clients, seed=0)
alone_fits = {
    name: hierfl.fit(model, clients.select([name]), seed=0)
    for name in clients.names
}


# %%
def ellipse(ax, draws, **style):
    """Draw the ellipse that holds 90% of a Gaussian with these moments."""
    values, vectors = np.linalg.eigh(np.cov(draws.T))
    width, height = 2 * np.sqrt(4.605 * values)
    angle = np.degrees(np.arctan2(vectors[1, 0], vectors[0, 0]))
    ax.add_patch(
        Ellipse(
            draws.mean(0), width, height, angle=angle, fill=False, **style
        )
    )


figure, ax = plt.subplots(figsize=(5.2, 4.4), layout="constrained")
for k, name in enumerate(clients.names):
    color = hierfl.plots.COLORS[k]
    alone = alone_fits[name].draws(2000, seed=0).own["w"][:, 0].numpy()
    joint = together.draws(2000, seed=0).own["w"][:, k].numpy()
    ellipse(
        ax,
        alone,
        color=color,
        linestyle=":",
        linewidth=1.2,
        label=f"{name}, own rows only",
    )
    ellipse(ax, joint, color=color, linewidth=2, label=f"{name}, together")
ax.plot(*truth.numpy(), "k*", markersize=11, label="truth")
ax.set(
    xlabel="first weight",
    ylabel="second weight",
    xlim=(-1, 3),
    ylim=(-2, 1.5),
)
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False, fontsize=8)
plt.show()

# %% [markdown]
# Dotted ellipses are what a client knows alone: long in the direction that its rows do not determine. Solid ellipses are narrow in both.
