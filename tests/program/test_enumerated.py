"""Discrete latent sites are summed out: the same densities as the sum by hand, in every method."""

import itertools
from collections.abc import Callable, Collection
from functools import cache, partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import config_enumerate
from pyro.poutine.util import site_is_subsample
from torch import Tensor

import hierfl
from hierfl import ClientBatch, ClientData, ProgramError, full_batch, guides, methods, read
from hierfl.laplace.trials import prior_sites_at, sites_at
from hierfl.program.enumerated import LARGEST
from hierfl.program.handlers import log_joint, unchecked
from hierfl.program.mixture import Mixture, expanded
from tests import programs

TIMES = 4


def data(seed: int = 0) -> ClientData:
    """Return three clients of 5, 9 and 7 rows: a number, a count, a yes or no, a sequence, three ratings."""
    g = torch.Generator().manual_seed(seed)
    clients = torch.arange(3).repeat_interleave(torch.tensor([5, 9, 7]))
    count = len(clients)
    fields: dict[str, Any] = {
        "y": 1.5 * torch.randn(count, generator=g),
        "n": torch.randint(0, 4, (count,), generator=g).float(),
        "w": (torch.rand(count, generator=g) < 0.4).float(),
        "h": (torch.rand(count, TIMES, generator=g) < 0.5).float(),
        "ratings": torch.randint(0, 3, (count, 3), generator=g),
    }
    return ClientData.from_arrays(clients, **fields)


