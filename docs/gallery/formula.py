# %% [markdown]
# # A mixed model as one line, its effects, and a forest plot
#
# 920 patients of four hospitals ship with hierfl. Any pandas frame with one row a patient and a column that names the
# hospital will do.

# %%
import matplotlib.pyplot as plt
import numpy as np

import hierfl

data = hierfl.datasets.heart_disease("nan")
patients = data.frame("hospital").rename(columns={"y": "ill"})
patients["sex"] = np.where(patients["sex"] == 1, "male", "female")

formula = hierfl.formula(
    "ill ~ scale(age) + sex + (1 | hospital)",
    "bernoulli",
    clients="hospital",
    missing="drop",
)
fit = hierfl.fit(formula, patients, seed=0)
print(fit.summary())

# %% [markdown]
# ## The effect of age, at each hospital and at a new one

# %%
figure, ax = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
fit.effects("age", client="each", at={"sex": "male"}).plot(ax)
ax.set(ylabel="probability of heart disease, men", ylim=(0, 1))
plt.show()

# %% [markdown]
# ## Odds ratio of the sexes

# %%
print(fit.comparisons("sex", comparison="ratio", scale="link"))

# %% [markdown]
# ## Each hospital's intercept

# %%
draws = fit.posterior(draws=1000, seed=0).posterior
own = draws["hospital"].stack(s=("chain", "draw"))
figure, ax = plt.subplots(figsize=(5.6, 2.6), layout="constrained")
rows = [int(data.counts[data.names.index(name)]) for name in own["client"].values]
hierfl.plots.client_forest(
    ax, own.transpose("s", "client").values, list(own["client"].values), rows=rows
)
ax.set_xlabel("log odds of heart disease, a woman of mean age")
plt.show()
