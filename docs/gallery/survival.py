# %% [markdown]
# # Survival by hospital
#
# Eight hospitals have 240 simulated patients in two arms, censored at 36 months. The formula gives each hospital its own frailty.

# %%
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import hierfl

rng = np.random.default_rng(1)
names = [f"hospital {letter}" for letter in "ABCDEFGH"]
frailty = dict(zip(names, rng.normal(0.0, 0.4, len(names)), strict=True))
trial = pd.DataFrame(
    {"hospital": np.repeat(names, 30), "arm": ["old", "new"] * 120}
)
log_mean = (
    2.6 + 0.5 * (trial["arm"] == "new") + trial["hospital"].map(frailty)
)
months = np.exp(log_mean) * rng.weibull(1.3, len(trial))
trial["months"], trial["died"] = (
    np.minimum(months, 36.0),
    (months < 36.0).astype(int),
)

formula = hierfl.formula(
    "months | event(died) ~ arm + (1 | hospital)",
    "weibull",
    clients="hospital",
)
fit = hierfl.fit(formula, trial, seed=0)

# %%
figure, ax = plt.subplots(figsize=(6.6, 3.8), layout="constrained")
fit.survival(at={"arm": "old"}, client="each", times=list(range(37))).plot(ax)
ax.set(xlabel="months", ylabel="share alive, old arm", xlim=(0, 36))
plt.show()

# %% [markdown]
# The dashed line is a hospital that was not in the trial: its band also includes the spread between hospitals.

# %%
print(fit.comparisons("arm", comparison="ratio", scale="link"))

# %% [markdown]
# This is the ratio of mean times, old to new. The rows were drawn with $e^{-0.5} = 0.61$.
