"""Batch norm for any method: statistics by NumPy and torch's own layers, on every engine, and refused by name."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

import hierfl
from hierfl import ClientData, Method, ProgramError, guides, methods, models
from hierfl.core.trees import named_leaves
from hierfl.engine.federation import federate
from hierfl.methods import batch_normed, fedavg
from hierfl.models.likelihood import normal
from hierfl.optimizers import SGD, Adam
from tests.methods import cases
from tests.methods.cases import CASES
from tests.methods.test_messages import exchange
from tests.programs import federation, fit
from tests.sampled import sampled

CLASSES = 3
EPS = 1e-5


def clients(
    shape: tuple[int, ...], rows: tuple[int, ...] = (24, 30, 18, 24), *, seed: int = 0
) -> ClientData:
    """Classes with patterns of their own, at a client's own level, on a scale far from 1."""
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(sum(rows)) % CLASSES
    patterns = torch.randn(CLASSES, *shape, generator=torch.Generator().manual_seed(3))
    x = 3.0 * (patterns[y] + 0.7 * torch.randn(sum(rows), *shape, generator=g))
    which = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows))
    return ClientData.from_arrays(which, x=x + 4.0 * which.view(-1, *[1] * len(shape)), y=y)


def mlp() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES)
    )


def cnn() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )


def line(*, normalized: bool = True) -> nn.Sequential:
    """A small network of two features, with one layer of batch norm with scale and shift and one without."""
    torch.manual_seed(2)
    layers = [nn.BatchNorm1d(2), nn.Linear(2, 3), nn.BatchNorm1d(3, affine=False), nn.Tanh()]
    layers = [v for v in layers if normalized or not isinstance(v, nn.BatchNorm1d)]
    return nn.Sequential(*layers, nn.Linear(3, 1))


def regression(*, normalized: bool = True) -> Any:
    return models.network(line(normalized=normalized), likelihood=normal(1.0))


def personal(net: nn.Module, scale: Any = 1.0) -> Any:
    return models.bayesian_network(net, prior_scale=scale, scale_start=0.05)


LOCAL: dict[str, Any] = {"optimizer": SGD(0.2), "steps": 4, "unit": "step", "batch_size": 12}


def fedsvi(net: nn.Module) -> Method:
    guide = guides.mean_field(init_scale=0.05)
    return methods.fedsvi(personal(net, "learned"), guide, optimizer=Adam(0.02), batch_size=12)


# cases whose model is of `cases.net`, which `normed` replaces
NAMES = (
    *("apfl", "clustered_fl", "ditto", "fedabml", "fedamp", "fedavg", "fedbabu", "fedem"),
    "fedfomo",
    *("fedhb", "fedhb_mixture", "fedmap", "fedpa", "fedpac", "fedrecon", "fedrep", "ifca"),
    *("knn_per", "local_only", "per_fedavg first", "pfedbayes", "pfedbred", "pfedhb", "pfedhn"),
    *("pfedme", "pfedvem", "scaffold", "fine_tuned mh", "robust", "over_relaxed"),
)


def with_layer(monkeypatch: pytest.MonkeyPatch, layer: Callable[[], nn.Module]) -> None:
    """Put a layer into the network of the cases."""

    def net(outputs: int = 1) -> nn.Module:
        return cases.filled(nn.Linear(2, 3), layer(), nn.Linear(3, outputs))

    monkeypatch.setattr(cases, "net", net)


@pytest.fixture
def normed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:  # of a model alone: equal programs are read once
        with_layer(patch, lambda: nn.BatchNorm1d(3))
        yield


def statistics(fitted: hierfl.Fit) -> dict[str, Tensor]:
    """The statistics of every client, (N, F), by name."""
    kept = fitted.progress.table.extra
    return {name: value[:, 0, 0] for name, value in kept.items()}


def apart(one: Any, other: Any) -> float:
    a, b = named_leaves(one), named_leaves(other)
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def sizes(tree: Any) -> dict[str, torch.Size]:
    return {path: leaf.shape for path, leaf in named_leaves(tree).items()}


