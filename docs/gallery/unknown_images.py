# %% [markdown]
# # Does it know what it does not know?
#
# Sixteen clients each have two kinds of handwritten digits, from 0 to 7. Nobody has an 8 or a 9. A posterior should be certain about a client's
# own digits and uncertain about those ([FedABML](../reference/methods/fedabml.md), Fig. 5). The digits come with scikit-learn
# (`pip install 'hierfl[data]'`).

# %%
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import hierfl
from hierfl import methods, models, optimizers

x, y = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
x = x.float() / 16
trained = y < 8
copy = torch.randint(
    4, (int(trained.sum()),), generator=torch.Generator().manual_seed(0)
)
# four clients have 0 and 1, four have 2 and 3, ...
owner = y[trained] // 2 + 4 * copy
clients = hierfl.partition.to_clients(owner, x=x[trained], y=y[trained])
train, test = clients.split(0.7, seed=0)

net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
model = models.bayesian_network(net, prior_scale="learned", scale_start=0.02)
method = methods.fedabml(
    model,
    optimizer=optimizers.SGD(0.3),
    kl_weight=0.01,
    steps=3,
    batch_size=20,
)
fit = hierfl.fit(method, train, rounds=10, seed=0)
own = fit.predict(test, draws=20)
print(own.scores().mean().round(3))

# %% [markdown]
# Every client also predicts 8s and 9s.

# %%
strangers = x[~trained][:200]
rows = torch.arange(200) % 16
foreign = hierfl.ClientData.from_arrays(rows, names=train.names, x=strangers)
unknown = fit.predict(foreign, draws=20)
entropy = hierfl.diagnostics.predictive_entropy
separated = hierfl.diagnostics.out_of_distribution(own, unknown)
print(separated)

# %%
figure, ax = plt.subplots(figsize=(6.0, 3.2), layout="constrained")
hierfl.plots.entropies(
    ax, entropy(own), entropy(unknown), labels=("own digits", "8 and 9")
)
ax.legend(frameon=False)
plt.show()
