"""Options of methods that are wrappers of any method now. They warn, and go with the next release.

`old_options` accepts an option under its old name, says what to write instead and returns just that: the
wrapped method.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, NamedTuple, ParamSpec

from hierfl.method import Method
from hierfl.methods.averaging_some import averaging_some
from hierfl.methods.by_rows import by_rows
from hierfl.methods.fine_tuned import fine_tuned
from hierfl.methods.over_relaxed import over_relaxed
from hierfl.optimizers import SGD

P = ParamSpec("P")
Call = Mapping[str, Any]


class Old(NamedTuple):
    """An option that became a wrapper.

    Args:
        default: its old default, which asks for nothing.
        wrapper: what to wrap the method in.
        options: (the option's value, all arguments of the call) -> the wrapper's options.
    """

    default: Any
    wrapper: Callable[..., Method]
    options: Callable[[Any, Call], dict[str, Any]]


def old_options(**old: Old) -> Callable[[Callable[P, Method]], Callable[P, Method]]:
    """Let a method accept old options, in the order in which their wrappers are put around it."""

    def decorate(factory: Callable[P, Method]) -> Callable[P, Method]:
        @wraps(factory)
        def made(*args: P.args, **kwargs: P.kwargs) -> Method:
            given = {name: kwargs.pop(name) for name in old if name in kwargs}
            method, text = factory(*args, **kwargs), f"{factory.__name__}(...)"
            call = inspect.signature(factory).bind(*args, **kwargs)
            call.apply_defaults()
            asked = [
                name for name in old if given.get(name, old[name].default) != old[name].default
            ]
            for name in asked:
                options = old[name].options(given[name], call.arguments)
                method = old[name].wrapper(method, **options)
                told = "".join(f", {key}={value!r}" for key, value in options.items())
                text = f"{old[name].wrapper.__name__}({text}{told})"
            if asked:
                warnings.warn(
                    f"{factory.__name__}: {', '.join(asked)} will be removed from its options; write {text}",
                    DeprecationWarning,
                    stacklevel=2,
                )
            return method

        return made

    return decorate


def _of_fedavg(fine_tune: bool, call: Call) -> dict[str, Any]:
    return {
        "steps": 1 if call["unit"] == "epoch" else call["steps"],
        "unit": call["unit"],
        "batch_size": call["batch_size"],
        "optimizer": call["optimizer"],
    }


def _of_pfedbred(fine_tune: int, call: Call) -> dict[str, Any]:
    return {
        "steps": fine_tune,
        "unit": "step",
        "batch_size": call["batch_size"],
        "optimizer": SGD(call["lr"]),
        "when": "every round",
        "mirror": True,
    }


BETA = Old(1.0, over_relaxed, lambda value, call: {"beta": value})
BY_ROWS = Old(False, by_rows, lambda value, call: {})
AVERAGED = Old(1.0, averaging_some, lambda value, call: {"share": value})
FINE_TUNE_OF_FEDAVG = Old(False, fine_tuned, _of_fedavg)
FINE_TUNE_OF_PFEDBRED = Old(0, fine_tuned, _of_pfedbred)
