"""The mistakes of a first hour: one sentence each, which names the thing and the fix, and no
words of torch.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoContinuous
from pyro.nn import PyroModule, PyroSample

import hierfl
from hierfl import ClientBatch, ClientData, guides, methods, models, optimizers
from hierfl.engine.federation import federate, step_sizes
from hierfl.engine.rounds import begin
from hierfl.engine.rounds import rounds as run_rounds
from tests.programs import federation, fit

Body = Callable[[Any], Any]
# untyped, to be called wrongly
FIT: Any = hierfl.fit
TORCH = (
    "tensor a;singleton;mat1;batch2;scalar type;Trace Shapes;torch.Size;requires grad;aten::;"
    "has no attribute;NoneType;supported between"
).split(";")


def model_of(
    fn: Callable[[Any, Any], Any],
    obs: Callable[[ClientBatch], Any] | None = None,
    **options: Any,
) -> Body:
    """Return a model whose likelihood is a function of the batch and the local slopes."""

    def model(batch: ClientBatch) -> None:
        mean = pyro.sample(
            "mean", dist.Normal(torch.zeros(options.get("width", 2)), 1.0).to_event(1)
        )
        with batch.clients():
            w = pyro.sample("w", dist.Normal(mean, 1.0).to_event(options.get("event", 1)))
            with batch.data():
                pyro.sample("y", fn(batch, w), obs=obs(batch) if obs else batch.y)

    return model


def normal(loc: Any) -> Any:
    return dist.Normal(loc, 1.0)


right = model_of(lambda b, w: normal((b.x * w).sum(-1)))


def one_name_twice(batch: ClientBatch) -> None:
    mean = pyro.sample("w", dist.Normal(0.0, 1.0))
    with batch.clients():
        pyro.sample("w", dist.Normal(mean, 1.0))


def forgotten_call(batch: Any) -> None:
    with batch.clients:
        pass


def without_data_plate(batch: ClientBatch) -> None:
    with batch.clients():
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("y", normal((batch.x * w).sum(-1)), obs=batch.y)


def without_observation(batch: ClientBatch) -> None:
    with batch.clients(), batch.data():
        pyro.sample("y", dist.Normal(0.0, 1.0))


def global_without_event(batch: ClientBatch) -> None:
    pyro.sample("mean", dist.Normal(torch.zeros(2), 1.0))


def negative_scale(batch: ClientBatch) -> None:
    pyro.sample("mean", dist.Normal(0.0, -1.0))


def two_arguments(x: Any, y: Any) -> None:
    pass


def other_guide(batch: ClientBatch) -> None:
    with batch.clients():
        pyro.sample("v", dist.Normal(0.0, 1.0))


def single_guide(batch: ClientBatch) -> None:
    pyro.sample("mean", dist.Normal(torch.eye(2) @ torch.zeros(2).float(), 1.0).to_event(1))


def condition(b: ClientBatch, w: Any) -> Any:
    return normal(w[..., 0] if w.sum() > 0 and w[:, 0, 0] > 0 else -w[..., 0])


def classes(b: ClientBatch, w: Any) -> Any:
    return dist.Categorical(logits=torch.cat([w, -w[..., :1]], -1))


class Weighted(PyroModule):
    """A network whose weights have priors, called where rows are observed."""

    def __init__(self) -> None:
        super().__init__()
        layer: Any = PyroModule[torch.nn.Linear]
        self.layer = layer(2, 1)
        self.layer.weight = PyroSample(dist.Normal(torch.zeros(1, 2), 1.0).to_event(2))

    def forward(self, batch: ClientBatch) -> None:
        with batch.clients(), batch.data():
            pyro.sample("y", dist.Normal(self.layer(batch.x)[..., 0], 1.0), obs=batch.y)


def test_a_condition_on_a_value_runs_one_client_at_a_time() -> None:
    """Python's `if` needs the value of one client; the warning names the site."""
    with pytest.warns(UserWarning, match=r"site 'y' .*: clients run one at a time"):
        fitted = run(model_of(condition))()
    assert fitted.history["elbo"].abs().lt(1e6).all()