def shared() -> tuple[Tensor, Tensor, Tensor]:
    """Sample what all models here have: a location, a gain and a share."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    gain = pyro.sample("gain", dist.LogNormal(0.0, 0.5))
    share = pyro.sample("share", dist.Beta(2.0, 3.0))
    return mu, gain, share


Program = Callable[[ClientBatch], None]


of_rows = programs.of_rows(shared)


def bernoulli(share: Tensor) -> Tensor:
    """Return the log probabilities of 0 and 1, (2, ...)."""
    return torch.stack([torch.log1p(-share), share.log()])


# ------------------------------------------------------------ a label of each row
@of_rows
def row_label(batch: ClientBatch, own: Tensor, gain: Tensor, share: Tensor) -> None:
    label = pyro.sample("label", dist.Bernoulli(share))
    pyro.sample("y", dist.Normal(own + gain * label, 0.7), obs=batch.y)


@of_rows
def row_label_by_hand(batch: ClientBatch, own: Tensor, gain: Tensor, share: Tensor) -> None:
    terms = [dist.Normal(own + gain * k, 0.7).log_prob(batch.y) for k in (0.0, 1.0)]
    pyro.factor("y", (torch.stack(terms) + bernoulli(share)[:, None, None]).logsumexp(0))


# ------------------------------------------------------------ two labels, one given the other
@of_rows
def nested_labels(batch: ClientBatch, own: Tensor, gain: Tensor, share: Tensor) -> None:
    first = pyro.sample("first", dist.Bernoulli(share))
    weights = torch.stack([torch.ones_like(first), 1.0 + first, 3.0 * first + 0.5], -1)
    second = pyro.sample("second", dist.Categorical(weights))
    pyro.sample("y", dist.Normal(own + gain * second, 0.5 + first), obs=batch.y)
    pyro.sample("w", dist.Bernoulli(0.2 + 0.5 * first), obs=batch.w)


# ------------------------------------------------------------ a hidden Markov chain of each row
@of_rows
def chain(batch: ClientBatch, own: Tensor, gain: Tensor, share: Tensor) -> None:
    state = torch.zeros(())
    for t in pyro.markov(range(TIMES)):
        up = torch.where(state > 0.0, share, 0.3)
        state = pyro.sample(f"state_{t}", dist.Bernoulli(up))
        logits = own + gain * state
        pyro.sample(f"h_{t}", dist.Bernoulli(logits=logits), obs=batch.h[..., t])


@of_rows
def chain_by_hand(batch: ClientBatch, own: Tensor, gain: Tensor, share: Tensor) -> None:
    terms = []
    for path in itertools.product((0, 1), repeat=TIMES):
        term, before = torch.zeros(()), 0
        for t, state in enumerate(path):
            up = share if before else torch.tensor(0.3)
            term = term + bernoulli(up)[state]
            seen = dist.Bernoulli(logits=own + gain * state)
            term, before = term + seen.log_prob(batch.h[..., t]), state
        terms.append(term)
    pyro.factor("rows", torch.stack(terms).logsumexp(0))


# ------------------------------------------------------------ animals caught and caught again
@of_rows
def captures(batch: ClientBatch, own: Tensor, gain: Tensor, share: Tensor) -> None:
    alive = torch.ones(())
    for t in pyro.markov(range(1, TIMES)):
        alive = pyro.sample(f"alive_{t}", dist.Bernoulli(alive * share))
        caught = dist.Bernoulli(alive * own.sigmoid())
        pyro.sample(f"h_{t}", caught, obs=batch.h[..., t])


# ------------------------------------------------------------ annotators of each item
def annotators(batch: ClientBatch) -> None:
    mu, _, _ = shared()
    prior = torch.ones(3, 3, 3) + 3.0 * torch.eye(3)
    confusion = pyro.sample("confusion", dist.Dirichlet(prior).to_event(2))
    with batch.clients():
        tilt = pyro.sample("a", dist.Normal(mu, 1.0))
        logits = torch.stack([torch.zeros_like(tilt), tilt, -tilt], -1)
        with batch.data():
            truth = pyro.sample("truth", dist.Categorical(logits=logits))
            for j in range(3):
                seen = dist.Categorical(confusion[j][truth.long()])
                pyro.sample(f"rating_{j}", seen, obs=batch.ratings[..., j])


# ------------------------------------------------------------ zero inflation
@of_rows
def zeros(batch: ClientBatch, own: Tensor, gain: Tensor, share: Tensor) -> None:
    never = pyro.sample("never", dist.Bernoulli(share))
    pyro.sample("n", dist.Poisson(own.exp() * (1.0 - never)), obs=batch.n)


@of_rows
def zeros_by_hand(batch: ClientBatch, own: Tensor, gain: Tensor, share: Tensor) -> None:
    some = dist.ZeroInflatedPoisson(own.exp(), gate=share)
    pyro.sample("n", some, obs=batch.n)


# ------------------------------------------------------------ kinds of clients
def kinds(batch: ClientBatch) -> None:
    mu, gain, share = shared()
    with batch.clients():
        kind = pyro.sample("kind", dist.Bernoulli(share))
        own = pyro.sample("a", dist.Normal(0.0, 1.0))
        with batch.data():
            pyro.sample("y", dist.Normal(own + mu + gain * kind, 0.7), obs=batch.y)


def kinds_by_hand(batch: ClientBatch) -> None:
    mu, gain, share = shared()
    with batch.clients():
        own = pyro.sample("a", dist.Normal(0.0, 1.0))
        sums = [
            batch.sum(dist.Normal(own + mu + gain * k, 0.7).log_prob(batch.y)) for k in (0.0, 1.0)
        ]
        pyro.factor("rows", (torch.stack(sums) + bernoulli(share)[:, None, None]).logsumexp(0))


# ------------------------------------------------------------ kinds of clients, with their own priors
def kinds_of_priors(batch: ClientBatch) -> None:
    mu, gain, share = shared()
    with batch.clients():
        kind = pyro.sample("kind", dist.Bernoulli(share))
        own = pyro.sample("a", dist.Normal(mu + gain * kind, 0.5 + kind))
        with batch.data():
            pyro.sample("y", dist.Normal(own, 0.7), obs=batch.y)


# ------------------------------------------------------------ a kind of client and labels of its rows
def kinds_and_labels(batch: ClientBatch) -> None:
    mu, gain, share = shared()
    with batch.clients():
        kind = pyro.sample("kind", dist.Bernoulli(share))
        own = pyro.sample("a", dist.Normal(mu, 1.0))
        with batch.data():
            label = pyro.sample("label", dist.Bernoulli(0.2 + 0.6 * kind))
            pyro.sample("y", dist.Normal(own + gain * label, 0.7), obs=batch.y)


# ------------------------------------------------------------ kinds that move a local site and its rows
def kinds_of_both(batch: ClientBatch) -> None:
    mu, gain, share = shared()
    with batch.clients():
        kind = pyro.sample("kind", dist.Bernoulli(share))
        own = pyro.sample("a", dist.Normal(mu + gain * kind, 0.5 + kind))
        with batch.data():
            pyro.sample("y", dist.Normal(own, 0.7 + kind), obs=batch.y)


# ------------------------------------------------------------ rows that count by weights, or do not
def weighted(batch: ClientBatch) -> None:
    mu, gain, share = shared()
    with batch.clients():
        own = pyro.sample("a", dist.Normal(mu, 1.0))
        weights, seen = 0.5 + batch.n, batch.w > 0.0
        with batch.data(), poutine.scale(scale=weights), poutine.mask(mask=seen):
            label = pyro.sample("label", dist.Bernoulli(share))
            pyro.sample("y", dist.Normal(own + gain * label, 0.7), obs=batch.y)
            pyro.sample("n", dist.Poisson(1.0 + gain * label), obs=batch.n)


# ------------------------------------------------------------ a kind of client, and weights of its rows
def weighted_rows(batch: ClientBatch) -> None:
    mu, gain, share = shared()
    with batch.clients():
        kind = pyro.sample("kind", dist.Bernoulli(share))
        own = pyro.sample("a", dist.Normal(mu, 1.0))
        with batch.data(), poutine.scale(scale=0.5 + batch.n):
            pyro.sample("y", dist.Normal(own + gain * kind, 0.7), obs=batch.y)


# ------------------------------------------------------------ trials of each row
def trials(batch: ClientBatch) -> None:
    _, _, share = shared()
    with batch.clients(), batch.data():
        label = pyro.sample("label", dist.Bernoulli(share))
        pyro.sample("n", dist.Binomial(3.0 + batch.w, 0.2 + 0.5 * label), obs=batch.n)


# ------------------------------------------------------------ kinds that no row tells apart at the centers
def even(batch: ClientBatch) -> None:
    mu, _, share = shared()
    with batch.clients():
        kind = pyro.sample("kind", dist.Bernoulli(share))
        with batch.data():
            pyro.sample("w", dist.Bernoulli(logits=mu * (1.0 + kind)), obs=batch.w)


# ------------------------------------------------------------ a label that decides about a factor alone
def of_a_factor(batch: ClientBatch) -> None:
    mu, gain, share = shared()
    with batch.clients(), batch.data():
        label = pyro.sample("label", dist.Bernoulli(share))
        pyro.factor("term", -0.5 * (batch.y - mu - gain * label) ** 2)


# ------------------------------------------------------------ labels that are seen in some rows
@of_rows
def seen_labels(batch: ClientBatch, own: Tensor, gain: Tensor, share: Tensor) -> None:
    seen = batch.n > 0.0
    label = pyro.sample("w", dist.Bernoulli(share), obs=batch.w, obs_mask=seen)
    pyro.sample("y", dist.Normal(own + gain * label, 0.7), obs=batch.y)
    pyro.sample("h", dist.Bernoulli(0.2 + 0.5 * label), obs=batch.h[..., 0])


# ------------------------------------------------------------ labels of all clients, which global sites depend on
def sloped(batch: ClientBatch, mu: Tensor, level: Tensor, slope: Tensor) -> None:
    """Observe rows about a line whose slope is global."""
    with batch.clients():
        own = pyro.sample("a", dist.Normal(mu, 1.0))
        with batch.data():
            pyro.sample("y", dist.Normal(own + level + slope * batch.n, 0.7), obs=batch.y)


def spikes(batch: ClientBatch) -> None:
    mu, gain, share = shared()
    which = pyro.sample("which", dist.Bernoulli(share))
    slope = pyro.sample("slope", dist.Normal(0.0, 0.1 + which))
    sloped(batch, mu, gain, slope)


def pilot(batch: ClientBatch) -> None:
    mu, gain, share = shared()
    which = pyro.sample("which", dist.Bernoulli(share))
    slope = pyro.sample("slope", dist.Normal(0.0, 0.1 + which))
    pyro.sample("pilot", dist.Normal(2.0 * which, 1.0), obs=torch.tensor(0.7))
    sloped(batch, mu, gain, slope)


PROGRAMS: dict[str, Program] = {
    "row label": row_label,
    "nested labels": nested_labels,
    "chain": chain,
    "captures": captures,
    "annotators": annotators,
    "zeros": zeros,
    "kinds": kinds,
    "kinds of priors": kinds_of_priors,
    "kinds and labels": kinds_and_labels,
    "kinds of priors and rows": kinds_of_both,
    "weights and masks": weighted,
    "weights of rows": weighted_rows,
    "seen labels": seen_labels,
    "trials": trials,
    "even kinds": even,
    "spikes": spikes,
    "pilot": pilot,
    "a factor alone": of_a_factor,
}
BY_HAND: dict[str, Program] = {
    "row label": row_label_by_hand,
    "chain": chain_by_hand,
    "kinds": kinds_by_hand,
    "zeros": zeros_by_hand,
}
VALUES = {"mu": 0.3, "gain": 1.4, "share": 0.35, "slope": 0.2}


GENERATOR = torch.Generator().manual_seed(1)
OWN = torch.randn(3, 1, generator=GENERATOR, dtype=torch.float64)
CONFUSION = torch.rand(3, 3, 3, generator=GENERATOR, dtype=torch.float64) + torch.eye(3)


def at(point: Tensor) -> dict[str, Tensor]:
    """Return values of all continuous sites, at gain, share and a shift of each client's own site."""
    values: dict[str, Tensor] = {name: torch.tensor(v) for name, v in VALUES.items()}
    values |= {"gain": point[0].exp(), "share": point[1].sigmoid(), "a": OWN + point[2]}
    return {**values, "confusion": CONFUSION / CONFUSION.sum(-1, keepdim=True)}


