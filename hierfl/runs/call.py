"""The arguments of `fit`, and the checks of their kinds before any work is done."""

from __future__ import annotations

import inspect
import numbers
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pyro.nn import PyroModule
from torch import Tensor

from hierfl import methods, models
from hierfl.core.arguments import expect
from hierfl.data.clients import ClientData
from hierfl.data.expected import FRAME, expect_client_data, is_frame
from hierfl.engine.settings import Settings
from hierfl.method import Method
from hierfl.program.program import Program
from hierfl.program.recipes import recipe_of
from hierfl.program.sites import Family

if TYPE_CHECKING:
    from hierfl.runs.result import Fit

# what is no argument of `fit` -> where it belongs
ELSEWHERE = {
    field.name: f"settings=hierfl.Settings({field.name}=...)" for field in fields(Settings)
}
NOT_OF_FITS = dict.fromkeys(
    ("draws", "samples", "chains", "warmup"), "fit.posterior(draws=...), once it is fitted"
)
NOT_OF_FITS |= dict.fromkeys(
    ("family", "clients", "priors", "schema", "missing"),
    "hierfl.formula(text, family, clients=...), the model of hierfl.fit(formula, frame)",
)
ELSEWHERE |= {"nodes": "hierfl.nodes.fit(model, nodes, ...)", "method": "fit(method, data, ...)"}
ELSEWHERE |= NOT_OF_FITS
NAMED = 5  # clients in a warning
OR_NONE = ("rounds", "cohort", "patience")


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of `hierfl.fit` after the model and the data, checked."""

    rounds: int | None
    seed: int
    cohort: int | float | None
    checkpoint: Path | None
    checkpoint_every: int
    resume: bool
    validation: ClientData | None
    eval_every: int
    patience: int | None
    callback: Callable[[Fit], object] | None
    progress: bool
    settings: Settings
    time_limit: float | None = None  # seconds
    lines: bool = False  # whether a long run says every ten seconds how far it is

    def __post_init__(self) -> None:
        """Refuse arguments of another kind, or out of range."""
        if self.validation is not None:
            expect_client_data(self.validation, "validation")
        for name in ("rounds", "checkpoint_every", "eval_every", "seed", "cohort", "patience"):
            check_count(name, getattr(self, name))
        if self.time_limit is not None:
            expect(time_limit=(self.time_limit, "(0, inf)"))
        if self.callback is not None and not callable(self.callback):
            raise TypeError(
                f"callback is {self.callback!r}: it must be a function of the fit, or None"
            )
        if not isinstance(self.settings, Settings):
            raise TypeError(f"settings is {self.settings!r}: give hierfl.Settings(...)")
        if self.patience is not None and self.validation is None:
            raise ValueError("patience needs rows to score: pass validation=")
        for name in ("rounds", "checkpoint_every", "eval_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: it must be 1 or more")


def check_model(model: Any, data: Any) -> None:
    """Refuse what is no method or model, and rows that are no `ClientData`."""
    odd = not isinstance(model, Method) and not callable(model)
    if odd and (isinstance(model, ClientData) or is_frame(model)):
        fix = f", with data = {FRAME}" if is_frame(model) else ""
        raise TypeError(f"model and data are swapped: call fit(model, data, ...){fix}")
    if isinstance(model, str) and "~" in model:
        raise TypeError(
            f"model is the text '{model}': declare it first, "
            f"hierfl.formula({model!r}, clients='hospital')"
        )
    check_method(model)
    if callable(getattr(data, "fit_over", None)):
        raise TypeError(
            f"data is a {type(data).__name__}: call hierfl.nodes.fit(model, nodes, ...)"
        )
    expect_client_data(data, "data")


def with_rows(data: ClientData, call: Call) -> tuple[ClientData, Call]:
    """Return clients with `min_rows` rows or more, and the call for them; warn of the others."""
    least, validation = call.settings.min_rows, call.validation
    lacking = (data.counts < least).nonzero()[:, 0].tolist()
    if not lacking:
        return data, call
    few = list(map(data.names.__getitem__, lacking))
    if len(few) == data.num_clients:
        raise ValueError(
            f"min_rows is {least}, and no client has as many rows: the most are "
            f"{int(data.counts.max())}"
        )
    more = f" and {len(few) - NAMED} more" if len(few) > NAMED else ""
    warnings.warn(
        f"{len(few)} of {data.num_clients} clients have fewer than {least} rows and take no part: "
        f"{', '.join(few[:NAMED])}{more}; fit.personalize(rows) fits their own parameters locally",
        stacklevel=3,
    )
    if validation is not None:
        call = replace(call, validation=_without(validation, few))
    return _without(data, few), call


def _without(data: ClientData, names: list[str]) -> ClientData:
    return data.select([name for name in data.names if name not in set(names)])


def check_method(method: Any) -> None:
    """Refuse what is neither a method nor a model, a function of a batch."""
    if isinstance(method, Method):
        _check_optimizers(method)
    elif (wrong := _no_method(method)) is not None:
        raise TypeError(wrong)


def check_count(name: str, value: object) -> None:
    """Refuse an argument of `fit` that is no integer; `cohort` may be a share, some may be None."""
    wanted = numbers.Real if name == "cohort" else numbers.Integral
    if value is None and name in OR_NONE:
        return
    if not isinstance(value, wanted) or isinstance(value, bool):
        kind = "a count, a share or None" if name == "cohort" else "an integer"
        text = str(value).removesuffix(".0")  # the integer that a float or a string stands for
        fix = f", {name}={text}" if text.isdecimal() and not isinstance(value, bool) else ""
        raise TypeError(f"{name} is {value!r}: it must be {kind}{fix}")


def _no_method(method: Any) -> str | None:
    """Return how to fix a value that is no method; None: it may be a model."""
    kind = "None" if method is None else type(method).__name__
    name: str = getattr(method, "__name__", kind)
    if name in methods.__all__ and getattr(methods, name) is method:
        wraps = "method" in inspect.signature(getattr(methods, name)).parameters
        of = "hierfl.methods.fedavg(model)" if wraps else "model"
        return f"model is '{name}', which is not called yet: hand over hierfl.methods.{name}({of})"
    if name in models.__all__ and getattr(models, name) is method:
        return (
            f"model is '{name}', which makes a model and is not called yet: hand over "
            f"hierfl.models.{name}(...)"
        )
    if isinstance(method, Family):
        return (
            f"model is the guide family '{name}': hand it to a method, "
            f"hierfl.methods.fedsvi(model, guide=hierfl.guides.{name})"
        )
    if isinstance(method, str):
        made = method if method in methods.__all__ else "fedsvi"
        return f"model is the string '{method}': hand over hierfl.methods.{made}(model)"
    if isinstance(method, Program):
        return "model is a Program, which is read already: hand over hierfl.methods.fedsvi(model)"
    # nodes call this too, and a Fit takes half a second to import: only where there is one
    result = sys.modules.get("hierfl.runs.result")
    if result is not None and isinstance(method, result.Fit):
        return "model is a Fit: hand over the method that it was fitted by, fit.method"
    network = isinstance(method, torch.nn.Module) and not isinstance(method, PyroModule)
    if network and not hasattr(method, "__name__"):
        return f"model is the network '{kind}': wrap it, hierfl.methods.fedavg(hierfl.models.network(net))"
    if callable(method) and not isinstance(method, type):
        return None
    return (
        f"model is '{name}', neither a Method nor a model: hand over hierfl.methods.fedsvi(model), "
        "or a model, a function of a batch"
    )


def _check_optimizers(method: Method) -> None:
    """Refuse options of a method that should be optimizers, or step sizes, and are not."""
    recipe = recipe_of(method)
    for name, value in ({} if recipe is None else recipe.options).items():
        rate = value if name == "step_size" else 1.0
        if isinstance(value, Method):
            _check_optimizers(value)
        elif "optimizer" in name and value is not None:
            if isinstance(value, type) or not hasattr(value, "init"):
                kind = getattr(value, "__name__", type(value).__name__)
                raise TypeError(
                    f"{name} is {kind}: give one of hierfl.optimizers with its step size, "
                    "Adam(0.01)"
                )
            name, rate = f"{name}.lr", getattr(value, "lr", 1.0)
        if not isinstance(rate, numbers.Real | Tensor):
            raise TypeError(f"{name} is {rate!r}: it must be a number above 0")
