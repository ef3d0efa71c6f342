# %% [markdown]
# # Eight schools, then any number of groups
#
# Eight schools each ran a coaching program and report one estimated effect `y` with its standard error `sigma`
# ([Rubin 1981](https://doi.org/10.3102/10769986006004377)). The schools are the clients: what is sampled inside
# `batch.clients()` belongs to one school and stays there.

# %%
import arviz as az
import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist

import hierfl


def model(batch):
    # the mean effect of all schools
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))  # how much schools differ
    with batch.clients():
        # the effect at one school
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        with batch.data():
            pyro.sample("y", dist.Normal(theta, batch.sigma), obs=batch.y)


schools = hierfl.datasets.eight_schools()
fit = hierfl.fit(model, schools, seed=0)
print(fit.chosen)

# %% [markdown]
# The method was chosen. It took one round, because a Normal likelihood with known scales has an exact summary.
#
# Schools lie close together: each is pulled toward the mean of all. Hollow diamonds are the estimates that the schools
# reported. The gray band is where the model expects a school that was not in the study.

# %%
posterior = az.extract(fit.posterior(draws=2000, seed=0))
new_school = (
    dist.Normal(0.0, 1.0).sample((posterior.sizes["sample"],)).numpy()
)
expected = posterior["mu"].values + posterior["tau"].values * new_school

figure, ax = plt.subplots(figsize=(6.2, 3.6), layout="constrained")
hierfl.plots.client_forest(
    ax,
    posterior["theta"].transpose("sample", "client").values,
    list(posterior["client"].values),
    local_only=schools.fields["y"].numpy(),
    prior=expected,
)
ax.set_xlabel("effect of coaching, points of the test")
figure.legend(loc="outside lower center", ncols=3, frameon=False)
plt.show()

# %% [markdown]
# Nothing in the program is about eight. Clients with many rows of any size fit the same way:
# [shrinkage](shrinkage.py) has 85 counties.