def density(model: Program, rows: ClientData) -> Callable[[Tensor], Tensor]:
    """Return the log joint density of rows and local sites, and of global sites, (C + 1,)."""
    program, batch = read(model, guides.delta, rows), full_batch(rows, torch.arange(3))

    def log_density(point: Tensor) -> Tensor:
        with unchecked():
            of_clients, of_global = log_joint(program.model, at(point), batch, {})
        return torch.cat([of_clients, of_global[None]])

    return log_density


LEVELS: tuple[frozenset[str], ...] = (
    *(frozenset[str](), frozenset({"clients"})),
    frozenset({"clients", "data"}),
)


def sum_of_all(model: Program, rows: ClientData) -> Callable[[Tensor], Tensor]:
    """Return that density by Pyro's traces, one for each joint value of all discrete sites.

    A value is that of all rows at once, or of all clients: log p = log sum_z p(z) p(y | z) at each level.
    """
    batch = full_batch(rows, torch.arange(3))
    shapes = ((), (3, 1), tuple(batch.y.shape))

    def traced(values: dict[str, Tensor]) -> dict[str, Any]:
        with unchecked():
            nodes = poutine.trace(poutine.condition(model, data=values)).get_trace(batch).nodes
        return {name: site for name, site in nodes.items() if site["type"] == "sample"}

    def level(site: dict[str, Any]) -> int:
        return LEVELS.index(frozenset(frame.name for frame in site["cond_indep_stack"]))

    def terms(values: dict[str, Tensor], discrete: Collection[str], of: int) -> Tensor:
        """Sum the log densities of a level; what is masked counts for nothing but its own label."""
        total = torch.zeros(shapes[of])
        for name, site in traced(values).items():
            if level(site) == of and not site_is_subsample(site):
                log_p, mask = site["fn"].log_prob(site["value"]), site["mask"]
                seen = mask is None or name in discrete
                total = total + (log_p if seen else torch.where(torch.as_tensor(mask), log_p, 0.0))
        return total

    def log_density(point: Tensor) -> Tensor:
        values = at(point)
        latent = {
            name: site["fn"].enumerate_support(expand=False).flatten()
            for name, site in traced(values).items()
            if not site["is_observed"] and site["fn"].has_enumerate_support
        }
        sites = traced(values)
        of_rows = [s["scale"] for s in sites.values() if level(s) == 2 and s["is_observed"]]
        scale = torch.as_tensor(of_rows[0] if of_rows else 1.0)

        def summed(of: int, values: dict[str, Tensor]) -> Tensor:
            here = [name for name in latent if level(sites[name]) == of]
            sums = []
            for chosen in itertools.product(*(latent[name] for name in here)):
                joint = {n: v.expand(shapes[of]) for n, v in zip(here, chosen, strict=True)}
                total = terms({**values, **joint}, latent, of)
                if of == 1:
                    total = total + (scale * summed(2, {**values, **joint})).sum(-1, keepdim=True)
                sums.append(total)
            return torch.stack(sums).logsumexp(0)

        return torch.cat([summed(1, values)[:, 0], summed(0, values)[None]])

    return log_density


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch.func's own
@pytest.mark.parametrize("name", PROGRAMS)
def test_log_densities_and_derivatives_are_those_of_the_sum_by_hand(name: str) -> None:
    point = torch.tensor([0.3, -0.4, 0.1], dtype=torch.float64)
    enumerated = density(PROGRAMS[name], data())
    # slopes of a Poisson density at a rate of 0 are NaN
    is_closed = name == "zeros"
    by_hand = (density if is_closed else sum_of_all)(
        BY_HAND["zeros"] if is_closed else PROGRAMS[name], data()
    )
    torch.testing.assert_close(enumerated(point), by_hand(point), rtol=0.0, atol=1e-10)
    here, there = enumerated, by_hand
    for _ in range(2):
        here, there = torch.func.jacrev(here), torch.func.jacrev(there)
        torch.testing.assert_close(here(point), there(point), rtol=1e-8, atol=1e-8)
    points = point + 0.1 * torch.arange(6.0, dtype=torch.float64).view(2, 3)
    mapped = torch.vmap(enumerated)(points)
    torch.testing.assert_close(
        mapped, torch.stack([by_hand(p) for p in points]), rtol=0, atol=1e-10
    )