def run(
    model: Any = right, guide: Any = None, data: Any = None, **options: Any
) -> Callable[[], Any]:
    def start() -> Any:
        method = methods.fedsvi(model, **({} if guide is None else {"guide": guide}))
        rows = federation() if data is None else data(federation())
        return fit(method, rows, **{"rounds": 1, **options})

    return start


def with_y(change: Callable[[torch.Tensor], Any]) -> Callable[[ClientData], ClientData]:
    return lambda d: d.with_fields(y=change(d.fields["y"]))


def network(net: torch.nn.Module, **options: Any) -> Callable[[], Any]:
    return lambda: hierfl.fit(
        methods.fedavg(models.network(net, **options)),
        federation(),
        rounds=1,
        settings=hierfl.Settings(compile=False),
    )


LINE = r"in line \d+ of test_first_hour\.py, `.*`: "
FRAME = pd.DataFrame({"k": [0, 1], "x": [1.0, 2.0]})
MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    # the model
    "no to_event on a local site": (
        run(model_of(lambda b, w: normal((b.x * w).sum(-1)), event=0)),
        r"site 'w' has batch shape \(2, 2\); its plates \(clients\) require \(2, 1\): "
        r".*\.to_event\(1\)",
    ),
    "no to_event on a global site": (
        run(global_without_event),
        r"site 'mean' has batch shape \(2,\); .*to_event\(1\)",
    ),
    "no such field": (
        run(model_of(lambda b, w: normal(b.z))),
        LINE + "the data have no field 'z'; they have .*: correct",
    ),
    "a field by brackets": (run(model_of(lambda b, w: normal(b["x"]))), LINE + r".*write batch\.y"),
    "a plate of rows by another name": (
        run(model_of(lambda b, w: normal(b.rows()))),
        LINE + r"what is called is no function: .*the plate of rows is batch\.data\(\)",
    ),
    "another width": (
        run(model_of(lambda b, w: normal((b.x * w).sum(-1)), width=3)),
        LINE + "dimensions of 2 and 3 do not fit: align",
    ),
    "matrix product": (
        run(model_of(lambda b, w: normal(b.x @ w))),
        LINE + r"shapes do not fit: .*\(batch\.x \* w\)\.sum",
    ),
    "stacked": (
        run(model_of(lambda b, w: normal(torch.stack([w[..., 0], b.x[..., 0]], -1).sum(-1)))),
        LINE + r"values of different sizes are joined, .*broadcast_tensors\(\*values\)",
    ),
    "no sum": (
        run(model_of(lambda b, w: normal(b.x * w))),
        LINE + "site 'y' has 2 values where the plate 'data' has 5: ",
    ),
    "no data plate": (
        run(without_data_plate),
        r"site 'y' has batch shape \(2, 5\), one value per row, outside the data plate: put",
    ),
    "no obs": (
        run(without_observation),
        r"site 'y' is latent in the data plate, .*: observe it, obs= one of batch\.\w+",
    ),
    "a plate without its call": (run(forgotten_call), LINE + r".*`with batch\.clients\(\):`"),
    "two arguments": (
        run(two_arguments),
        r"called with one argument, the batch: write def model\(batch\)",
    ),
    "a negative scale": (
        run(negative_scale),
        LINE + "parameter 'scale' of Normal is out of its range: ",
    ),
    "one name twice": (run(one_name_twice), LINE + "two sites are named 'w': rename"),
    "float64 and float32": (
        run(guide=single_guide),
        LINE + r"numbers of different types are mixed: .*batch\.counts",
    ),
    "numpy in a model": (
        run(model_of(lambda b, w: normal(torch.as_tensor(np.exp(w.numpy()))[..., 0]))),
        r"site 'y' \(Normal\) of the model has no gradient .*: use .*torch functions in place of "
        r"NumPy's",
    ),
    "no model": (run(3), "the model is a int: give a function of a batch"),
    "a network for a model": (
        lambda: hierfl.fit(methods.fedavg(torch.nn.Linear(2, 1)), federation(), rounds=1),
        r"it is a network: wrap it, hierfl\.models\.network\(net\)",
    ),
    "a network's inputs": (
        network(torch.nn.Linear(5, 1).double()),
        "a matrix product of 10x2 by 5x1 does not fit: make the layer's inputs",
    ),
    "weights in the plate of rows": (
        run(Weighted()),
        LINE + "a layer's weights are sampled in the plate of rows, .*: call the network before",
    ),
    "a network of float32": (
        network(torch.nn.Linear(2, 3).float(), y="ill"),
        "numbers of different types are mixed",
    ),
    "data for a model": (run(federation()), "the model is a ClientData: give a function"),
    # the guide
    "a guide's name": (run(guide="mean_field"), r"the guide is a str 'mean_field': give a family"),
    "a guide of Pyro's that has no family": (
        run(guide=AutoContinuous),
        r"the guide is the class AutoContinuous, .*: give a family of hierfl\.guides",
    ),
    "a guide of another model": (
        run(guide=other_guide),
        "site 'mean' is in the model but not in the guide: add it",
    ),
    # labels
    "y of one column": (
        run(data=with_y(lambda y: y[:, None])),
        r"observes shape \(\) per row, but field 'y' has \(1,\): give one entry",
    ),
    "labels 1..C": (
        run(model_of(classes), data=with_y(lambda y: torch.arange(len(y)) % 3 + 1)),
        r"field 'y' of client '\w+' has the value 3, outside the support 0\.\.2 .*: code the "
        r"classes from 0, .* - 1\)",
    ),
    "one-hot labels": (
        run(model_of(classes), data=with_y(lambda y: torch.eye(3)[torch.arange(len(y)) % 3])),
        r"observes shape \(\) per row, but field 'y' has \(3,\): give one entry",
    ),
    # arguments of fit
    "rows for a method": (
        lambda: FIT(federation(), methods.fedsvi(right), rounds=1),
        "model is a ClientData: pass a model",
    ),
    "no method": (
        lambda: FIT(None, federation(), rounds=1),
        "model is None: pass a model",
    ),
    "a guide for a method": (
        lambda: FIT(guides.structured, federation(), rounds=1),
        "model is a .*: pass a model",
    ),
    "a fit for data": (
        lambda: FIT(methods.fedsvi(right), run()(), rounds=1),
        "data is a Fit, not ClientData: make it with",
    ),
    "rounds in words": (run(rounds="5"), r"rounds is '5': it must be an integer"),
    "rows for a fit": (
        lambda: hierfl.diagnostics.pac_bayes(federation()),  # type: ignore[arg-type]
        r"fit is a ClientData: pass what hierfl\.fit",
    ),
    "a method for a fit": (
        lambda: hierfl.diagnostics.summary(methods.fedsvi(right)),  # type: ignore[arg-type]
        r"fit is a Method: pass what hierfl\.fit",
    ),
    "draws in words": (
        lambda: run()().summary(draws="many"),
        r"draws is 'many': .*needs an integer",
    ),
    "a frame": (
        run(data=lambda d: FRAME),
        r"data is a DataFrame, not ClientData: make it with ClientData\.from_frame",
    ),
    "held-out frame": (run(validation=FRAME), "validation is a DataFrame, not ClientData: make"),
    "half a round": (run(rounds=2.5), r"rounds is 2\.5: it must be an integer"),
    "no seed": (run(seed=None), "seed is None: it must be an integer"),
    "a cohort in words": (
        run(cohort="all"),
        "cohort is 'all': it must be a count, a share or None",
    ),
    "an unknown device": (run(device="gpu"), "device='gpu' cannot be used here .*: use"),
}


