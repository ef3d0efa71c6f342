# %% [markdown]
# # A method of your own in forty lines
#
# A method is four pieces: the client's state, what it does with a mini-batch, what it sends, and what the server makes of the weighted means.
# Clients are written for *one* client, in plain shapes; hierfl carries all of them together, compiles, checkpoints and serves new clients.
#
# This one is FedAvg whose server moves with momentum.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import hierfl
from hierfl import Client, Method, Phase, Server, Share, guides, methods, models
from hierfl.method import descend


def with_momentum(model, lr=0.1, steps=5, momentum=0.9):
    def client(program):
        def step(theta, message, batch):
            """Take a gradient step on a mini-batch."""
            return descend(lambda params: program.mean_loss(params, batch), theta, lr)

        def finish(theta, message, own, rows):
            """Send the weights, weighted by the number of rows."""
            return {"theta": Share(theta, rows)}, own

        return Client(
            own={},  # nothing is kept from round to round
            start=lambda message, own: message,
            phases=(Phase(step, count=steps, batch_size=20),),
            finish=finish,
        )

    def server(program):
        start, _ = program.start()
        still = {name: torch.zeros_like(value) for name, value in start.items()}

        def update(state, means, clock):
            """Move along the mean change, and keep moving."""
            theta, speed = state["theta"], state["speed"]
            speed = {n: momentum * speed[n] + means["theta"][n] - theta[n] for n in theta}
            return {"theta": {n: theta[n] + speed[n] for n in theta}, "speed": speed}

        return Server(
            {"theta": start, "speed": still}, update, down=lambda state, clock: state["theta"]
        )

    return Method("with momentum", model, guides.delta, client, server)


# %%
train, test = hierfl.datasets.heart_disease().split(0.7, seed=0)
net = models.network(nn.Linear(27, 1), likelihood=models.likelihood.bernoulli())
mine = with_momentum(net)
plain = methods.fedavg(net, optimizer=hierfl.optimizers.SGD(0.1), steps=5)
options = {"rounds": 30, "seed": 0, "validation": test, "eval_every": 1}
fits = {m.name: hierfl.fit(m, train, **options) for m in (mine, plain)}

# %%
figure, ax = plt.subplots(figsize=(6.0, 3.2), layout="constrained")
column = "validation_log_score"
hierfl.plots.convergence(ax, {n: f.history for n, f in fits.items()}, column=column, settled=0)
ax.set_ylabel("log score of held-out patients, nats")
ax.legend(frameon=False)
plt.show()
