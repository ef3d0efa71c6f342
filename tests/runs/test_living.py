"""Clients leave a fit of two_stage and join it: the posteriors are those of closed forms and of grids."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import hierfl
from hierfl import AnotherRound, ClientData, Fit
from hierfl.core.trees import Tree, named_leaves
from hierfl.methods.stages import kept
from hierfl.methods.stages.weighted import Weighted, weighted
from tests.programs import exact, federation, fit, slopes
from tests.summaries import programs
from tests.summaries.programs import binary_rows, grid, moments, people, posterior_on
from tests.summaries.test_not_normal import student

two_stage = hierfl.methods.two_stage
COUNTS = (9, 4, 12, 6, 8, 15)


@cache
def gaussian() -> Fit:
    return fit(two_stage(slopes, draws=4000), federation((5, 3, 7, 2)))


@cache
def binary() -> Fit:
    return fit(two_stage(programs.binary, draws=4000), people(COUNTS))


def others(data: ClientData, *out: str) -> ClientData:
    return data.select([name for name in data.names if name not in out])


def is_exact(found: Fit, data: ClientData) -> None:
    """Compare with the closed form of `slopes`."""
    known = exact(data, "slopes")
    drawn = found.draws(4000)
    g, b = drawn.shared["g"].double(), drawn.own["b"].double()
    sd = known.cov.diagonal().sqrt()
    torch.testing.assert_close(g.mean(0) / sd, known.loc / sd, atol=0.04, rtol=0.0)
    torch.testing.assert_close(g.std(0) / sd, torch.ones_like(sd), atol=0.04, rtol=0.0)
    for name in data.names:
        ours, there = found.clients.index(name), data.names.index(name)
        sd = known.own_cov[there].diagonal().sqrt()
        apart = (b[:, ours].mean(0) - known.own_loc[there]) / sd
        assert float(apart.abs().max()) < 0.06
        assert float((b[:, ours].std(0) / sd - 1.0).abs().max()) < 0.05


def is_on_grid(found: Fit, data: ClientData, *, sd_error: float = 0.05) -> None:
    """Compare with the posterior of `binary` on a grid."""
    mu, tau = grid()
    p, levels = posterior_on(mu, tau, -0.5 * (mu / 1.5) ** 2 - 0.5 * tau**2, binary_rows(data))
    drawn = found.draws(4000)
    known = [moments(p, mu), moments(p, tau), *levels]
    own = {name: drawn.own["a"][:, k] for k, name in enumerate(found.clients)}
    draws = [drawn.shared["mu"], drawn.shared["tau"], *(own[name] for name in data.names)]
    for x, (mean, sd) in zip(draws, known, strict=True):
        assert abs(float(x.mean()) - mean) < 0.1 * sd
        assert float(x.std()) == pytest.approx(sd, rel=sd_error)


def test_draws_whose_sds_rest_on_a_few_give_way_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """k-hat is one of weights alone; that of the draw that makes up a variance may be small."""
    tried, weigh = list[Weighted](), weighted
    poor = 1

    def noted(*of: Any) -> Weighted:
        found, fails = weigh(*of), len(tried) >= poor
        tried.append(found._replace(of_sds=torch.full((2,), 0.4) if fails else found.of_sds))
        return tried[-1]

    monkeypatch.setattr(kept, "weighted", noted)
    found = binary().without("c1")
    assert all(one.is_good(0.25) for one in tried)
    chosen = found.progress.server.final.draws
    torch.testing.assert_close(chosen, tried[0].state.final.draws)
    tried.clear()
    poor = 0
    with pytest.warns(UserWarning, match="the spread of 'mu' rests on a few draws.* 40%"):
        binary().without("c1")


@pytest.mark.parametrize("client", ["north", "west"])
def test_without_a_client_sums_give_the_exact_posterior(client: str) -> None:
    found = gaussian().without(client)
    is_exact(found, others(gaussian().federation.data, client))
    last = found.history.iloc[-1]
    assert (last["bytes_down"], last["bytes_up"]) == (0, 0)


@pytest.mark.parametrize("client", ["c1", "c2"])
def test_without_a_client_weights_give_the_posterior_on_a_grid(client: str) -> None:
    found = binary().without(client)
    is_on_grid(found, others(binary().federation.data, client))
    assert found.history["k_hat"].iloc[-1] < 0.7


def test_clients_leave_one_after_another() -> None:
    found = binary().without("c1").without("c4")
    # 1,100 draws are effective: an sd is known to 3%
    is_on_grid(found, others(binary().federation.data, "c1", "c4"), sd_error=0.08)
    assert found.certificates["client"].tolist() == ["c1", "c4"]


def test_nothing_of_the_client_is_in_what_is_returned() -> None:
    fitted = binary()
    factors = fitted.progress.server.factors
    place = int(fitted.federation.program.ranks[fitted.clients.index("c2")])
    found = fitted.without("c2")
    assert "c2" not in found.clients
    secret = secrets_of(factors, place)
    kept = b"".join(content_of([found.progress.server, found.progress.table]))
    assert all(part in b"".join(content_of(fitted.progress.server)) for part in secret)
    assert not any(part in kept for part in secret)
    (row,) = found.certificates.to_dict("records")
    assert (row["client"], row["rows"]) == ("c2", 12) and row["before"] != row["after"]


def content_of(tree: Tree) -> list[bytes]:
    return [v.contiguous().numpy().tobytes() for v in named_leaves(tree).values()]


def secrets_of(factors: Tree, place: int) -> list[bytes]:
    """Return the bytes of the numbers that a client has sent; zeros are no secret."""
    parts = [getattr(factors, name)[place].reshape(-1) for name in ("precision", "shift")]
    return [v.numpy().tobytes() for part in parts for v in part if float(v) != 0.0]


@pytest.mark.slow
def test_a_program_with_local_sites_that_are_not_normal() -> None:
    data = people(COUNTS)
    found = fit(two_stage(student), data).without("c1", rounds=4)
    again = fit(two_stage(student, draws=1000), others(data, "c1"))
    for name, value in again.draws(1000).shared.items():
        x = found.draws(1000).shared[name]
        assert abs(float(x.mean() - value.mean())) < 0.15 * float(value.std())
        assert float(x.std()) == pytest.approx(float(value.std()), rel=0.12)


def test_nothing_of_the_client_is_left_in_the_folder(tmp_path: Path) -> None:
    fitted = binary()
    fitted.save(tmp_path / "fit", with_data=True)
    place = int(fitted.federation.program.ranks[fitted.clients.index("c3")])
    secret = secrets_of(fitted.progress.server.factors, place)
    assert all(part in bytes_of(tmp_path) for part in secret)
    found = fitted.without("c3", folder=tmp_path / "fit")
    left = bytes_of(tmp_path)
    assert not any(part in left for part in secret)
    back = hierfl.load(tmp_path / "fit", model=programs.binary)
    assert back.clients == found.clients and back.certificates.equals(found.certificates)
    assert torch.equal(back.draws(50).shared["mu"], found.draws(50).shared["mu"])
    assert back.federation.data.num_rows == sum(COUNTS) - 6
    (said,) = json.loads((tmp_path / "fit" / "withdrawn.json").read_text())
    assert said["client"] == "c3" and said["after"] == found.certificates["after"][0]
    again = back.without("c0", folder=tmp_path / "fit")
    assert again.certificates["client"].tolist() == ["c3", "c0"]


def bytes_of(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def test_a_folder_of_another_fit_is_left_as_it_is(tmp_path: Path) -> None:
    gaussian().save(tmp_path)
    before = bytes_of(tmp_path)
    with pytest.raises(hierfl.CheckpointError, match="does not hold this fit"):
        binary().without("c3", folder=tmp_path)
    assert bytes_of(tmp_path) == before


@pytest.mark.filterwarnings("ignore:the rounds ended")
def test_refusals() -> None:
    with pytest.raises(KeyError, match="client 'mars' is not in this fit, but"):
        binary().without("mars")
    averaged = fit(hierfl.methods.fedsvi(slopes), federation((5, 3)), rounds=2)
    with pytest.raises(ValueError, match="two_stage keeps, and this fit is of 'fedsvi'"):
        averaged.without("north")
    one = fit(two_stage(slopes, draws=200), federation((5,)))
    with pytest.raises(ValueError, match="is the only one"):
        one.without(one.clients[0])
    early = fit(two_stage(programs.binary, draws=200), people((5, 3, 7)), rounds=1)
    with pytest.raises(ValueError, match="two_stage is not done"):
        early.without("c1")


def with_other_ratios(server: Any) -> Any:
    g = torch.Generator().manual_seed(0)
    return replace(server, each=3.0 * torch.randn(server.each.shape, generator=g).double())


@pytest.mark.slow
def test_log_ratios_that_no_quadratic_holds_ask_for_another_round() -> None:
    fitted = binary()
    server = with_other_ratios(fitted.progress.server)
    odd = replace(fitted, progress=replace(fitted.progress, server=server))
    with pytest.raises(AnotherRound, match=r"k-hat .*they have to weight new draws"):
        odd.without("c1")
    found = odd.without("c1", rounds=6)  # the others weight new draws
    is_on_grid(found, others(fitted.federation.data, "c1"))
    assert found.history["clients"].iloc[-2] == 5 and found.certificates["client"][0] == "c1"
    is_on_grid(found.without("c4"), others(fitted.federation.data, "c1", "c4"), sd_error=0.08)


def test_draws_without_weight_say_nothing() -> None:
    """A proposal's draws may lie where scales have no digits left, and log ratios mean nothing."""
    fitted = binary()
    server = fitted.progress.server
    log_weights, each = server.final.log_weights.clone(), server.each.clone()
    log_weights[::10], each[::10] = -torch.inf, 500.0
    final = replace(server.final, log_weights=log_weights.log_softmax(0))
    server = replace(server, final=final, each=each)
    odd = replace(fitted, progress=replace(fitted.progress, server=server))
    is_on_grid(odd.without("c1"), others(fitted.federation.data, "c1"))
    table = hierfl.diagnostics.sensitivity(odd).table
    expected = hierfl.diagnostics.sensitivity(fitted).table
    apart = (table["per_percent"] - expected["per_percent"]).abs()
    assert (apart < 3.0 * expected["error"] + 1e-4).all()