@pytest.mark.filterwarnings("ignore:__array_wrap__")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_sentence_names_the_thing_and_the_fix(mistake: str) -> None:
    make, message = MISTAKES[mistake]
    with pytest.raises((ValueError, TypeError, hierfl.ClientError), match=message) as caught:
        make()
    words = str(caught.value)
    assert "\n" not in words and len(words) < 500
    assert not [leak for leak in TORCH if leak in words]


# ------------------------------------------------------------------ columns far from unit scale
def scaled(column: int, by: float) -> Callable[[ClientData], ClientData]:
    return lambda d: d.with_fields(
        x=torch.where(torch.arange(2) == column, by * d.fields["x"] + 4 * by, d.fields["x"])
    )


def test_a_column_far_from_unit_scale_is_named_with_standardize() -> None:
    with pytest.warns(
        UserWarning,
        match=r"column 1 of field 'x' has mean 7\d,\d+.* and sd 2\d,.*standardize\(.*\('x',\)\)",
    ):
        run(data=scaled(1, 2e4))()
    data = federation()
    data = hierfl.ClientData(
        {**scaled(0, 2e4)(data).fields},
        data.offsets,
        data.names,
        data.client_fields,
        {"x": ("income", "age")},
    )
    with pytest.warns(UserWarning, match="column 'income' of field 'x' has mean"):
        run(data=lambda d: data)()
    with pytest.warns(UserWarning, match="field 'y' has mean"):
        run(data=with_y(lambda y: 20_000.0 * y + 90_000.0))()