def test_a_mixture_of_parameters_that_a_plate_repeats_has_the_plates_shape() -> None:
    kinds = dist.Normal(torch.tensor([[0.0], [1.0]]), 1.0)
    log_weights = torch.tensor([[0.3], [0.7]]).log()
    for value in (torch.tensor(0.2), torch.tensor([0.2, 0.3, 0.4])):
        terms = [
            Mixture(fn, log_weights, 1) for fn in (kinds.expand((2, 3)), expanded(kinds, (2, 3)))
        ]
        plain, noted = (mixture.log_prob(value) for mixture in terms)
        assert noted.shape == (3,)
        torch.testing.assert_close(noted, plain, rtol=0.0, atol=0.0)


@pytest.mark.filterwarnings("ignore:do not trust the posterior", "ignore:the rounds ended")
@pytest.mark.parametrize(
    ("name", "method", "rounds"),
    [
        ("kinds", partial(methods.two_stage, draws=200), 2),
        ("row label", partial(methods.fedsvi, guide=guides.structured), 3),
        pytest.param("chain", methods.fedlaplace, 6, marks=pytest.mark.slow),
    ],
)
def test_methods_take_them_as_the_sum_by_hand(name: str, method: Any, rounds: int | None) -> None:
    fits = [
        hierfl.fit(method(model), data(), rounds=rounds, seed=0)
        for model in (PROGRAMS[name], BY_HAND[name])
    ]
    first, second = (fit.draws(100, seed=0) for fit in fits)
    for site, value in {**first.shared, "a": first.own["a"]}.items():
        there = {**second.shared, **second.own}[site]
        torch.testing.assert_close(value, there, rtol=1e-4, atol=1e-4)


