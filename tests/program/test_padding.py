"""Programs whose log density depends on padding, or on several rows at once, are refused by the
site's name.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import hierfl
from hierfl import ClientBatch, ClientData, ProgramError, full_batch, guides, methods
from hierfl.program.check_dependence import check_apart, check_mini_batches, check_padding
from hierfl.program.sites import Model
from tests.programs import FAMILIES, federation, fit, read, regression

COUNTS = (40, 4, 4, 4)  # those of the issue


def clients(*counts: int) -> ClientData:
    g = torch.Generator().manual_seed(0)

    def one(n: int) -> dict[str, Tensor]:
        x = 1.0 + torch.randn(n, generator=g)
        return {
            "x": x,
            "y": x + torch.randn(n, generator=g),
            "visits": torch.poisson(torch.full((n,), 2.0), generator=g),
        }

    return ClientData.from_clients({f"c{k}": one(n) for k, n in enumerate(counts)})


@pytest.fixture
def data() -> ClientData:
    return clients(*COUNTS)


def model(inside: Callable[[ClientBatch, Tensor], Any]) -> Model:
    """Return a model with one local site, and whatever else is put inside the clients plate."""

    def program(batch: ClientBatch) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with batch.clients():
            inside(batch, pyro.sample("w", dist.Normal(mu, 2.0)))

    return program


def rows(batch: ClientBatch, loc: Tensor, scale: Tensor | float = 1.0) -> None:
    with batch.data():
        pyro.sample("y", dist.Normal(loc, scale), obs=batch.y)


def over_rows(batch: ClientBatch, w: Tensor) -> Tensor:
    """The latent site once a row, packed: (C, 1, B)."""
    return w[..., None].expand(batch.num_clients, 1, batch.num_rows)


# ------------------------------------------------------------------ observed outside the data plate
def unmasked(batch: ClientBatch, w: Tensor) -> None:
    pyro.sample("y", dist.Normal(over_rows(batch, w), 1.0).to_event(1), obs=batch.y[:, None])


def joint(batch: ClientBatch, w: Tensor) -> None:
    noise = torch.eye(batch.num_rows)
    fn = dist.MultivariateNormal(over_rows(batch, w), covariance_matrix=noise)
    pyro.sample("y", fn, obs=batch.y[:, None])


def of_a_client(batch: ClientBatch, w: Tensor) -> None:
    pyro.sample("first", dist.Normal(w, 1.0), obs=batch.x.mean(-1, keepdim=True))
    rows(batch, w)


def whole_numbers(batch: ClientBatch, w: Tensor) -> None:
    fn = dist.Poisson(over_rows(batch, w).exp()).to_event(1)
    pyro.sample("visits", fn, obs=batch.visits[:, None])


def factor(batch: ClientBatch, w: Tensor) -> None:
    rows(batch, w)
    pyro.factor("penalty", -(w * batch.x).square().sum(-1, keepdim=True))


UNMASKED = {
    "y": unmasked,
    "y (joint)": joint,
    "first": of_a_client,
    "visits": whole_numbers,
    "penalty": factor,
}


@pytest.mark.parametrize("counts", [COUNTS, (6, 6)])
@pytest.mark.parametrize("what", UNMASKED)
def test_an_observed_site_outside_the_data_plate_is_refused(
    what: str, counts: tuple[int, ...]
) -> None:
    """Of equal clients too, since the next one may be smaller."""
    site = what.split()[0]
    fixes = r"open batch\.data\(\) around it, or .*batch\.sum.*batch\.mask\(\).*client_fields="
    with pytest.raises(
        ProgramError,
        match=rf"(?s)site '{site}' is observed inside batch\.clients\(\) but outside batch\.data\(\).*{fixes}",
    ):
        read(model(UNMASKED[what]), guides.delta, clients(*counts))


def field_of_a_client(batch: ClientBatch, w: Tensor) -> None:
    pyro.sample("height", dist.Normal(w, 1.0), obs=batch.height)
    pyro.factor("pull", -w.square())
    rows(batch, w)


def test_what_is_observed_a_client_needs_no_mask(data: ClientData) -> None:
    clients = ClientData(
        fields=data.fields,
        offsets=data.offsets,
        names=data.names,
        client_fields={"height": torch.arange(4.0)},
    )
    assert not read(model(field_of_a_client), guides.delta, clients).joint


# ------------------------------------------------------------------ latent sites with a value per row
@pytest.mark.parametrize("counts", [COUNTS, (5, 5)])
def test_a_latent_site_with_a_value_a_row_is_refused(counts: tuple[int, ...]) -> None:
    def curve(batch: ClientBatch, w: Tensor) -> None:
        prior = dist.Normal(over_rows(batch, w), 1.0).to_event(1)
        rows(batch, pyro.sample("curve", prior)[:, 0])

    with pytest.raises(
        ProgramError, match=r"site 'curve' is latent and has one value per row.*sum it"
    ):
        read(model(curve), guides.delta, clients(*counts))


def test_a_latent_site_with_as_many_values_as_the_prototype_has_rows(data: ClientData) -> None:
    def five(batch: ClientBatch, w: Tensor) -> None:
        rows(batch, pyro.sample("five", dist.Normal(torch.zeros(5), 1.0).to_event(1)).sum(-1))

    assert read(model(five), guides.delta, data).latents.local_block.size == 6


# ------------------------------------------------------------------ densities that depend on
# padding
def mean_of_padded(batch: ClientBatch, w: Tensor) -> None:
    rows(batch, w * batch.x.mean(-1, keepdim=True))


def normalized_over_rows(batch: ClientBatch, w: Tensor) -> None:
    shift, scale = batch.x.mean(1, keepdim=True), batch.x.std(1, keepdim=True)
    rows(batch, w * (batch.x - shift) / scale)


def number_of_padded_rows(batch: ClientBatch, w: Tensor) -> None:
    rows(batch, w, 1.0 + 1.0 / batch.num_rows)


def later_row(batch: ClientBatch, w: Tensor) -> None:
    rows(batch, w * torch.cat([batch.x[:, 1:], torch.zeros_like(batch.x[:, :1])], 1))


def prior_of_rows(batch: ClientBatch, w: Tensor) -> None:
    spread = batch.x.square().mean(1, keepdim=True)
    rows(batch, w + pyro.sample("v", dist.Normal(0.0, spread)))


def derived(batch: ClientBatch, w: Tensor) -> None:
    pyro.deterministic("average", batch.x.mean(1, keepdim=True) * w)
    rows(batch, w)


def masked_wrongly(batch: ClientBatch, w: Tensor) -> None:
    total = (batch.mask() * batch.y).sum(-1, keepdim=True) / batch.num_rows
    pyro.sample("y", dist.Normal(w, 1.0), obs=total)


def scaled(batch: ClientBatch, w: Tensor) -> None:
    with pyro.poutine.scale(scale=1.0 / batch.num_rows):
        rows(batch, w)


def learned_from_zero(batch: ClientBatch, w: Tensor) -> None:
    """At the start of the param, 0, padding makes no difference."""
    slope = pyro.param("slope", torch.zeros(batch.num_clients, 1))
    rows(batch, w + slope * batch.x.mean(1, keepdim=True))


PADDED: dict[str, tuple[Callable[[ClientBatch, Tensor], Any], str]] = {
    "mean of rows": (mean_of_padded, "y"),
    "normalized over rows": (normalized_over_rows, "y"),
    "number of rows": (number_of_padded_rows, "y"),
    "later row": (later_row, "y"),
    "prior of rows": (prior_of_rows, "v"),
    "deterministic": (derived, "average"),
    "masked wrongly": (masked_wrongly, "y"),
    "scaled": (scaled, "y"),
    "param that starts at 0": (learned_from_zero, "y"),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("what", PADDED)
def test_a_density_that_depends_on_padding_is_refused(what: str, dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    inside, site = PADDED[what]
    with pytest.raises(
        ProgramError, match=rf"^site '{site}' depends on padding.*batch\.sum and batch\.mean"
    ):
        read(model(inside), guides.delta, clients(*COUNTS))


def test_clients_of_equal_sizes_are_not_padded() -> None:
    for inside, _ in PADDED.values():
        read(model(inside), guides.delta, clients(6, 6))


def test_other_rows_than_those_of_the_fit_are_padded_too() -> None:
    """New clients, and rows to predict, of different numbers, after a fit to clients of equal
    ones.
    """
    fitted = fit(methods.fedsvi(model(mean_of_padded), guides.structured), clients(6, 6), rounds=1)
    assert len(fitted.personalize(clients(3, 3), rounds=1).clients) == 2
    new = clients(5, 3)
    for ask in (
        lambda: fitted.personalize(new, rounds=1),
        lambda: fitted.predict(new, draws=2),
        lambda: hierfl.predict_from_prior(fitted, new.without("y"), draws=2),
    ):
        with pytest.raises(ProgramError, match="site 'y' depends on padding"):
            ask()


# ------------------------------------------------------------------ guides
def guide(loc: Callable[[ClientBatch], Tensor]) -> Callable[[ClientBatch], None]:
    def program(batch: ClientBatch) -> None:
        pyro.sample("mu", dist.Normal(pyro.param("mu.loc", torch.zeros(())), 0.1))
        slope = pyro.param("slope", torch.zeros(()))
        with batch.clients():
            pyro.sample("w", dist.Normal(slope * loc(batch), 0.1))

    return program


def plain(batch: ClientBatch, w: Tensor) -> None:
    rows(batch, w * batch.x)


def test_a_guide_that_depends_on_padding_is_refused(data: ClientData) -> None:
    with pytest.raises(ProgramError, match=r"^the guide's site 'w' depends on padding"):
        read(model(plain), guide(lambda batch: batch.y.mean(1, keepdim=True)), data)
    read(model(plain), guide(lambda batch: batch.mean(batch.y)), data)


@pytest.mark.slow("conditional")
@pytest.mark.parametrize("family", FAMILIES)
def test_hierfls_own_guides_need_no_padding_no_other_clients_and_no_other_rows(family: str) -> None:
    """The check of padding passes them by; here it does not."""
    data = federation()
    program = read(regression, FAMILIES[family], data)
    check_padding(replace(program, guide=lambda b: program.guide(b)), data)
    check_apart(program, data)
    check_mini_batches(program, data)
    check_mini_batches(program, data, priors_alone=True)


# ------------------------------------------------------------------ right programs
def mean_of_rows(batch: ClientBatch, w: Tensor) -> None:
    rows(batch, w * batch.mean(batch.x))


def standardized(batch: ClientBatch, w: Tensor) -> None:
    away = batch.x - batch.mean(batch.x)
    rows(batch, w * away / batch.mean(away.square()).sqrt())


def masked(batch: ClientBatch, w: Tensor) -> None:
    fn = dist.Normal(over_rows(batch, w), 1.0).mask(batch.packed(batch.mask())).to_event(1)
    pyro.sample("y", fn, obs=batch.packed(batch.y))


def jointly(batch: ClientBatch, w: Tensor) -> None:
    noise = torch.eye(batch.num_rows)
    fn = batch.joint_normal(over_rows(batch, w), noise)
    pyro.sample("y", fn, obs=batch.packed(batch.y))


def sufficient(batch: ClientBatch, w: Tensor) -> None:
    count = batch.sum(torch.ones_like(batch.y))
    pyro.sample("y", dist.Normal(w, count.rsqrt()), obs=batch.mean(batch.y))


def previous(batch: ClientBatch, w: Tensor) -> None:
    """An autoregression, with the row before as predictor."""
    before = torch.cat([torch.zeros_like(batch.y[:, :1]), batch.y[:, :-1]], 1)
    rows(batch, w * before)


RIGHT = {
    "mean of rows": mean_of_rows,
    "standardized": standardized,
    "masked": masked,
    "joint Normal": jointly,
    "sufficient statistic": sufficient,
    "autoregression": previous,
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("what", RIGHT)
def test_programs_that_leave_padding_out_are_read(what: str, dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    data = clients(*COUNTS)
    program = read(model(RIGHT[what]), guides.delta, data)
    check_apart(program, data)
    assert ("y" in program.joint) == (what in ("masked", "joint Normal", "sufficient statistic"))
    shared, own = program.start()
    everyone = full_batch(data, torch.arange(4))
    own = {name: v.repeat_interleave(4, 0) + 0.7 for name, v in own.items()}
    own = {name: v[0, None].expand(4, 1) for name, v in own.items()}
    together = program.terms({**shared, **own}, everyone).nll
    for k in range(4):
        mine = {name: v[k : k + 1] for name, v in own.items()}
        alone = program.terms({**shared, **mine}, full_batch(data, torch.tensor([k]))).nll
        torch.testing.assert_close(together[k : k + 1], alone)


# ------------------------------------------------------------------ all clients in one batch
def mean_over_clients(batch: ClientBatch, w: Tensor) -> None:
    rows(batch, w * (batch.x - batch.x.mean()))


@pytest.mark.parametrize("ask", ["pooled", "nuts", "sbc"])
def test_clients_that_depend_on_each_other_are_refused_where_all_are_together(ask: str) -> None:
    """Of clients of equal sizes no row is padded; alone each has its own mean."""
    program, data = model(mean_over_clients), clients(6, 6)
    method = methods.fedsvi(program, guides.structured)
    fit(method, data, rounds=1)
    calls: dict[str, Callable[[], Any]] = {
        "pooled": lambda: fit(method, data, rounds=1, engine="pooled"),
        "nuts": lambda: hierfl.diagnostics.nuts(program, data),
        "sbc": lambda: hierfl.diagnostics.sbc(program, guides.structured, data),
    }
    with pytest.raises(ProgramError, match=r"site 'y' depends on which clients are in the batch"):
        calls[ask]()


# ------------------------------------------------------------------ mini-batches
@pytest.mark.parametrize("what", RIGHT)
@pytest.mark.parametrize("counts", [COUNTS, (6, 6)])
def test_rows_that_need_others_are_refused_on_mini_batches(
    what: str, counts: tuple[int, ...]
) -> None:
    method = methods.fedsvi(model(RIGHT[what]), guides.delta, batch_size=5)
    with pytest.raises(
        ProgramError,
        match=r"^site 'y' depends on several rows .*leave batch_size at None.*with_fields\(previous=",
    ):
        fit(method, clients(*counts), rounds=1)


def learned(batch: ClientBatch) -> None:
    """An autoregression whose coefficient is learned, from 0, where no row depends on another."""
    slope = pyro.param("slope", torch.zeros(()))
    with batch.clients():
        previous(batch, slope)


def learned_prior(batch: ClientBatch) -> None:
    mean = pyro.param("mean", torch.zeros(()))
    with batch.clients():
        previous(batch, pyro.sample("w", dist.Normal(mean, 1.0)))


BY_BATCHES: dict[str, Callable[[int | None], hierfl.Method]] = {
    "fedavg": lambda size: methods.fedavg(learned, steps=1, batch_size=size),
    "fedavg, epochs": lambda size: methods.fedavg(learned, steps=1, unit="epoch", batch_size=size),
    "ditto": lambda size: methods.ditto(learned, steps=1, batch_size=size),
    "apfl": lambda size: methods.apfl(learned, steps=1, batch_size=size),
    "fedbabu": lambda size: methods.fedbabu(learned, head="none", batch_size=size),
    "fedrecon": lambda size: methods.fedrecon(learned, head="none", batch_size=size, split=False),
    "fedrep": lambda size: methods.fedrep(learned, head="none", batch_size=size),
    "fedmap": lambda size: methods.fedmap(learned_prior, steps=1, batch_size=size),
    "fedabml": lambda size: methods.fedabml(learned_prior, guides.mean_field, batch_size=size),
    "pfedme": lambda size: methods.pfedme(learned_prior, steps=1, batch_size=size),
}


@pytest.mark.parametrize("name", BY_BATCHES)
def test_every_method_refuses_them_by_its_own_option(name: str, data: ClientData) -> None:
    with pytest.raises(ProgramError, match=r"^site 'y' depends on several rows"):
        fit(BY_BATCHES[name](2), data, rounds=1)
    fit(BY_BATCHES[name](None), data, rounds=1)  # some look at a row: that is no mini-batch


@pytest.mark.parametrize("size", [None, 2])
def test_halves_of_the_rows_refuse_them_too(size: int | None, data: ClientData) -> None:
    method = methods.fedrecon(learned, head="none", batch_size=size)
    with pytest.raises(ProgramError, match=r"^site 'y' depends on several rows .* set split=False"):
        fit(method, data, rounds=1)


def test_a_program_that_cannot_be_compared_is_warned_of(data: ClientData) -> None:
    """It is made for the five rows that it is read on, and fails on others."""

    def inside(batch: ClientBatch, w: Tensor) -> None:
        assert batch.num_rows == 5
        rows(batch, w)

    with pytest.warns(
        UserWarning, match="whether it depends on padding or on other rows is not known"
    ):
        read(model(inside), guides.delta, data)


def test_equal_labels_do_not_hide_an_autoregression() -> None:
    """The first rows of the largest client are all equal: others show the dependence."""
    y = torch.zeros(30)
    y[-4:] = torch.arange(4.0)
    data = ClientData.from_clients({"a": {"y": y}, "b": {"y": y[:20]}})
    program = read(model(previous), guides.delta, data)
    with pytest.raises(ProgramError, match="site 'y' depends on several rows"):
        check_mini_batches(program, data)


def test_a_prior_that_reads_rows_is_refused_where_methods_look_at_one_row(data: ClientData) -> None:
    def program(batch: ClientBatch) -> None:
        mu = pyro.param("mu", torch.zeros(()))
        with batch.clients():
            rows(batch, pyro.sample("w", dist.Normal(mu * batch.mean(batch.x), 1.0)))

    reading = read(program, guides.delta, data)
    with pytest.raises(ProgramError, match=r"site 'w' depends on several rows .*client field"):
        check_mini_batches(reading, data, priors_alone=True)


# ------------------------------------------------------------------ labels that a site is computed
# from
def test_an_autoregression_cannot_be_predicted_without_labels(data: ClientData) -> None:
    fitted = fit(methods.fedsvi(model(previous), guides.structured), data, rounds=1)
    assert fitted.predict(data, draws=2).log_score is not None
    for ask in (
        fitted.predict,
        fitted.replicate,
        lambda d, draws: hierfl.predict_from_prior(fitted, d),
    ):
        with pytest.raises(
            ValueError, match="site 'y' is computed from field 'y', which the rows do not have"
        ):
            ask(data.without("y"), draws=2)


def test_data_sets_of_an_autoregression_cannot_be_drawn(data: ClientData) -> None:
    with pytest.raises(ProgramError, match="site 'y' is computed from the field 'y'"):
        hierfl.diagnostics.sbc(
            model(previous), guides.structured, data, replications=2, draws=3, steps=1
        )
