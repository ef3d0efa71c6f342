"""Answers about a schema that cannot be those of most nodes: a node that gives one is left out, by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from hierfl.data.consistency import plain_form
from hierfl.formulas.answers import OfCall, OfDesign, OfGroups
from hierfl.formulas.questions import Question
from hierfl.formulas.transforms import Sums
from hierfl.nodes.agreement import MOST_ROWS
from hierfl.nodes.messages import Refused

FAR = 1e6  # times the root mean square of most others' values
MANY, MORE = 10.0, 100.0  # times as many names as most others, and as many more


def check_answer(question: Question, answer: Any, columns: Mapping[str, Any]) -> None:
    """Refuse an answer that no rows give: other columns than the formula's, or sums that contradict each other."""
    if question.kind == "columns":
        if answer.keys() != columns.keys():
            raise Refused("it answers 'columns' with other columns than the formula's")
        if any((one.kind == "number") != (one.sums is not None) for one in answer.values()):
            raise Refused("it answers 'columns' with a number without sums, or sums of names")
    if question.kind == "design" and not answer.constant <= answer.columns.keys():
        raise Refused("it answers 'design' with constants that are no columns")
    for one in _sums_in(answer).values():
        most = one.count * one.squares * (1.0 + 1e-6)
        if not 0 <= one.count < MOST_ROWS or one.total**2 > most + 1e-300:
            raise Refused(f"it answers '{question.kind}' by sums that no rows have")
    if any(not abs(one) < float("inf") for one in getattr(answer, "more", ())):
        raise Refused(f"it answers '{question.kind}' by numbers that are not finite")


def odd_answers(question: Question, found: Mapping[str, Any]) -> dict[str, str]:
    """Return the clients whose answers differ from those of most others where all must agree, and how."""
    said = {client: dict(_forms(question, answer)) for client, answer in found.items()}
    out: dict[str, str] = {}
    for what in dict.fromkeys(name for each in said.values() for name in each):
        values = {client: each.get(what) for client, each in said.items()}
        count = Counter(value for value in values.values() if value)  # "" goes with any
        ((most, times),) = count.most_common(1) or [(None, 0)]
        for client, value in values.items() if 2 * times > sum(count.values()) else ():
            if value and value != most:
                out.setdefault(client, f"{what} is {value!r:.80}, and {most!r:.80} at most others")
    out = {**_apart(found), **_hidden(question, found), **out}
    return out if 2 * len(out) < len(found) else {}


def _forms(question: Question, answer: Any) -> Iterator[tuple[str, Any]]:
    """Yield what must be the same at all clients."""
    if question.kind == "columns":
        for name, one in answer.items():
            yield f"the kind of column '{name}'", one.kind
            yield f"the unit of column '{name}'", one.unit
            yield f"the order of the levels of '{name}'", one.declared if one.is_ordered else ""
    for where, names in _names_in(answer).items():
        for name in names:
            yield f"the name of '{plain_form(name)}' in {where}", name
    if isinstance(answer, OfCall):
        yield f"the number of sums of '{question.text}'", str(len(answer.more))
    if isinstance(answer, OfDesign):
        yield "the columns of its terms", ", ".join(sorted(answer.columns)) or "none"
        yield "the kind of its response", "a number" if answer.response else "a name"


def _apart(found: Mapping[str, Any]) -> dict[str, str]:
    """Return the clients whose values, levels or groups are far from those of most others, of three or more."""
    sizes: dict[tuple[str, float, float], dict[str, float]] = {}
    for client, answer in found.items() if len(found) > 2 else ():
        for name, one in _sums_in(answer).items():
            size = (one.squares / max(one.count, 1)) ** 0.5  # 0: mi() of no known value
            sizes.setdefault((f"the values of '{name}' are", FAR, 0.0), {})[client] = size
        for where, names in _names_in(answer).items():
            sizes.setdefault((f"the names in {where} are", MANY, MORE), {})[client] = len(names)
        if isinstance(answer, OfGroups):
            sizes.setdefault(("its groups are", MANY, MORE), {})[client] = answer.distinct
    out = {}
    for (what, times, more), each in sizes.items():
        usual = median(each.values())
        for client, size in each.items():
            if usual > 0.0 and size > times * usual + more:
                out[client] = f"{what} more than {times:g} times those of most others"
    return out


def _hidden(question: Question, found: Mapping[str, Any]) -> dict[str, str]:
    """Return the clients with levels or groups that nobody may name, so that others cannot agree with them."""
    hidden = []
    if question.kind == "columns":
        return dict(_short_orders(found))
    if question.kind == "outside":
        hidden = [client for client, rows in found.items() if rows]
    several = question.kind == "groups" and any(one.distinct > 1 for one in found.values())
    if several and any(one.counts for one in found.values()):
        hidden = [client for client, one in found.items() if one.distinct > len(one.counts)]
    why = (
        f"too few of its rows have some of its values of '{':'.join(question.by)}' for these to be "
        "named: agree on all of them beforehand, schema(..., levels={...})"
    )
    return dict.fromkeys(hidden, why)


def _short_orders(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the clients whose order of a column's levels lacks some of others' levels."""
    for client, answer in found.items():
        for name, one in answer.items():
            others = {level for each in found.values() for level in each[name].counts or {}}
            if one.is_ordered and (lacks := sorted(others.difference(one.declared))):
                yield client, f"the order of the levels of '{name}' lacks {', '.join(lacks):.80}"


def _names_in(answer: Any) -> dict[str, Mapping[str, int]]:
    """Return the levels and groups that an answer names, by where they are."""
    if isinstance(answer, dict):
        return {f"column '{name}'": one.counts for name, one in answer.items() if one.counts}
    counts = getattr(answer, "counts", None)
    return {"its groups": counts} if counts else {}


def _sums_in(answer: Any) -> dict[str, Sums]:
    if isinstance(answer, OfDesign):
        every = {**answer.columns, "the response": answer.response}
    elif isinstance(answer, dict):
        every = {name: one.sums for name, one in answer.items()}
    else:
        every = {"the argument": getattr(answer, "sums", None)}
    return {name: one for name, one in every.items() if one is not None}