def by_numpy(weights: dict[str, Tensor], x: Tensor) -> dict[str, np.ndarray[Any, Any]]:
    """The statistics of `line` and its output, by NumPy alone."""
    w = {name.removeprefix("theta."): value.numpy() for name, value in weights.items()}
    rows = x.numpy()
    first = rows.mean(0), rows.var(0)
    hidden = (rows - first[0]) / np.sqrt(first[1] + EPS) * w["0.weight"] + w["0.bias"]
    hidden = hidden @ w["1.weight"].T + w["1.bias"]
    second = hidden.mean(0), hidden.var(0)
    hidden = np.tanh((hidden - second[0]) / np.sqrt(second[1] + EPS))
    return {
        "statistics.0.mean": first[0],
        "statistics.0.var": first[1],
        "statistics.2.mean": second[0],
        "statistics.2.var": second[1],
        "output": (hidden @ w["4.weight"].T + w["4.bias"])[:, 0],
    }


def test_statistics_are_of_a_clients_own_rows_at_the_weights_it_is_served() -> None:
    """Clients of unequal size, padded; the weights are the server's mean, where no client's steps ended."""
    data = federation((5, 3, 9, 4))
    method = batch_normed(fedavg(regression(), optimizer=SGD(0.1), steps=3, batch_size=3))
    fitted = fit(method, data, rounds=3)
    found, predicted = statistics(fitted), fitted.predict(data, draws=1).mean
    for k, name in enumerate(data.names):
        own = data.select([name]).fields["x"]
        wanted = by_numpy(fitted.message, own)
        for part, value in found.items():
            np.testing.assert_allclose(value[k].numpy(), wanted[part], atol=1e-10, err_msg=part)
        at = data.row_client == k
        np.testing.assert_allclose(predicted[at].numpy(), wanted["output"], atol=1e-9)
    few = data.where(torch.arange(data.num_rows) < 2)
    first = fitted.predict(few, draws=1).mean
    assert torch.allclose(first, predicted[:2], atol=1e-12), (
        "a row is predicted whatever is beside it"
    )


def test_a_step_equals_torchs_own_layers_in_training() -> None:
    data, module, lr = clients((1, 6, 6), (9,)), cnn(), 0.1
    method = batch_normed(fedavg(models.network(module), optimizer=SGD(lr), steps=1))
    fitted = fit(method, data, rounds=1)
    module.train()
    loss = nn.functional.cross_entropy(module(data.fields["x"]), data.fields["y"])
    slopes = torch.autograd.grad(loss, list(module.parameters()))
    for (name, weight), slope in zip(module.named_parameters(), slopes, strict=True):
        weight.data -= lr * slope
        assert torch.allclose(fitted.message[f"theta.{name}"], weight, atol=1e-12), name
    inputs = module[0](data.fields["x"]).detach().transpose(0, 1).flatten(1)
    found = statistics(fitted)
    assert torch.allclose(found["statistics.1.mean"][0], inputs.mean(1), atol=1e-12)
    assert torch.allclose(found["statistics.1.var"][0], inputs.var(1, correction=0), atol=1e-12)
    with torch.no_grad():
        wanted = module(data.fields["x"]).softmax(-1)
    assert torch.allclose(fitted.predict(data, draws=1).mean, wanted, atol=1e-10)


def test_one_client_alone_equals_fedbn() -> None:
    """With one client it does not matter whether scale and shift are common."""
    data, options = federation((9,)), {"optimizer": SGD(0.1), "steps": 2, "batch_size": 4}
    ours = fit(batch_normed(fedavg(regression(), unit="epoch", **options)), data, rounds=3)  # type: ignore[arg-type]
    theirs = fit(methods.fedbn(regression(), unit="epoch", **options), data, rounds=3)  # type: ignore[arg-type]
    own = {name: value[0] for name, value in theirs.progress.table.method.params.items()}
    assert own
    for name, value in ours.message.items():
        assert torch.allclose(value, {**theirs.message, **own}[name], atol=1e-10), name
    for name, value in statistics(ours).items():
        assert torch.allclose(value, statistics(theirs)[name], atol=1e-10), name
    few = data.where(torch.arange(9) < 2)
    mine, other = (f.predict(few, draws=1).mean for f in (ours, theirs))
    assert torch.allclose(mine, other, atol=1e-10)


