# %% [markdown]
# # An autoencoder with a style for each client
#
# Six shops photograph clothes, each in its own light. A variational autoencoder has a code for each picture, which never leaves its shop, and a
# style for each shop, a [local site](../from_pyro.md): the logarithm of the power to which its light raises a picture. Encoder and decoder are
# shared. The 1,200 pictures are from Fashion-MNIST (Zalando Research, MIT license), at half their resolution
# ([fashion_mnist_14.npz](fashion_mnist_14.npz)).

# %%
import matplotlib.pyplot as plt
import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import nn

import hierfl
from hierfl import methods, optimizers

pixels = np.load("fashion_mnist_14.npz")["x"].reshape(-1, 196)
clothes = torch.as_tensor(pixels).float() / 255
shop = torch.arange(len(clothes)) % 6
light = torch.tensor([-1.2, -0.7, -0.3, 0.2, 0.7, 1.2])
x = clothes.clamp(min=0.02) ** light.exp()[shop, None]
names = tuple(f"shop {k}" for k in range(1, 7))
data = hierfl.ClientData.from_arrays(shop, names=names, x=x)

# %% [markdown]
# The program and its guide are written as in Pyro. The guide removes the shop's light from each row, then encodes it.

# %%
torch.manual_seed(0)
CODE = 8
encoder = nn.Sequential(
    nn.Linear(196, 128), nn.Tanh(), nn.Linear(128, 2 * CODE)
)
decoder = nn.Sequential(
    nn.Linear(CODE, 128), nn.Tanh(), nn.Linear(128, 196), nn.Sigmoid()
)
PRIOR = dist.Normal(torch.zeros(CODE), 1.0).to_event(1)


def model(batch):
    pyro.module("decoder", decoder)
    with batch.clients():
        style = pyro.sample("style", dist.Normal(0.0, 1.0))
        with batch.data():
            picture = decoder(pyro.sample("code", PRIOR))
            seen = picture ** style.exp()[..., None]
            seen = dist.Normal(seen, 0.15).to_event(1)
            pyro.sample("x", seen, obs=batch.x)


def guide(batch):
    pyro.module("encoder", encoder)
    shape = batch.num_clients, 1
    with batch.clients():
        loc = pyro.param("loc", torch.zeros(shape))
        scale = pyro.param(
            "scale",
            torch.full(shape, 0.1),
            constraint=dist.constraints.positive,
        )
        style = pyro.sample("style", dist.Normal(loc, scale))
        with batch.data():
            picture = batch.x ** (-style).exp()[..., None]
            loc, scale = encoder(picture).chunk(2, -1)
            scale = nn.functional.softplus(scale) + 0.001
            pyro.sample("code", dist.Normal(loc, scale).to_event(1))


method = methods.fedsvi(
    model,
    guide,
    optimizer=optimizers.Adam(0.01),
    local_optimizer=optimizers.Adam(0.05),
)
fit = hierfl.fit(method, data, rounds=120, seed=0, progress=False)

# %% [markdown]
# With all pictures in one place, the same steps come to the same ELBO (here in nats per picture). The styles are in the order of the shops'
# light; those of dark shops are shrunk, because a code can make clothes dark too.

# %%
pooled = hierfl.fit_pooled(method, data, rounds=120, seed=0)
for name, one in {"federated": fit, "pooled": pooled}.items():
    print(name, round(one.history["elbo"].tail(20).mean() / len(x), 1))
own = fit.draws(200).own["style"].flatten(1)
print("light of each shop", [round(v, 1) for v in light.tolist()])
print("style, mean", [round(v, 2) for v in own.mean(0).tolist()])
print("style, sd", [round(v, 3) for v in own.std(0).tolist()])

# %% [markdown]
# Two pictures from each shop, each above its reconstruction: the decoded code in the shop's light.

# %%
style = own.mean(0)


def run(name, net, inputs):
    """Run a network with the weights of the fit."""
    start = f"{name}$$$"
    weights = {
        key.removeprefix(start): value
        for key, value in fit.message["params"].items()
        if key.startswith(start)
    }
    with torch.no_grad():
        return torch.func.functional_call(net, weights, inputs)


plain = run("encoder", encoder, x ** (-style).exp()[shop, None])
pictures = run("decoder", decoder, plain[:, :CODE])


def show(ax, picture, title=""):
    ax.imshow(picture.reshape(14, 14), cmap="gray", vmin=0, vmax=1)
    ax.set_title(title, fontsize=9)
    ax.axis("off")


figure, axes = plt.subplots(4, 6, figsize=(7.2, 5.0), layout="constrained")
for k, column in enumerate(axes.T):
    for pair, row in enumerate((60 + k, 66 + k)):
        show(column[2 * pair], x[row], "" if pair else names[k])
        show(column[2 * pair + 1], pictures[row] ** style[k].exp())
plt.show()

# %% [markdown]
# Here are three codes in the style of every shop.

# %%
figure, axes = plt.subplots(3, 6, figsize=(7.2, 3.8), layout="constrained")
for line, row in enumerate((60, 66, 73)):
    for k, ax in enumerate(axes[line]):
        title = "" if line else names[k]
        show(ax, pictures[row] ** style[k].exp(), title)
plt.show()
