"""Network meta-analysis: which help to stop smoking works best (Hasselblad 1998; Lu and Ades 2006)?

Usage: `python examples/recipes/network_meta_analysis.py [--smoke]`. The clients are 24 trials, and
a row is an arm of a trial. The counts are the published ones (Hasselblad 1998, Medical Decision
Making 18).
"""

from __future__ import annotations

import sys

import pyro
import pyro.distributions as dist
import torch

import hierfl

TREATMENTS = ["no contact", "self-help", "individual counseling", "group counseling"]
TRIALS = """
9/140 A 23/140 C 10/138 D; 11/78 B 12/85 C 29/170 D; 75/731 A 363/714 C; 2/106 A 9/205 C; 58/549 A 237/1561 C;
0/33 A 9/48 C; 3/100 A 31/98 C; 1/31 A 26/95 C; 6/39 A 17/77 C; 79/702 A 77/694 B; 18/671 A 21/535 B;
64/642 A 107/761 C; 5/62 A 8/90 C; 20/234 A 34/237 C; 0/20 A 9/20 D; 8/116 A 19/149 B; 95/1107 A 143/1031 C;
15/187 A 36/504 C; 78/584 A 73/675 C; 69/1177 A 54/888 C; 20/49 B 16/43 C; 7/66 B 32/127 D; 12/76 C 20/74 D;
9/55 C 3/26 D
"""  # quitters/smokers and the letter of the treatment, arm by arm


def model(batch: hierfl.ClientBatch) -> None:
    """Log odds of quitting: the trial's own level, the treatment's effect, and how far it deviates in this trial.

    Deviations of sd tau / sqrt(2) an arm give every contrast of two arms the heterogeneity tau, and
    two contrasts of a trial with three arms the correlation 1/2.
    """
    effect = pyro.sample(
        "effect", dist.Normal(torch.zeros(3), 2.0).to_event(1)
    )  # against no contact
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    every = torch.cat([torch.zeros_like(effect[..., :1]), effect], -1)
    with batch.clients():
        level = pyro.sample("level", dist.Normal(-2.0, 5.0))  # log odds without contact
        spread = (tau / 2.0**0.5)[..., None].expand(*tau.shape, 4)
        deviation = pyro.sample("deviation", dist.Normal(0.0, spread).to_event(1))
        with batch.data():
            logits = level + (batch.arm * (every + deviation)).sum(-1)
            quit = dist.Binomial(batch.smokers, logits=logits)
            pyro.sample("quitters", quit, obs=batch.quitters)


def data() -> hierfl.ClientData:
    """Return 24 trials of 50 arms: `arm`, a 0/1 column a treatment, `smokers` and `quitters`."""
    trials = {}
    for k, trial in enumerate(TRIALS.replace("\n", " ").split(";")):
        words = trial.split()
        counts = torch.tensor([[float(n) for n in word.split("/")] for word in words[::2]])
        which = torch.tensor(["ABCD".index(letter) for letter in words[1::2]])
        arm = torch.nn.functional.one_hot(which, 4).to(torch.get_default_dtype())
        trials[f"trial {k + 1}"] = {"arm": arm, "quitters": counts[:, 0], "smokers": counts[:, 1]}
    return hierfl.ClientData.from_clients(trials)


def main(rounds: int | None = None, draws: int = 2000) -> None:
    """Print odds ratios against no contact, the heterogeneity, and which treatment is best how surely."""
    fit = hierfl.fit(model, data(), rounds=rounds, seed=0)
    drawn = fit.posterior(draws=draws, seed=0).posterior
    effect, tau = drawn["effect"].values.reshape(-1, 3), drawn["tau"]
    best = torch.as_tensor(effect).argmax(-1)
    print("Odds ratio of quitting against no contact (90% interval), and how surely it is the best")
    for j, name in enumerate(TREATMENTS[1:]):
        low, middle, high = (
            (2.718281828 ** drawn["effect"][..., j]).quantile([0.05, 0.5, 0.95]).values
        )
        sure = 100.0 * float((best == j).double().mean())
        print(f"{name:24s} {middle:.2f} ({low:.2f} to {high:.2f})  {sure:.0f}%")
    low, middle, high = tau.quantile([0.05, 0.5, 0.95]).values
    print(f"heterogeneity tau, sd of a log odds ratio: {middle:.2f} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main(rounds=1, draws=100) if "--smoke" in sys.argv else main()
