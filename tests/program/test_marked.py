"""`hierfl.model` and `hierfl.guide`: what they accept, and what a record finds by them."""

from typing import Any

import pytest

import hierfl
from hierfl import CannotRemake, methods
from hierfl.program.public_names import marked, name_of
from hierfl.program.recipes import describe, remake


@hierfl.model
def plain(batch: Any) -> None:
    """A model under its own name."""


@hierfl.model(name="a name of its own")
def named(batch: Any) -> None:
    """A model under another name."""


@hierfl.guide
def approximate(batch: Any) -> None:
    """A guide."""


def unmarked(batch: Any) -> None:
    """Not marked."""


def factory(scale: float) -> Any:
    def inner(batch: Any) -> float:
        return scale

    return inner


def test_names() -> None:
    assert name_of(plain, "model") == "plain" and name_of(plain, "guide") is None
    assert name_of(named, "model") == "a name of its own"
    assert name_of(unmarked, "model") is None
    assert marked("model", "plain") is plain
    assert marked("model", f"{__name__}:plain") is plain
    assert marked("model", f"{__name__}:unmarked") is None
    assert marked("guide", "plain") is None


def test_a_record_finds_what_is_marked_and_compares_it() -> None:
    record = describe(methods.fedsvi(named, approximate))
    assert record["with"]["model"]["marked"] == "a name of its own"
    again = remake(record)
    assert again.model is named and again.guide is approximate
    record["with"]["model"]["marked"] = "plain"
    record["with"]["model"]["code"]["code"] = "0" * 16
    with pytest.raises(CannotRemake, match="the model marked as 'plain' is not the recorded one"):
        remake(record)


def test_what_is_not_marked_is_handed_in() -> None:
    record = describe(methods.fine_tuned(methods.fedavg(unmarked)))
    with pytest.raises(
        CannotRemake, match=r"is not marked .* @hierfl.model, or pass it: load\(\.\.\., model="
    ):
        remake(record)
    again = remake(record, handed={"model": unmarked})
    assert again.model is unmarked
    with pytest.raises(
        CannotRemake, match=r"the model that was passed is not the recorded one.* it differs in"
    ):
        remake(record, handed={"model": factory(1.0)})
    with pytest.raises(CannotRemake, match="the record has no guide to pass"):
        remake(record, handed={"model": unmarked, "guide": approximate})


def test_a_marked_model_stands_only_where_a_model_may() -> None:
    """A record must not have it called with other arguments than a batch."""
    model = describe(plain)
    for record in (
        model,
        {"sequence": [model]},
        {"made_by": "hierfl.methods.fedsvi", "with": {"model": None, "guide": model}},
        {"made_by": "hierfl.models.likelihood.Likelihood", "with": {"of": model}},
        {
            "made_by": "hierfl.optimizers.TorchOptimizer",
            "with": {"kind": model, "options": {"mapping": {}}},
        },
        {"family": "hierfl.guides.structured", "with": {"shared": model}},
        {"made_by": "hierfl.models.likelihood.Likelihood", "with": {"model": model}},
    ):
        with pytest.raises(
            CannotRemake, match=r"is not (a public name|marked in this program as a guide)"
        ):
            remake(record)


def test_a_name_is_taken_once() -> None:
    first, second = factory(1.0), factory(2.0)
    hierfl.model(first, name="twice")
    assert hierfl.model(second, name="twice") is second, "one function, defined again"
    assert marked("model", "twice") is second
    record = describe(methods.fedsvi(first))
    with pytest.raises(
        ValueError, match=r"factory.<locals>.inner is marked as the model 'twice' already"
    ):
        hierfl.model(unmarked, name="twice")
    with pytest.raises(CannotRemake, match="is not stored in a file; mark it in this program"):
        remake(record)  # the first is no longer the one of that name
    assert hierfl.model(name="a closure")(first) is first
    record = describe(methods.fedsvi(first))
    hierfl.model(second, name="a closure")
    with pytest.raises(CannotRemake, match="differs in model: value of closure's 'scale'"):
        remake(record)


def test_what_has_no_name_needs_one() -> None:
    with pytest.raises(
        TypeError, match=r"no name of its own: give one, hierfl.model\(\.\.\., name="
    ):
        hierfl.model(lambda batch: None)
    with pytest.raises(TypeError, match="is not a guide: mark a function"):
        hierfl.guide("a name")  # type: ignore[call-overload]
