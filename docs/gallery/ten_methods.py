# %% [markdown]
# # Ten methods on the same clients
#
# Twenty clients have three kinds of handwritten digits each. All methods take the same network and the same number of rounds, with one
# step size for all: a study that chooses options per method is one file ([study files](../comparisons.md)). The digits come with scikit-learn
# (`pip install 'hierfl[data]'`).

# %%
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import hierfl
from hierfl import methods, models, optimizers

x, y = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
generator = torch.Generator().manual_seed(0)
which, copy = (torch.randint(n, y.shape, generator=generator) for n in (3, 2))
# k has k, k + 1 and k + 3
owner = (y - torch.tensor([0, 1, 3])[which]) % 10 + 10 * copy
train, test = hierfl.partition.to_clients(owner, x=x.float() / 16, y=y).split(
    0.7, seed=0
)

torch.manual_seed(0)
layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
net = models.network(layers)
personal = models.bayesian_network(layers, prior_scale=1.0)
how = {"optimizer": optimizers.SGD(0.1), "steps": 10, "batch_size": 20}
average = methods.fedavg(net, **how)
compared = {
    "local_only": methods.local_only(net, **how),
    "fedavg": average,
    "fedprox": methods.fedavg(net, prox=0.1, **how),
    "scaffold": methods.scaffold(net, **how),
    "fedavg + fine-tuning": methods.fine_tuned(average, steps=2),
    "ditto": methods.ditto(net, **how),
    "fedrep": methods.fedrep(
        net,
        head="theta.2.",
        optimizer=optimizers.SGD(0.1),
        head_steps=2,
        batch_size=20,
    ),
    "apfl": methods.apfl(net, **how),
    "pfedme": methods.pfedme(
        personal, prox=5.0, global_optimizer=optimizers.SGD(0.1), steps=10
    ),
    "per_fedavg": methods.per_fedavg(
        net,
        inner_optimizer=optimizers.SGD(0.1),
        optimizer=optimizers.SGD(0.1),
        steps=10,
    ),
}

# %%
accuracy = {}
for name, method in compared.items():
    fit = hierfl.fit(method, train, rounds=30, seed=0)
    if "tuning" in name:
        fit = fit.personalize(train, rounds=1)
    accuracy[name] = (
        fit.predict(test, draws=1).scores()["accuracy"].to_numpy()
    )

# %% [markdown]
# A dot is a client, and a bar the mean over clients. A common model has to serve all twenty.

# %%
figure, ax = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
order = sorted(accuracy, key=lambda name: accuracy[name].mean())
for k, name in enumerate(order):
    shift = torch.linspace(-0.25, 0.25, len(accuracy[name])).numpy()
    ax.plot(
        accuracy[name],
        k + shift,
        "o",
        color=hierfl.plots.COLORS[5],
        markersize=3.5,
    )
    ax.plot(
        [accuracy[name].mean()] * 2,
        [k - 0.36, k + 0.36],
        color="black",
        linewidth=2,
    )
ax.set_yticks(range(len(order)), order)
ax.tick_params(axis="y", length=0)
ax.set_xlabel("accuracy on a client's held-out digits")
ax.spines[["top", "right", "left"]].set_visible(False)
plt.show()
