"""Misspelled arguments of public functions and classes: the error names the nearest one."""

import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest

import hierfl
from hierfl.core.arguments import keywords, spelled
from hierfl.program.sites import Family
from tests.programs import names_in_recipes

# made by hierfl in numbers, or by nobody but hierfl
NOT_BUILDERS = {"ClientBatch", "Clock", "Fit", "LogShare", "Prediction", "Program", "Scaling"}
NOT_BUILDERS |= {"Schema", "Share", "PacBayes", "Bernoulli"}
NOT_BUILDERS |= {"Column", "Constants", "Grouping", "Margin", "Precision", "Simulated", "Compared"}
NOT_BUILDERS |= {"Description", "KaplanMeier", "ProportionalHazards"}


def public() -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """Yield the public functions, classes and families with the options that each takes by name."""
    named = [("hierfl", name) for name in hierfl.__all__]
    named += names_in_recipes()
    named += [("hierfl.data.partition", "dirichlet")]
    named += [("hierfl.nodes", name) for name in ("fit", "station", "by_files", "in_process")]
    for module, name in named:
        thing: Any = getattr(import_module(module), name)
        if not module.startswith("hierfl") or name in NOT_BUILDERS or inspect.ismodule(thing):
            continue
        if module == "hierfl.guides" and not isinstance(thing, Family):
            continue  # posteriors of the shared sites, which a user passes on and does not call
        if isinstance(thing, type) and issubclass(thing, Exception):
            continue
        known = keywords(thing.build if isinstance(thing, Family) else thing)
        options = known and (known[2:] if isinstance(thing, Family) else known)
        if options:
            yield name, thing, options


def test_every_public_builder_names_the_nearest_argument() -> None:
    found = list(public())
    assert len(found) > 90
    for name, thing, options in found:
        for option in options:
            if len(option) < 4:
                continue  # too short for a nearest name
            wrong = option[:-1] + "qz"
            with pytest.raises(TypeError) as caught:
                thing(**{wrong: None})
            message = str(caught.value)
            start = f"{name}() has no argument '{wrong}': "
            assert message.startswith(start), f"decorate {name} with @spelled: {message}"
            assert "did you mean '" in message, (name, message)


def test_the_issues_own_example() -> None:
    misspelled: dict[str, Any] = {"optimiser": None}
    with pytest.raises(TypeError) as caught:
        hierfl.methods.fedavg(lambda batch: None, **misspelled)
    assert str(caught.value) == ("fedavg() has no argument 'optimiser': did you mean 'optimizer'?")


def test_signatures_and_any_names_stay() -> None:
    @spelled
    def build(first: int, /, second: int = 2, *, third: int = 3) -> tuple[int, ...]:
        """Say what it does."""
        return first, second, third

    @spelled
    def free(**options: Any) -> dict[str, Any]:
        return options

    assert list(inspect.signature(build).parameters) == ["first", "second", "third"]
    assert build.__doc__ == "Say what it does."
    assert build(1, second=5) == (1, 5, 3)
    assert free(anything=1) == {"anything": 1}
    call: Callable[..., Any] = build
    with pytest.raises(TypeError, match=r"build\(\) has no argument 'x': it takes second, third"):
        call(1, x=1)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        call()
    assert list(inspect.signature(hierfl.optimizers.SGD).parameters) == ["lr", "momentum"]
