"""A study of a second or two, which tests change."""

from collections.abc import Mapping, Sequence
from typing import Any

from hierfl.comparisons.read_study import changed
from hierfl.comparisons.study_file import Study

MINIMAL = """
title = "t"
data = { name = "digits", partition = { kind = "equal_classes", clients = 6, train = 16, test = 6 } }
methods = { one = { name = "fedavg" } }
"""
GIVEN: dict[str, Any] = {
    "title": "small",
    "data": {
        "name": "digits",
        "scaling": "pixel",
        "partition": {"kind": "equal_classes", "clients": 6, "classes": 2, "train": 16, "test": 6},
    },
    "run": {"rounds": 3, "evaluations": 4, "batch": 8, "seeds": [0, 1], "compiled": False},
    "evaluation": {"last_rounds": 2, "every": 1},
    "methods": {"fedavg": {}, "local_only": {}},
}


def study(methods: Sequence[Mapping[str, Any]] = (), **changes: Any) -> Study:
    """Return the small study with some keys changed, and other methods where there are some."""
    given = changed(GIVEN, changes)
    if methods:
        given["methods"] = {m.get("label", m["name"]): m for m in methods}
    return Study.model_validate(given)
