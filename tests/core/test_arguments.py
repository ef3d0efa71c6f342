"""Arguments of another kind, and misspelled ones: one sentence that names the argument and the fix."""

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import hierfl
from hierfl import Prediction, diagnostics
from hierfl.core.arguments import (
    expect_count,
    expect_integer,
    expect_path,
    keywords,
    shown,
    spelled,
)
from hierfl.program.sites import Family
from tests.programs import federation, fit, logistic, names_in_recipes


@cache
def fitted() -> hierfl.Fit:
    return fit(hierfl.methods.fedsvi(logistic), federation(), rounds=2)


@cache
def predicted() -> Prediction:
    return fitted().predict(federation(), draws=2)


def wrong() -> list[Any]:
    """Return what users hand over by mistake."""
    frame = pd.DataFrame({"x": [1.0]})
    return ["x", 2.5, True, [1], frame, federation(), fitted(), predicted(), fitted().method]


def test_integers_of_any_kind_are_counts() -> None:
    assert expect_count(np.int64(3), "draws") == 3 and expect_integer(-3, "seed") == -3
    with pytest.raises(ValueError, match="draws is 0: it must be 1 or more"):
        expect_count(0, "draws")
    with pytest.raises(TypeError, match=r"rounds is 2\.5: it must be an integer of 0 or more"):
        expect_count(2.5, "rounds", least=0)
    assert shown(predicted()) == "a Prediction" and shown(None) == "None"
    assert expect_path(Path("a"), "folder", "run") == Path("a")


COUNTS: dict[str, Callable[[hierfl.Fit, Any], Any]] = {
    "draws": lambda f, v: f.draws(v),
    "posterior": lambda f, v: f.posterior(v),
    "posterior_predictive": lambda f, v: f.posterior_predictive(v),
    "prior": lambda f, v: f.prior(v),
    "predict": lambda f, v: f.predict(federation(), draws=v),
    "replicate": lambda f, v: f.replicate(federation(), draws=v),
    "predict_from_prior": lambda f, v: hierfl.predict_from_prior(f, federation(), draws=v),
    "personalize": lambda f, v: f.personalize(federation(), rounds=v),
    "summary": lambda f, v: f.summary(draws=v),
    "against_nuts": lambda f, v: diagnostics.against_nuts(f, draws=v),
    "loo": lambda f, v: diagnostics.loo(f, draws=v),
    "corrected": lambda f, v: diagnostics.corrected(f, v),
    "convergence": lambda f, v: diagnostics.convergence(f, draws=v),
    "client_gradients": lambda f, v: diagnostics.client_gradients(f, draws=v),
    "seed": lambda f, v: f.draws(2, seed=v),
    "seed of a prediction": lambda f, v: f.predict(federation(), draws=2, seed=v),
}


@pytest.mark.parametrize("what", COUNTS)
def test_a_count_that_is_no_integer(what: str) -> None:
    """Also 2.5 and True, which range() or torch may take for a number of draws."""
    for value in wrong():
        with pytest.raises((TypeError, ValueError), match=r"(draws|rounds|seed) is .*integer"):
            COUNTS[what](fitted(), value)


FITS: dict[str, Callable[[Any], Any]] = {
    "convergence": diagnostics.convergence,
    "client_gradients": diagnostics.client_gradients,
    "loo": diagnostics.loo,
    "against_nuts": diagnostics.against_nuts,
    "the prior of pac_bayes": lambda v: hierfl.diagnostics.pac_bayes(fitted(), prior=v),
}


@pytest.mark.parametrize("what", FITS)
def test_what_is_no_fit(what: str) -> None:
    for value in wrong():
        if not isinstance(value, hierfl.Fit):
            with pytest.raises(TypeError, match=r"(fit|prior) is .*: pass what hierfl\.fit"):
                FITS[what](value)


PREDICTIONS: dict[str, Callable[[Any], Any]] = {
    "generalization_gap": lambda v: diagnostics.generalization_gap(v, v),
    "generalization_gap of held-out": lambda v: diagnostics.generalization_gap(predicted(), v),
    "out_of_distribution": lambda v: diagnostics.out_of_distribution(predicted(), v),
    "client_scores": diagnostics.client_scores,
    "confidence": diagnostics.confidence,
    "client_rates": lambda v: diagnostics.client_rates(v, predicted().mean[None]),
    "predictive_entropy": diagnostics.predictive_entropy,
    "mutual_information": diagnostics.mutual_information,
    "loss_deviations": diagnostics.loss_deviations,
}


@pytest.mark.parametrize("what", PREDICTIONS)
def test_what_is_no_prediction(what: str) -> None:
    for value in wrong():
        if not isinstance(value, Prediction):
            with pytest.raises(TypeError, match=r"not a Prediction: pass fit\.predict\(rows\)"):
                PREDICTIONS[what](value)


def test_what_is_no_path() -> None:
    with pytest.raises(TypeError, match="folder is a Fit, not a path: name one, such as 'run'"):
        hierfl.load(fitted())  # type: ignore[arg-type]
    for call in (
        hierfl.load,
        fitted().save,
        fitted().report,
        lambda v: fit(fitted().method, federation(), rounds=1, checkpoint=v),
    ):
        with pytest.raises(TypeError, match=r"(folder|path|checkpoint) is a ClientData, not a"):
            call(federation())  # type: ignore[arg-type]


def test_other_arguments_of_another_kind() -> None:
    with pytest.raises(TypeError, match="fits is a Fit: it must be a dict"):
        diagnostics.compare(fitted())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="site is a list: it must be the name of an observed site"):
        fitted().predict(federation(), site=["ill"])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="vectors is a Fit: it must be a tensor"):
        diagnostics.coherence(fitted())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="table is a Prediction: pass client_scores"):
        diagnostics.across_clients(predicted())
    with pytest.raises(TypeError, match=r"local_only is a ClientData: pass what hierfl\.fit"):
        fitted().report("never.html", local_only=federation())  # type: ignore[arg-type]


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