def test_marked_sites_and_unmarked_ones_are_the_same() -> None:
    point = torch.tensor([0.3, -0.4, 0.1], dtype=torch.float64)
    marked = density(config_enumerate(chain, default="parallel"), data())
    assert torch.equal(marked(point), density(chain, data())(point))


@pytest.mark.filterwarnings("ignore:the rounds ended")
def test_predictions_average_over_labels() -> None:
    fit, by_hand = (hierfl.fit(of, data(), rounds=1) for of in (row_label, mixture_by_torch))
    torch.testing.assert_close(fit.predict(data()).mean, by_hand.predict(data()).mean)


@of_rows
def mixture_by_torch(batch: ClientBatch, own: Tensor, gain: Tensor, share: Tensor) -> None:
    locs = torch.stack(torch.broadcast_tensors(own, own + gain), -1)
    weights = torch.stack([1.0 - share, share]).expand(locs.shape)
    mixture = dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(locs, 0.7))
    pyro.sample("y", mixture, obs=batch.y)


# ------------------------------------------------------------ what is refused
def counts(batch: ClientBatch) -> None:
    with batch.clients(), batch.data():
        latent = pyro.sample("latent", dist.Poisson(2.0))
        pyro.sample("y", dist.Normal(latent, 1.0), obs=batch.y)


def of_all_clients(batch: ClientBatch) -> None:
    which = pyro.sample("which", dist.Bernoulli(0.5))
    with batch.clients(), batch.data():
        pyro.sample("y", dist.Normal(which, 1.0), obs=batch.y)


def all_pairs(batch: ClientBatch) -> None:
    with batch.clients(), batch.data():
        states = [pyro.sample(f"s_{t}", dist.Bernoulli(torch.tensor(0.4))) for t in range(22)]
        pyro.sample(
            "y", dist.Normal(torch.stack(torch.broadcast_tensors(*states)).sum(0), 1.0), obs=batch.y
        )