@pytest.mark.usefixtures("normed")
@pytest.mark.parametrize(
    "name", ["fine_tuned mh", "per_fedavg first", "apfl", "fedbabu", "pfedhn", "pfedbayes"]
)
def test_statistics_are_at_the_weights_that_each_client_predicts_by(name: str) -> None:
    """Also of clients in no cohort, of new ones, and at the mean of a posterior."""
    data, new = federation((7, 4, 9)), federation((5, 8), seed=5)
    fitted = fit(batch_normed(CASES[name].make()), data, rounds=2, cohort=1)
    later = [fitted.personalize(new, rounds=rounds) for rounds in (0, 1)]
    for held, rows in ((fitted, data), *((joined, new) for joined in later)):
        found = statistics(held)["statistics.1.mean"]
        for k, client in enumerate(rows.names):
            served = held.federation.client.params(held.message, _of(held.progress.table, k))
            kind = next(
                k for k in ("w.0.{}.loc", "w.0.{}.at", "theta.0.{}") if k.format("bias") in served
            )
            weight, bias = served[kind.format("weight")].reshape(3, 2), served[kind.format("bias")]
            own = rows.select([client]).fields["x"] @ weight.T + bias.flatten()
            assert torch.allclose(found[k], own.mean(0), atol=1e-10)


def test_each_component_of_a_mixture_has_statistics_of_its_own() -> None:
    data = clients((6,))
    method = methods.fedem(models.network(mlp()), components=2, **LOCAL)
    fitted = fit(batch_normed(method), data, rounds=2)
    found = statistics(fitted)
    for m in (0, 1):
        weight = fitted.message[f"{m}.theta.0.weight"]
        own = data.select([data.names[2]]).fields["x"] @ weight.T
        assert torch.allclose(found[f"{m}.statistics.1.mean"][2], own.mean(0), atol=1e-10)
        assert torch.allclose(found[f"{m}.statistics.1.var"][2], own.var(0, correction=0))
    assert not torch.allclose(found["0.statistics.1.mean"], found["1.statistics.1.mean"])


def _of(table: Any, k: int) -> Any:
    return torch.utils._pytree.tree_map(lambda v: v[k], table)


@pytest.mark.slow("pfedbayes")
@pytest.mark.parametrize("name", ["ditto", "fedem", "fedpac", "fedfomo", "pfedhn", "pfedbayes"])
def test_no_statistic_is_sent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What crosses is named and sized as for the same network with a layer of weights in the norm's place."""
    sent = {}
    for layer, wrapper in (
        (lambda: nn.BatchNorm1d(3), batch_normed),
        (lambda: nn.GroupNorm(1, 3), None),
    ):
        with_layer(monkeypatch, layer)
        method = CASES[name].make()
        message, up, kept, _ = exchange(wrapper(method) if wrapper else method, federation())
        sent[wrapper is None] = (
            sizes(message),
            {k: sizes(v.value) for k, v in up.items()},
            sizes(kept),
        )
    assert sent[False][:2] == sent[True][:2]
    own = {f".method{name}": size for name, size in sent[True][2].items()}
    beside = sent[False][2].keys() - own.keys()
    assert sent[False][2].items() >= own.items()
    assert beside and all("statistics." in name for name in beside)


@pytest.mark.usefixtures("normed")
@pytest.mark.parametrize("name", sampled(NAMES, 6))
def test_every_method_keeps_statistics_of_each_clients_rows(name: str) -> None:
    data, new = federation((6, 4, 8)), federation((5, 4), seed=8)
    fitted = fit(batch_normed(CASES[name].make()), data, rounds=1)
    for value in statistics(fitted).values():
        assert bool(value.isfinite().all())
    for rows, held in ((data, fitted), (new, fitted.personalize(new, rounds=1))):
        assert np.isfinite(held.predict(rows, draws=2).scores()["log_score"]).all()


def test_scores_of_rows_held_out_use_the_statistics_of_that_round() -> None:
    data, held = clients((6,)), clients((6,), seed=6)
    method = batch_normed(fedavg(models.network(mlp()), **LOCAL))
    fitted = fit(method, data, rounds=3, validation=held, eval_every=1)
    logged = fitted.history["validation_log_score"]
    for rounds in (1, 2, 3):
        alone = fit(method, data, rounds=rounds).predict(held, draws=1).log_score
        assert alone is not None
        assert logged[rounds - 1] == pytest.approx(float(alone.mean()), abs=1e-12)