def test_what_is_no_feature_far_from_unit_scale_is_not_warned_of() -> None:
    """Scaled columns, fields that the model does not read, indices, and counts that are labels."""
    run(data=lambda d: hierfl.standardize(scaled(1, 2e4)(d))[0])()
    run(data=lambda d: d.with_fields(visits=1e6 * d.fields["visits"]))()
    table = torch.zeros(9000)
    run(
        model_of(lambda b, w: normal(w[..., 0] + table[b.place])),
        data=lambda d: d.with_fields(place=torch.full((d.num_rows,), 8000)),
    )()
    run(
        model_of(lambda b, w: dist.Poisson(w[..., 0].exp() * 5000)),
        data=with_y(lambda y: (y.abs() * 5000).round()),
    )()


# ------------------------------------------------------------------ step sizes
def test_step_sizes_are_those_of_the_method() -> None:
    assert step_sizes(methods.fedlaplace(right)) == ()
    assert step_sizes(methods.fedsvi(right)) == ("optimizer", "local_optimizer")
    gradient = methods.fedsvi(right, global_optimizer=optimizers.SGD(1e-3))
    assert step_sizes(gradient) == ("optimizer", "local_optimizer", "global_optimizer")
    net = models.network(torch.nn.Linear(2, 1), y="y")
    assert step_sizes(methods.fedavg(net)) == ("optimizer",)
    assert step_sizes(methods.over_relaxed(methods.fedavg(net))) == ("optimizer",)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("rates", [False, True])
def test_an_update_that_is_not_finite_speaks_of_what_the_method_has(
    rates: bool, first: int
) -> None:
    """In a first round little has grown by steps, so that rows may be at fault as well."""
    net = models.network(torch.nn.Linear(2, 1), likelihood=models.likelihood.normal(1.0))
    method = methods.fedavg(net, optimizer=optimizers.SGD(1e300), steps=5)
    has = method if rates else methods.fedlaplace(right)
    federation_ = replace(federate(method, federation()), method=has)
    with pytest.raises(hierfl.ClientError) as caught:
        list(run_rounds(federation_, replace(begin(federation_), round=first), 3))
    assert ("learning rate (optimizer)" in str(caught.value)) == rates
    assert ("standardize" in str(caught.value)) == (not rates or not first)


class Regression(PyroModule):
    """A model as Pyro's tutorials write it, with priors on a layer's parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = PyroSample(dist.Normal(0.0, 1.0))
        linear: Any = PyroModule[torch.nn.Linear]
        self.layer = linear(2, 1, bias=False)
        self.layer.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 2]).to_event(2))

    def forward(self, batch: ClientBatch) -> None:
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        linear = self.slope * batch.x + self.layer(batch.z)[..., 0]
        with batch.clients():
            own = pyro.sample("a", dist.Normal(0.0, tau))
            with batch.data():
                pyro.sample("y", dist.Normal(own + linear, 0.7), obs=batch.y)


def test_a_pyro_module_is_a_model() -> None:
    x, z, y = torch.randn(60), torch.randn(60, 2), torch.randn(60)
    data = ClientData.from_arrays(torch.arange(60) // 10, x=x, z=z, y=y)
    module = Regression()
    models: list[Any] = [module, lambda batch: module(batch)]
    fits = [fit(methods.fedsvi(m, guides.mean_field), data, rounds=2) for m in models]
    as_module, as_function = (fitted.draws(100).shared for fitted in fits)
    assert "layer.weight" in as_module
    for site, value in as_module.items():
        assert torch.equal(value, as_function[site]), site
