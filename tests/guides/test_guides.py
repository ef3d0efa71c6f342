"""Every guide family handles every kind of latent site of any model, and so do hand-written guides."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import hierfl
from hierfl import ClientBatch, full_batch, guides
from hierfl.core.trees import named_leaves
from hierfl.guides.global_sites import diagonal_normal, full_normal, low_rank_normal, spline_flow
from hierfl.program.handlers import Substitute
from hierfl.program.sites import Family
from tests.programs import FAMILIES, at_random, federation, fit, logistic, read, regression

# site -> shape of one draw (of one client for local sites), and support
SHAPES = {
    "real": ((), dist.constraints.real),
    "weights": ((3,), dist.constraints.simplex),
    "spread": ((2,), dist.constraints.positive),
    "share": ((), dist.constraints.unit_interval),
    "lower": ((2, 2), dist.constraints.corr_cholesky),
    "items": ((3,), dist.constraints.real),
    "own_vector": ((2,), dist.constraints.real),
    "own_rate": ((), dist.constraints.positive),
    "own_share": ((), dist.constraints.unit_interval),
    "own_weights": ((3,), dist.constraints.simplex),
    "own_items": ((3,), dist.constraints.real),
    "own_matrix": ((3, 2, 2), dist.constraints.positive),
}


def rich(batch: ClientBatch) -> None:
    """Global and local intervals, simplices, vectors, correlations, and a plate besides the clients'."""
    real = pyro.sample("real", dist.Normal(0.0, 1.0))
    weights = pyro.sample("weights", dist.Dirichlet(torch.full((3,), 2.0)))
    spread = pyro.sample("spread", dist.HalfNormal(1.0).expand([2]).to_event(1))
    share = pyro.sample("share", dist.Beta(2.0, 2.0))
    lower = pyro.sample("lower", dist.LKJCholesky(2, 1.5))
    with pyro.plate("global_items", 3, dim=-1):
        items = pyro.sample("items", dist.Normal(real, 1.0))
    with batch.clients():
        correlated = dist.MultivariateNormal(torch.zeros(2), scale_tril=spread[:, None] * lower)
        vector = pyro.sample("own_vector", correlated)
        rate = pyro.sample("own_rate", dist.LogNormal(real, 0.5))
        own_share = pyro.sample("own_share", dist.Uniform(0.0, 1.0))
        own_weights = pyro.sample("own_weights", dist.Dirichlet(1.0 + 3.0 * weights))
        with batch.plate("kinds", 3, dim=-3):
            own_items = pyro.sample("own_items", dist.Normal(items[:, None, None], 1.0))
            matrix = pyro.sample("own_matrix", dist.HalfNormal(torch.ones(2, 2)).to_event(2))
        loc = (batch.x * vector).sum(-1) + share * own_share + own_weights[..., 0]
        loc = loc + own_items.sum(0) + matrix.sum((0, -1, -2))
        with batch.data():
            pyro.sample("y", dist.Normal(loc, rate), obs=batch.y)


# vmap over the transform of a simplex or of a correlation gives this warning
@pytest.mark.slow("conditional", "mean_field")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_handles_every_kind_of_site(family: str) -> None:
    guide = guides.conditional(newton_steps=10) if family == "conditional" else FAMILIES[family]
    fitted = fit(hierfl.methods.fedsvi(rich, guide), federation((5, 3, 7)), rounds=2)
    draws = fitted.draws(7)
    found = {**draws.shared, **draws.own}
    assert set(found) == set(SHAPES)
    for name, (shape, support) in SHAPES.items():
        leading = (7, 3) if name.startswith("own") else (7,)
        assert found[name].shape == (*leading, *shape), name
        assert bool(support.check(found[name]).all()), name
        distinct = len(found[name].reshape(7, -1).unique(dim=0))
        assert distinct == (1 if family == "delta" else 7), name
    if family != "delta":
        assert len(draws.own["own_rate"].unique()) == 21, "all clients draw different values"
    assert fitted.history["elbo"].notna().all()


def test_conditional_without_a_mode_suggests_more_newton_steps() -> None:
    with pytest.raises(ValueError, match="after newton_steps=1, the log joint of a client is not"):
        fit(
            hierfl.methods.fedsvi(rich, guides.conditional(newton_steps=1)),
            federation((5, 3, 7)),
            rounds=1,
        )


def test_exported_guides_are_documented_and_keep_their_names() -> None:
    for name in guides.__all__:
        made = getattr(guides, name)
        assert (made.__doc__ or "").split("\n")[0].endswith((".", ":")), name
        assert made.__name__ == name
        if isinstance(made, Family):
            assert made.build.__name__ == name, "a saved recipe looks a family up by this name"


def test_later_options_override_earlier_ones() -> None:
    wide = guides.low_rank(rank=3)(init_scale=0.5)
    assert dict(wide.options) == {"rank": 3, "init_scale": 0.5}
    assert dict(wide(rank=1).options) == {"rank": 1, "init_scale": 0.5}
    assert dict(guides.low_rank.options) == {}
    with pytest.raises(TypeError, match="color"):
        read(regression, guides.low_rank(color=1), federation())


