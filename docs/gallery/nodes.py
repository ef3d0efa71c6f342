# %% [markdown]
# # Four hospitals, each on its own node
#
# `hierfl.fit` simulates a federation on one machine. `hierfl.nodes.fit` runs the same method over nodes that hold the rows: on
# [Flower](../nodes_flower.md), over any other transport, or, to try it, in one process with the same messages, policies and folders.

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pyro.distributions as dist

import hierfl

patients = hierfl.datasets.heart_disease()
patients = patients.with_fields(x=patients.fields["x"][:, :13])
model = hierfl.models.regression(
    "bernoulli",
    slopes="global",
    prior_scale=dist.HalfNormal(0.5),
    centered=True,
)
home = Path(tempfile.mkdtemp())
nodes = hierfl.nodes.in_process(patients, home)
over_nodes = hierfl.nodes.fit(model, nodes, seed=0)
print(over_nodes.history[["round", "clients", "bytes_down", "bytes_up"]])

# %% [markdown]
# ## What was sent
#
# The server has no rows. In the last round, it sends the draws for the hospitals to weight, and each answers with one number per draw.

# %%
history = over_nodes.history
figure, ax = plt.subplots(figsize=(6.0, 3.0), layout="constrained")
for k, (way, label) in enumerate(
    (("bytes_down", "to the hospitals"), ("bytes_up", "back"))
):
    at = history["round"] + 0.36 * (k - 0.5)
    ax.bar(
        at,
        history[way] / 1e3,
        width=0.34,
        color=hierfl.plots.COLORS[k],
        label=label,
    )
ax.set(
    xlabel="round",
    ylabel="kB, all hospitals together",
    xticks=history["round"],
    yscale="log",
)
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False, loc="upper left")
plt.show()

# %% [markdown]
# ## The same numbers as on one machine

# %%
here = hierfl.fit(model, patients, seed=0)
sites = [n for n in here.draws(10).shared]
there, same = (
    over_nodes.posterior(draws=200).posterior,
    here.posterior(draws=200).posterior,
)
print(
    pd.DataFrame(
        {
            "nodes": {name: float(there[name].mean()) for name in sites},
            "one machine": {name: float(same[name].mean()) for name in sites},
        }
    )
)

# %% [markdown]
# ## The owner decides what leaves afterwards
#
# Summaries of a hospital's own sites stay at its node until its policy releases them. Only Cleveland's does.

# %%
(home / "cleveland" / "policy.toml").write_text('may_leave = ["summaries"]')
answers = over_nodes.local_summary(draws=200)
print(answers.table.head())
print("withheld:", sorted(answers.withheld))