def rows_as_steps(batch: ClientBatch) -> None:
    stays = pyro.sample("stays", dist.Beta(8.0, 2.0))
    with batch.clients():
        state = torch.zeros(1, 1)
        for t in pyro.markov(range(8)):
            state = pyro.sample(f"s_{t}", dist.Bernoulli(torch.where(state == 1, stays, 1 - stays)))
            pyro.sample(f"y_{t}", dist.Normal(state, 1.0), obs=batch.y[:, t : t + 1])


@pytest.mark.slow("all_pairs-needs a table of .* 1,048,576 is the limit")
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (rows_as_steps, "rows are not steps of a chain"),
        (counts, "site 'latent' is discrete .* no finite support"),
        (of_all_clients, "'which' is discrete.*outside of batch.clients"),
        (all_pairs, f"needs a table of .* {LARGEST:,} is the limit"),
    ],
)
def test_what_cannot_be_summed_out_is_refused_by_name(model: Program, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        read(model, guides.delta, data())


# ------------------------------------------------------------ the labels afterwards
@cache
@cache
def fitted(model: Program) -> hierfl.Fit:
    """Return a quick fit: what is inferred of labels holds at whatever draws it has."""
    method = methods.fedsvi(model, guides.structured)
    return hierfl.fit(method, data(), rounds=1, seed=0, progress=False)


def share_of(fit: hierfl.Fit, site: str) -> tuple[Tensor, Tensor]:
    """Return the probabilities of 1 of a site, and the share of draws that are 1."""
    inferred = fit.infer_discrete(draws=2000, seed=0)
    chances = inferred.frame.loc[inferred.frame.site == site, 1].to_numpy()
    return torch.tensor(chances), inferred.draws[site].double().mean(0)


@pytest.mark.slow("chain-state_2")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch.func's own
@pytest.mark.filterwarnings("ignore:do not trust the posterior:UserWarning")
@pytest.mark.parametrize(
    ("name", "site"),
    [
        ("row label", "label"),
        ("nested labels", "first"),
        ("chain", "state_2"),
        ("kinds and labels", "kind"),
        ("kinds and labels", "label"),
        ("kinds of priors", "kind"),
        ("spikes", "which"),
        ("pilot", "which"),
    ],
)
def test_labels_are_drawn_by_their_probabilities(name: str, site: str) -> None:
    chances, share = share_of(fitted(PROGRAMS[name]), site)
    assert chances.min() > 0.0 and chances.max() < 1.0
    torch.testing.assert_close(share, chances, rtol=0.0, atol=0.05)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:do not trust the posterior:UserWarning")
def test_probabilities_of_a_label_are_those_by_hand() -> None:
    fit = fitted(row_label)
    draws = fit.draws(2000, seed=0)
    own = draws.own["a"].repeat_interleave(fit.federation.data.counts.long(), 1)
    y, share = fit.federation.data.fields["y"], draws.shared["share"][:, None]
    log_first = dist.Normal(own + draws.shared["gain"][:, None], 0.7).log_prob(y) + share.log()
    zero = dist.Normal(own, 0.7).log_prob(y) + torch.log1p(-share)
    by_hand = (log_first - torch.logaddexp(log_first, zero)).exp().mean(0)
    torch.testing.assert_close(share_of(fit, "label")[0], by_hand.double(), rtol=0.0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:do not trust the posterior:UserWarning")
def test_a_program_without_discrete_sites_has_no_labels() -> None:
    with pytest.raises(ValueError, match="no discrete latent site"):
        fitted(row_label_by_hand).infer_discrete()


def test_priors_are_evaluated_without_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server reads priors thousands of times: the elimination is of the likelihood alone."""
    program, batch = read(chain, guides.delta, data()), full_batch(data(), torch.arange(3))
    block = program.latents.global_block
    values = block.unflatten(block.start)[0]
    whole = sites_at(program, values, batch)
    assert program.factors and set(program.factors) <= set(whole)

    def refused(*args: Any) -> None:
        raise AssertionError("summed")

    monkeypatch.setattr("hierfl.program.enumerated.Tables.of", refused)
    alone = prior_sites_at(program, values, batch)
    assert set(alone) == set(whole) - set(program.factors)
    for name, site in alone.items():
        assert torch.equal(
            site["fn"].log_prob(site["value"]), whole[name]["fn"].log_prob(whole[name]["value"])
        )