@pytest.mark.parametrize(
    ("family", "sizes"),
    # `regression` has 4 global and 2 local numbers
    [
        (guides.delta, {"loc.at": (2,), "spread.at": (), "lift.at": (), "slope.at": (1, 1, 2)}),
        (
            guides.low_rank(rank=3),
            {"_shared.factor": (4, 3), "_local.factor": (1, 1, 2, 3), "_local.loc": (1, 1, 2)},
        ),
        (
            guides.structured,
            {"_shared.lower": (4, 4), "_local.slope": (1, 1, 2, 4), "_local.lower": (1, 1, 2, 2)},
        ),
        (guides.structured(full=False), {"_local.slope": (1, 1, 2, 4), "_local.scale": (1, 1, 2)}),
        (guides.conditional, {"_shared.lower": (4, 4), "_shared.loc": (4,), "_shared.scale": (4,)}),
        (
            guides.amortized(hidden=5),
            {"_encoder.last.weight": (5, 4), "_encoder.row1.weight": (5, 5)},
        ),
    ],
)
def test_shapes_of_params(family: Family, sizes: dict[str, tuple[int, ...]]) -> None:
    shared, own = read(regression, family, federation()).start()
    found = {name: tuple(value.shape) for name, value in {**shared, **own}.items()}
    assert sizes.items() <= found.items()
    assert {name for name in own if name.startswith("_shared")} == set()
    if family.build in (guides.conditional.build, guides.amortized.build):
        assert own == {}, "clients keep no state"
    if family.options.get("full") is False:
        assert "_local.lower" not in found


@pytest.mark.slow("conditional")
@pytest.mark.parametrize("family", ["structured", "conditional", "amortized"])
def test_families_take_any_posterior_of_the_global_sites(family: str) -> None:
    batch = full_batch(federation(), torch.tensor([0]))
    for shared in (full_normal, diagonal_normal, low_rank_normal, spline_flow):
        program = read(regression, FAMILIES[family](shared=shared), federation())
        terms = program.terms(at_random(program, by=0.05), batch)
        assert all(bool(t.isfinite().all()) for t in terms), shared


@pytest.mark.slow("conditional-0.4")
@pytest.mark.parametrize("init_scale", [0.05, 0.4])
@pytest.mark.parametrize(
    "family", [name for name in FAMILIES if name not in ("delta", "structured_flow")]
)
def test_guides_start_at_the_prior_with_the_given_scale(family: str, init_scale: float) -> None:
    """Guides start at the middles of the priors, with standard deviation `init_scale`."""
    options: dict[str, Any] = (
        {"shared": lambda block: full_normal(block, init_scale=init_scale)}
        if "shared" in _options(family)
        else {}
    )
    options |= {"init_scale": init_scale} if "init_scale" in _options(family) else {}
    data = federation()
    program = read(regression, FAMILIES[family](**options), data)
    shared, own = program.start()
    batch = full_batch(data, torch.tensor([0]))
    # Pyro's checks look at values, which vmap does not allow
    with pyro.validation_enabled(False):
        draws = torch.vmap(lambda d: program.draw({**shared, **own}, batch.redrawn(d)))(
            torch.arange(500, dtype=torch.int32)
        )
    assert torch.allclose(draws["loc"].mean(0), torch.zeros(2), atol=5 * init_scale / 500**0.5)
    assert torch.allclose(draws["loc"].std(0), torch.tensor(init_scale), rtol=0.16)
    spread = draws["spread"].log()
    assert spread.mean().item() == pytest.approx(
        0.5 * torch.log(torch.tensor(2 / torch.pi)).item(), abs=5 * init_scale / 500**0.5
    )


def _options(family: str) -> set[str]:
    """Names of the options of a family."""
    code = FAMILIES[family].build.__code__
    return set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])


def local_params(
    batch: ClientBatch, params: dict[str, Tensor], program: hierfl.Program
) -> tuple[Tensor, Tensor]:
    """Mean and scale of the guide's local vector, (C, 1, D) each."""
    with Substitute(params, batch):
        nodes: Any = pyro.poutine.trace(program.guide).get_trace(batch).nodes
    site = nodes["_local"]["fn"].base_dist
    return site.loc, site.scale


@pytest.mark.parametrize("fields", [None, ("x",), ("x", "y")])
def test_amortized_ignores_padding_and_order(fields: tuple[str, ...] | None) -> None:
    data = federation((5, 3, 7))
    program = read(regression, guides.amortized(fields=fields, hidden=6), data)
    params = at_random(program)
    alone = local_params(full_batch(data, torch.tensor([0])), params, program)
    padded = local_params(full_batch(data, torch.tensor([2, 0])), params, program)
    order = torch.tensor([3, 1, 4, 0, 2, *range(5, 15)])
    permuted = data.with_fields(**{name: value[order] for name, value in data.fields.items()})
    shuffled = local_params(full_batch(permuted, torch.tensor([0])), params, program)
    again = type(data)(
        {k: data.fields[k] for k in reversed(list(data.fields))},
        data.offsets,
        data.names,
        data.client_fields,
    )
    reordered = local_params(full_batch(again, torch.tensor([0])), params, program)
    for k in range(2):
        assert torch.allclose(padded[k][1], alone[k][0], atol=1e-12), "padded rows have no effect"
        assert torch.allclose(shuffled[k], alone[k], atol=1e-12), "the order of rows has no effect"
        assert torch.allclose(reordered[k], alone[k], atol=1e-12), (
            "the order of fields has no effect"
        )
    other = local_params(full_batch(data, torch.tensor([1])), params, program)
    assert not torch.allclose(other[0], alone[0], atol=1e-3)


def test_amortized_names_the_missing_field() -> None:
    with pytest.raises(ValueError, match="the amortized guide reads the field 'age', which the"):
        read(regression, guides.amortized(fields=("x", "age")), federation())


def test_programs_of_one_family_share_no_state() -> None:
    one = read(regression, guides.structured, federation())
    before = {k: v.clone() for k, v in named_leaves(one.start()).items()}
    read(logistic, guides.structured, federation((3, 2)))
    assert all(torch.equal(v, before[k]) for k, v in named_leaves(one.start()).items())
