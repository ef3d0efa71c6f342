"""The bars of two_stage: what is asked, what counts as reached, and that the harness measures
it.
"""

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import bad_starts, many_clients, sbc_of_methods
from benchmarks.must_hold import Asked
from benchmarks.rounds import best_of, method_of
from benchmarks.rounds_models import ALL
from hierfl.engine.federation import federate

FOUND: dict[str, Any] = {
    "rounds": 3,
    "bytes": 1000,
    "rounds_in_all": 4,
    "max_mean_error_sd": 0.04,
    "sd_ratio_min": 0.96,
    "sd_ratio_max": 1.04,
    "seconds": 50.0,
    "k_hat": 0.3,
}


# ---------------------------------------------------------------------------------- bars
@pytest.mark.parametrize(
    "changed",
    [
        {"max_mean_error_sd": 0.06},
        {"max_mean_error_sd": float("nan")},
        {"sd_ratio_min": 0.94},
        {"sd_ratio_max": 1.06},
        {"rounds_in_all": 6},
        {"seconds": 70.0},
        {"k_hat": 0.7},
        {"stops": "no"},
    ],
)
def test_each_bar_can_fail(changed: dict[str, Any]) -> None:
    asked = Asked(0.05, 0.95, 1.05, rounds=5, seconds=60.0)
    assert asked.held(FOUND)
    assert not asked.held({**FOUND, **changed})


def test_k_hat_may_say_no_only_where_it_is_asked() -> None:
    off = {**FOUND, "max_mean_error_sd": 3.0, "k_hat": 0.9}
    assert Asked(or_no=True).held(off) and not Asked().held(off)
    assert not Asked(or_no=True).held({**off, "k_hat": 0.5})
    assert not Asked(or_no=True).held({**off, "k_hat": None})


# ---------------------------------------------------------------------------------- rounds


# ---------------------------------------------------------------------------------- bad starts
@pytest.mark.slow
def test_bad_starts_are_far_differ_and_reach_methods_that_take_one() -> None:
    problem = ALL["eight_schools_centered"]
    one, other = (bad_starts.options("fedlaplace", problem, n)["start"] for n in (0, 1))
    assert one.keys() == {"mu", "tau"} and one["tau"] > 0 and one["mu"] != other["mu"]
    mus = [float(bad_starts.far_values(problem, n)["mu"]) for n in range(30)]
    assert 10.0 < np.std(mus) < 22.0  # three times the prior's sd of 5
    assert bad_starts.options("fedsvi", problem, 0) == {}
    method_of("fedlaplace", best_of(problem).model, start=one)


def test_an_arrival_needs_small_errors_and_a_small_k_hat() -> None:
    good = {"max_mean_error_sd": 0.1, "k_hat": 0.4}
    assert bad_starts.arrived(good) and bad_starts.arrived({**good, "k_hat": None})
    for bad in ({"max_mean_error_sd": 0.2}, {"max_mean_error_sd": np.nan}, {"k_hat": 0.8}):
        assert not bad_starts.arrived({**good, **bad})
    assert not bad_starts.arrived({"stops": "no mode"})


# ---------------------------------------------------------------------------------- SBC and many
# clients
def test_replications_are_drawn_from_the_prior() -> None:
    truths = [sbc_of_methods.replication(seed)[0] for seed in range(400)]
    mu, tau = (np.array([one[site] for one in truths]) for site in ("mu", "tau"))
    assert np.std(mu) == pytest.approx(1.5, abs=0.2)
    assert np.mean(tau**2) == pytest.approx(1.0, abs=0.25) and (tau > 0).all()
    data = sbc_of_methods.replication(0)[1]
    assert data.counts.tolist() == list(sbc_of_methods.COUNTS)


def test_coverage_is_that_of_the_ranks_and_failures_are_counted() -> None:
    """True ranks are uniform; those of a posterior that is too narrow lie at the ends."""
    g = np.random.Generator(np.random.Philox(0))

    def records(narrow: bool) -> list[dict[str, Any]]:
        def rank(*shape: int) -> Any:
            n = g.integers(0, sbc_of_methods.DRAWS + 1, shape)
            return (np.where(n < 200, n // 4, 399 - (399 - n) // 4) if narrow else n).tolist()

        return [
            {
                "seed": seed,
                "ranks": {"mu": rank(), "tau": rank(), "a": rank(8)},
                "k_hat": 0.8 if seed == 0 else None,
                "rounds": 4,
                "seconds": 1.0,
            }
            for seed in range(500)
        ]

    right, narrow = (sbc_of_methods.coverage(records(n)) for n in (False, True))
    assert all(0.86 < value < 0.94 for value in right.values())
    assert all(value < 0.7 for value in narrow.values())
    found = sbc_of_methods.summary([*records(False), {"seed": 500, "stops": "no"}])
    assert found["failed"] == 1 and found["replications"] == 501 and found["k_hat_above_0.7"] == 1


def test_many_clients_cover_where_draws_are_the_posterior() -> None:
    g = torch.Generator().manual_seed(0)
    truth = torch.randn(2000, generator=g)
    draws = torch.randn(400, 2000, generator=g)
    assert many_clients.inside(draws, truth.numpy()).mean() == pytest.approx(0.9, abs=0.03)
    assert many_clients.inside(0.5 * draws, truth.numpy()).mean() < 0.7
    assert 0.01 < many_clients.peak() < 1000.0
    shared = {"mu": draws[:, 0], "tau": draws[:, 1], "slope": draws[:, 2:4] + 9.0}
    found = many_clients.of_globals(shared, {"mu": 0.0, "tau": 0.0, "slope": np.zeros(2)})
    assert found["global_coverage"] == "2 of 4" and found["largest_global_z"] > 5.0


def test_truth_of_the_many_clients_is_in_the_order_of_their_names() -> None:
    """Clients are sorted by name, and the effects they were drawn at are by number."""
    from benchmarks.simulated_models import poisson_federation

    data, truth = poisson_federation(120, fewest=40, most=50, seed=0)
    assert list(data.names) == sorted(data.names)
    residual = data.fields["y"] / data.fields["exposure"]
    mean = torch.zeros(120).double().index_add(0, data.row_client, residual.double()) / data.counts
    assert np.corrcoef(mean.clamp_min(0.01).log().numpy(), truth["a"])[0, 1] > 0.8


def test_a_misled_server_starts_elsewhere_and_differs_by_number() -> None:
    """Three prior sds away, at the median; fits to the same data start from the prior otherwise."""
    problem = ALL["hospitals"]  # a Gaussian hierarchy needs no belief
    method = method_of("two_stage", best_of(problem).model)
    starts = [
        federate(bad_starts.misled(method, number), problem.data()).server.state.belief.loc
        for number in (0, 1)
    ]
    plain = federate(method, problem.data()).server.state
    sd = plain.belief.covariance.diagonal().sqrt()
    away = torch.stack([(one - plain.belief.loc).abs() / sd for one in starts])
    assert (away > 0.0).all() and float(away.max()) > 1.0
    assert not torch.equal(*starts)
    assert bad_starts.options("two_stage", problem, 3) == {}
