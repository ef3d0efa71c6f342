"""Each number of each request, introduction and agreement has bounds, and nothing beyond them is read."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import inspect

from hierfl import Schema
from hierfl.core.typed_json import written
from hierfl.formulas.columns import Column
from hierfl.formulas.questions import Question
from hierfl.formulas.schema import Grouping, Margin
from hierfl.formulas.transforms import Constants
from hierfl.nodes import describing
from hierfl.nodes.agreement import Agreement, Fields, Introduction
from hierfl.nodes.gate import KINDS
from hierfl.nodes.messages import Refused, RoundRequest, StateRequest, read_typed
from hierfl.nodes.node import BareRequest
from hierfl.nodes.stations import Agreed
from tests.nodes.lies import at, places

FORM = Fields({"x": ("float64", 2), "g": ("int64",)}, {}, {}, {}, "torch.float64")
COLUMNS = {"x": Column("number", "", 50.0, 9.0), "sex": Column("category", levels=("f", "m"))}
CURVE = Constants(50.0, 9.0, (1.0, 2.0), 2, ((1.0, 2.0),), 1.5)
GROUPS = {"ward": Grouping("within", most=3, basis=((0.5,),), weights=(1.0,))}
MARGINS: dict[str, Any] = {"design": {"x": Margin(0.5, 1.0)}, "response": Margin(0.5, 1.0)}
SCHEMA = Schema("h", 80, 5, COLUMNS, "y ~ x", {"s(x)": CURVE}, GROUPS, **MARGINS)
AGREEMENT = Agreement(("east", "north"), (40, 41), FORM, {"g": (0, 2)})
MADE: list[Any] = [
    RoundRequest("r", 3, 2),
    StateRequest("draws", "r", 3, 2, True, 10, 7),
    BareRequest("agree"),
    Question("call", 5, text="s(x)", at=(50.0, 9.0), schema=SCHEMA),
    describing.DescriptionRequest("table", 5, ""),
    Agreed(AGREEMENT, 0, None),
    Introduction("north", 40, FORM, {"g": (0, 2)}),
]
BEYOND = {"10**400": 10**400, "-10**400": -(10**400), "NaN": float("nan"), "1e999": "1e999"}
BEYOND |= {"true": True, "a text": "1", "2**70": 2**70, "-2**70": -(2**70), "1e308": 1e308}


def without_bound(kind: Any, path: str = "") -> Iterator[str]:
    """Yield the numbers of a type, and of those inside it, that can be of any size."""
    if isinstance(kind, inspect.Metadata):
        kind = kind.type
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        low = kind.ge if kind.gt is None else kind.gt
        high = kind.le if kind.lt is None else kind.lt
        if low is None or high is None:
            yield path
        return
    for part in getattr(kind, "fields", ()):
        yield from without_bound(part.type, f"{path}.{part.name}")
    inside = [getattr(kind, of, None) for of in ("key_type", "value_type", "item_type")]
    for part in (*inside, *getattr(kind, "types", ()), *getattr(kind, "item_types", ())):
        if part is not None:
            yield from without_bound(part, f"{path}[]")


def test_each_number_of_a_request_has_bounds() -> None:
    kinds = {kind.request for kind in KINDS.values()}
    assert kinds <= {type(made) for made in MADE}, "a new kind of request belongs in MADE"
    unbounded = {type(made): [*without_bound(inspect.type_info(type(made)))] for made in MADE}
    assert {kind: names for kind, names in unbounded.items() if names} == {}


@pytest.mark.parametrize("made", MADE, ids=lambda made: type(made).__name__)
def test_a_number_beyond_its_bounds_is_refused(made: Any) -> None:
    told = json.loads(written(made))
    read_typed(type(made), written(made).encode(), "request")
    taken = []
    for path in places(told):
        value = at(told, path)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        for name, lie in BEYOND.items():
            said = copy.deepcopy(told)
            at(said, path[:-1])[path[-1]] = lie
            content = json.dumps(said).replace('"1e999"', "1e999").encode()
            try:
                read_typed(type(made), content, "request")
            except Refused:
                continue
            is_value = isinstance(value, float) and name in ("2**70", "-2**70")
            taken += [] if is_value else [(path, name)]
    assert taken == []


def test_a_level_that_stands_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="stands twice"):
        Column("category", levels=("f", "f"))
    told = json.loads(written(Column("category", levels=("f", "m"))))
    assert read_typed(Column, told, "column").levels == ("f", "m")
    told["levels"] = ["f", "f"]
    with pytest.raises(Refused, match="stands twice"):
        read_typed(Column, told, "column")
