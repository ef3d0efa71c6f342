"""Without rows, the method that is chosen for a model is the one that `hierfl.fit` chooses with them."""

import inspect
import itertools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch

import hierfl
from hierfl import ClientData, Settings, guides, methods, models
from hierfl.engine.federation import Disclose
from hierfl.nodes.agreement import Agreement, Introduction
from hierfl.nodes.choosing import FitCall, decided
from hierfl.nodes.messages import Refused
from hierfl.nodes.node import run_name
from hierfl.nodes.stations import station
from hierfl.program.recipes import describe
from hierfl.runs.choice import choose
from hierfl.summaries.row_noise import RowNoise
from tests.programs import federation, logistic, regression

NORMAL = models.likelihood.normal(1.0)


def apart(batch: Any) -> None:
    with batch.clients():
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with batch.data():
            pyro.sample("y", dist.Normal((batch.x * w).sum(-1), 1.0), obs=batch.y)


def counts(batch: Any) -> None:
    """Poisson labels, which every stand-in for rows must allow."""
    level = pyro.sample("level", dist.Normal(0.0, 1.0))
    with batch.clients():
        own = pyro.sample("own", dist.Normal(level, 0.5))
        with batch.data():
            pyro.sample("visits", dist.Poisson(own.exp()), obs=batch.visits)


def linear() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(2, 1)


MODELS: dict[str, Any] = {
    "regression": lambda: regression,
    "logistic": lambda: logistic,
    "apart": lambda: apart,
    "counts": lambda: counts,
    "network": lambda: models.network(linear(), likelihood=NORMAL),
    "bayesian_network": lambda: models.bayesian_network(linear(), likelihood=NORMAL),
    "learned_prior_network": lambda: models.learned_prior_network(linear(), likelihood=NORMAL),
}


def between(data: ClientData) -> Agreement:
    return Agreement.between([Introduction.of(data.select([name])) for name in data.names])


# Networks are given the same method either way.
BOTH = [
    *((name, "summaries") for name in ("regression", "counts", "network", "bayesian_network")),
    *((name, "sums") for name in ("logistic", "apart", "learned_prior_network")),
]


@pytest.mark.parametrize(("name", "disclose"), BOTH)
def test_the_choice_is_that_of_fit(name: str, disclose: Disclose) -> None:
    data, model = federation((5, 3, 7, 2)), MODELS[name]()
    found = decided(FitCall(model, disclose=disclose), between(data))
    expected = choose(model, data, settings=Settings(disclose=disclose, on_client_error="skip"))
    assert found.why == expected.why
    assert describe(found.method) == describe(expected.method)
    told = json.loads(json.dumps(describe(found.method)))
    made = FitCall(model).made_by(told)  # at a node
    assert run_name(made, between(data), 0) == run_name(found.method, between(data), 0)


def test_a_node_makes_methods_of_its_own_model_alone() -> None:
    told = describe(methods.fedsvi(regression))
    with pytest.raises(Refused, match="cannot be made here: the model that was passed is not"):
        FitCall(logistic).made_by(told)
    for wrong in (
        None,
        3,
        {"made_by": "os.system", "with": {"command": "true"}},
        {"named": "print"},
        # whose secret gives its noise away, and whose norm tells the longest row from the others
        describe(methods.two_stage(regression, row_noise=RowNoise(1e9, 0.1, 2.0, secret=0))),
    ):
        with pytest.raises(Refused, match="cannot be made here"):
            FitCall(regression).made_by(wrong)


def test_no_option_of_a_method_brings_another_model() -> None:
    """A formula in a recipe would be a question that no owner has approved: the node's model stood elsewhere."""
    own, others = models.regression("gaussian"), [models.regression("gaussian", y="secret")]
    others.append(hierfl.formula("y ~ secret + (1 | h)", clients="h"))
    builders = {name: getattr(methods, name) for name in methods.__all__}
    taken = 0
    for name, builder in builders.items():
        first, *options = inspect.signature(builder).parameters if callable(builder) else ("",)
        for option, other in itertools.product(options, others):
            of = {option: describe(methods.fedavg(own)), first: describe(other)}
            if first == "method":
                of[first] = describe(methods.two_stage(other))
            with pytest.raises(Refused):
                FitCall(own).made_by({"made_by": f"hierfl.methods.{name}", "with": of})
            taken += 1
    assert taken > 300


@pytest.mark.parametrize("option", ["validation", "fields"])
def test_a_servers_method_reads_no_field_that_the_model_does_not(
    option: str, tmp_path: Path
) -> None:
    own: Any = models.network(linear(), likelihood=NORMAL)
    part = federation((12,)).with_fields(secret=(torch.arange(12) > 5).double())
    method = methods.fedfomo(own, validation="secret", batch_size=None)
    if option == "fields":
        own = regression
        method = methods.fedsvi(own, guide=guides.amortized(fields=("secret",)))
    agreed = {"agreement": asdict(between(part)), "method": describe(method), "seed": 0}
    node = station(own, part, tmp_path)
    with pytest.raises(Refused, match="reads field 'secret', which the node's model does not"):
        node.reply("agree", json.dumps(agreed).encode())
    made = station(method, part, tmp_path / "own")  # the owner has named the method
    assert made.reply("agree", json.dumps(agreed).encode())


def test_a_servers_guide_is_no_likelihood_of_its_choice() -> None:
    own, guide = (models.regression(of, centered=True) for of in ("gaussian", "student"))
    with pytest.raises(Refused, match="is a model, not a guide"):
        FitCall(own).made_by(describe(methods.fedsvi(own, guide=guide)))


def test_rounds_of_a_chosen_method() -> None:
    agreement = between(federation((5, 3, 7, 2)))

    def rounds(**options: Any) -> int | None:
        return decided(FitCall(regression, **options), agreement)[1]

    assert rounds(disclose="sums") == 200
    assert rounds(disclose="sums", rounds=7) == 7
    assert rounds() is None  # two_stage stops by itself


def test_a_model_that_needs_rows_is_refused() -> None:
    def odd(batch: Any) -> None:
        if float(batch.x.std()) < 1e-3:
            raise ValueError("all the same")
        logistic(batch)

    with pytest.raises(ValueError, match=r"no method can be chosen without rows .*name one"):
        decided(FitCall(odd), between(federation((5, 3))))