def test_a_client_joins_by_its_sums_alone() -> None:
    data = federation((5, 3, 7, 2))
    before = fit(two_stage(slopes, draws=4000), others(data, "east"))
    found = before.updated(data.select(["east"]))
    is_exact(found, data)
    assert found.history["clients"].tolist() == [3, 1]


def test_a_client_joins_and_the_others_send_nothing() -> None:
    data = people(COUNTS)
    before = fit(two_stage(programs.binary, draws=4000), others(data, "c2"))
    found = before.updated(data.select(["c2"]))
    is_on_grid(found, data)
    new = found.history.iloc[len(before.history) :]
    assert new["clients"].tolist() == [1, 1] and new["k_hat"].iloc[-1] < 0.7


def test_a_client_has_new_rows() -> None:
    data = people(COUNTS)
    early = data.where(~((data.row_client == 5) & (torch.arange(data.num_rows) > 45)))
    before = fit(two_stage(programs.binary, draws=4000), early)
    found = before.updated(data.select(["c5"]))
    is_on_grid(found, data)
    assert found.federation.data.num_rows == data.num_rows
    is_on_grid(found.without("c1"), others(data, "c1"))


def test_others_are_asked_again_where_their_log_ratios_cannot_be_carried_over() -> None:
    data = people(COUNTS)
    before = fit(two_stage(programs.binary, draws=2000), others(data, "c2"))
    server = with_other_ratios(before.progress.server)
    odd = replace(before, progress=replace(before.progress, server=server))
    with pytest.warns(UserWarning, match="the 5 other clients were asked again, in 1 rounds"):
        found = odd.updated(data.select(["c2"]))
    is_on_grid(found, data)
    assert found.history["clients"].tolist()[-2:] == [1, 6]


def test_rows_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    data = people(COUNTS)
    with pytest.raises(ValueError, match="the rows have no field 'ill'"):
        binary().updated(data.select(["c2"]).without("ill"))
    binary().save(tmp_path)
    with pytest.raises(hierfl.RowsNotSaved, match="the rows of the other clients were not saved"):
        hierfl.load(tmp_path, method=binary().method).updated(data.select(["c2"]))
