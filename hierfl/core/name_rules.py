"""Names chosen by a rule: a regular expression, prefixes or a predicate."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial

NameRule = str | Sequence[str] | Callable[[str], bool]


def names_by_rule(
    names: Sequence[str], rule: NameRule, *, option: str, of: str = "the module's parameters"
) -> frozenset[str]:
    """Return the names that a rule chooses; every part of the rule must match a name.

    "all", "none", a regular expression that is searched for, prefixes, or a predicate.

    >>> sorted(names_by_rule(["0.weight", "0.bias", "2.bias"], "bias", option="local"))
    ['0.bias', '2.bias']
    """
    if rule in ("all", "none"):
        return frozenset(names if rule == "all" else ())
    rules: dict[str, Callable[[str], object]]
    if callable(rule):
        rules = {"the predicate": rule}
    elif isinstance(rule, str):
        rules = {f"the pattern '{rule}'": re.compile(rule).search}
    else:
        rules = {f"the prefix '{prefix}'": partial(_has_prefix, prefix) for prefix in rule}
    chosen: set[str] = set()
    for what, matches in rules.items():
        found = {name for name in names if matches(name)}
        if not found:
            raise ValueError(f"{option}: {what} matches none of {of}: {', '.join(names)}")
        chosen |= found
    return frozenset(chosen)


def _has_prefix(prefix: str, name: str) -> bool:
    return name.startswith(prefix)