@pytest.mark.parametrize(
    "wrapper", [methods.by_rows, lambda m: methods.averaging_some(m, share=0.5)]
)
def test_wrappers_of_the_server_may_be_inside_or_around(wrapper: Any) -> None:
    data, method = federation((5, 3, 7)), fedavg(regression(), steps=2)
    inside, around = batch_normed(wrapper(method)), wrapper(batch_normed(method))
    one, two = (fit(m, data, rounds=2) for m in (inside, around))
    assert apart(one.progress.table, two.progress.table) == 0.0
    assert torch.equal(one.predict(data, draws=1).mean, two.predict(data, draws=1).mean)


@pytest.mark.usefixtures("normed")
@pytest.mark.parametrize("name", sampled(NAMES, 6))
def test_without_it_every_method_refuses_batch_norm_by_name(name: str) -> None:
    advice = (
        r"layer '1' is batch norm, .*: wrap the method, hierfl.methods.batch_normed\(method\), use "
        r"hierfl.methods.fedbn"
    )
    with pytest.raises(ProgramError, match=advice):
        federate(CASES[name].make(), federation())


def shared(net: nn.Module) -> Any:
    """A network under a prior, for methods of a global posterior."""
    return models.bayesian_network(net, local="none", global_prior=dist.Normal(0.0, 1.0))


@pytest.mark.parametrize(
    "make",
    [
        lambda: methods.two_stage(shared(mlp())),
        lambda: methods.fedlaplace(shared(mlp())),
        lambda: methods.pvi(shared(mlp()), draws=2),
        lambda: methods.fedep(shared(mlp())),
        lambda: methods.bfi(shared(mlp())),
        lambda: methods.fedpop(personal(mlp())),
        lambda: methods.over_relaxed(methods.bfi(shared(mlp()))),
    ],
)
def test_methods_that_need_a_product_over_rows_are_refused(make: Callable[[], Method]) -> None:
    method = make()
    name = method.name.partition("+")[0]
    with pytest.raises(
        ProgramError, match=f"{name}.* needs a likelihood that is a product over rows"
    ):
        federate(batch_normed(method), clients((6,)))


def test_what_would_be_wrong_is_refused() -> None:
    data = clients((6,))
    method = fedavg(models.network(mlp()), **LOCAL)
    with pytest.raises(ProgramError, match=r"put it inside, batch_normed\(fine_tuned\(method\)\)"):
        fit(methods.fine_tuned(batch_normed(method)), data, rounds=1)
    steps = methods.fedsvi(personal(mlp(), 0.01), guides.conditional)
    with pytest.raises(ProgramError, match=r"guides.conditional evaluates the likelihood"):
        fit(batch_normed(steps), data, rounds=1)
    fitted = fit(batch_normed(method), data, rounds=1)
    with pytest.raises(ValueError, match="from statistics of its own rows: give it some"):
        hierfl.predict_from_prior(fitted, data)
    with pytest.raises(ProgramError, match="batch norm"):
        hierfl.fit(models.network(mlp()), data)


def test_a_layer_in_two_places_is_refused() -> None:
    norm = nn.BatchNorm1d(6)
    twice = nn.Sequential(norm, nn.Linear(6, 6), norm, nn.Linear(6, CLASSES))
    with pytest.raises(ValueError, match=r"'2' \(BatchNorm1d\) is in the module in two places"):
        models.network(twice)

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.dense = nn.BatchNorm1d(6), nn.Linear(6, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            answer: Tensor = self.dense(self.norm(self.norm(x)))
            return answer

    with pytest.raises(ProgramError, match="runs one layer of batch norm twice"):
        fit(batch_normed(fedavg(models.network(Again()))), clients((6,)), rounds=1)


def test_a_client_with_one_row_is_named_and_its_predictions_are_nan() -> None:
    data = federation((5, 3, 1))
    method = batch_normed(fedavg(regression(), steps=2, batch_size=None))
    with pytest.warns(UserWarning, match=rf"too few rows at '{data.names[2]}' .* \(clients: 1\)"):
        fitted = fit(method, data, rounds=1)
    scores = fitted.predict(data, draws=1).mean
    assert bool(scores[:8].isfinite().all())
    assert bool(scores[8].isnan())
    with pytest.warns(UserWarning, match="do not take part"):
        alone = fit(method, data, rounds=1, min_rows=2)
    assert bool(alone.predict(data.select([0, 1]), draws=1).mean.isfinite().all())
