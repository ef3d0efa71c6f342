"""What `hierfl audit` runs: a method by name on a model of the demo, or a user's own."""

from typing import Any, TypeVar

import pyro.distributions as dist
from torch import nn

from hierfl import methods
from hierfl.core.arguments import imported
from hierfl.data.clients import ClientData
from hierfl.data.consistency import field_of
from hierfl.demo.run import QUICK, hierarchy, hospitals
from hierfl.diagnostics.audit import Audit, audit
from hierfl.method import Method
from hierfl.methods.about import About, described
from hierfl.models import bayesian_network, likelihood, network

T = TypeVar("T")


def audited(method: str, data: str | None, **options: Any) -> Audit:
    """Audit a method of `hierfl.methods` on the demo's model, or a user's own "MODULE:NAME".

    Args:
        method: its name, or "MODULE:NAME".
        data: "MODULE:NAME"; None: the demo's hospitals, for a name with four of the features.
        options: of `hierfl.diagnostics.audit`.
    """
    own = ":" in method
    if data is None:  # with all 27 features, fedlaplace takes minutes
        rows = hospitals(None if own else QUICK.columns)
    else:
        rows = _of_kind(ClientData, data, "a hierfl.ClientData")
    if own:
        return audit(_of_kind(Method, method, "a hierfl method"), rows, **options)
    if (about := described(About).get(method)) is None:
        raise ValueError(
            f"there is no method '{method}': choose from {', '.join(sorted(described(About)))}, "
            "or name your own, MODULE:NAME"
        )
    try:
        return audit(getattr(methods, method)(_model(about, rows)), rows, **options)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"'{method}' does not run on the demo's model ({error}): build it with a model and "
            "options that it takes, as its page in the reference does, and name it MODULE:NAME"
        ) from error


def _model(about: About, data: ClientData) -> Any:
    """Return the demo's hierarchy or, for a method of weights or of global sites alone, a layer that has them."""
    if about.own != "none" and not about.guide.startswith("points"):
        return hierarchy(centered=True)
    layer = nn.Linear(field_of(data.fields, "x").shape[1], 1)
    if about.guide.startswith("points"):
        return network(layer, likelihood=likelihood.bernoulli())
    prior, yes = dist.Normal(0.0, 2.5), likelihood.bernoulli()
    return bayesian_network(layer, local="none", global_prior=prior, likelihood=yes)


def _of_kind(kind: type[T], text: str, what: str) -> T:
    held = imported(text)
    if not isinstance(held, kind):
        raise TypeError(f"'{text}' is a {type(held).__name__}: name {what}")
    return held
