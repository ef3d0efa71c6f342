"""Answers about a schema that cannot be those of most clients: who gives one is left out, by name."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from hierfl.data.consistency import plain_form
from hierfl.formulas.answers import OfCall, OfDesign, OfGroups
from hierfl.formulas.credible import sums_in
from hierfl.formulas.levels import value_kind
from hierfl.formulas.questions import Question
from hierfl.formulas.table_answers import LevelsAnswer, NumbersAnswer

KINDS = {NumbersAnswer: "of numbers", LevelsAnswer: "of names"}  # of a description
FAR = 1e4  # times the root mean square of most others' values
MANY, MORE = 10.0, 100.0  # times as many names as most others, and as many more
Values = Mapping[str, Mapping[str, Any]]  # what -> client: a value


def odd_answers(question: Question, answers: Mapping[str, Any]) -> dict[str, str]:
    """Return the clients whose answers differ from those of most others where all must agree, and how."""
    forms: dict[str, dict[str, Any]] = {}
    for client, answer in answers.items():
        for what, value in _forms(question, answer):
            forms.setdefault(what, {})[client] = value
    out = {**_apart(answers), **_hidden(question, answers), **unlike_most(forms)}
    return out if 2 * len(out) < len(answers) else {}


def odd_descriptions(columns: Sequence[str], answers: Mapping[str, Any]) -> dict[str, str]:
    """Return clients with columns of another kind than most others', or far from theirs; no `columns`: of times."""
    kinds: dict[str, dict[str, str]] = {}
    sizes: dict[str, dict[str, float]] = {}
    for name in columns if len(answers) > 2 else ():
        for client, table in answers.items():
            described = [group[name].found for group in table.groups.values()]
            numbers = [of for of in described if isinstance(of, NumbersAnswer)]
            kind = next((KINDS[type(of)] for of in described if of is not None), "")
            kinds.setdefault(f"column '{name}'", {})[client] = kind
            size = max((abs(of.mean) + of.sd for of in numbers), default=0.0)
            sizes.setdefault(f"the values of '{name}' are", {})[client] = size
    for client, of in answers.items() if not columns else ():
        last = max((max(times.ends, default=0.0) for times in of.groups.values()), default=0.0)
        sizes.setdefault("its times are", {})[client] = last
    return unlike_most(kinds) | far_from_most(sizes, FAR)


def unlike_most(values: Values) -> dict[str, str]:
    """Return the clients whose value is not that of more than half; "" goes with any."""
    out: dict[str, str] = {}
    for what, of in values.items():
        count = Counter(value for value in of.values() if value)
        ((usual, times),) = count.most_common(1) or [(None, 0)]
        for client, value in of.items() if 2 * times > sum(count.values()) else ():
            if value and value != usual:
                out.setdefault(client, f"{what} is {value!r:.80}, and {usual!r:.80} at most others")
    return out


def far_from_most(sizes: Values, times: float, more: float = 0.0) -> dict[str, str]:
    """Return the clients, of three or more, with a size far above the median."""
    out = {}
    for what, of in sizes.items():
        usual = median(of.values())
        for client, size in of.items() if len(of) > 2 else ():
            if size > times * usual + more and usual > 0.0:
                out[client] = f"{what} more than {times:g} times those of most others"
    return out


def _forms(question: Question, answer: Any) -> Iterator[tuple[str, Any]]:
    """Yield what must be the same at all clients."""
    if question.kind == "columns":
        for name, of in answer.items():
            yield f"the kind of column '{name}'", of.kind
            yield f"what column '{name}' holds", value_kind(of)
            yield f"the unit of column '{name}'", of.unit
            yield f"the order of the levels of '{name}'", of.declared if of.is_ordered else ""
    for where, names in _names_in(answer).items():
        for name in names:
            yield f"the name of '{plain_form(name)}' in {where}", name
    if isinstance(answer, OfCall):
        yield f"the number of sums of '{question.text}'", str(len(answer.more))
    if isinstance(answer, OfDesign):
        yield "the columns of its terms", ", ".join(sorted(answer.columns)) or "none"
        yield "the kind of its response", "a number" if answer.response else "a name"


def _apart(answers: Mapping[str, Any]) -> dict[str, str]:
    """Return the clients whose values, levels or groups are far from those of most others."""
    values: dict[str, dict[str, float]] = {}
    names: dict[str, dict[str, float]] = {}
    for client, answer in answers.items():
        for name, sums in sums_in(answer).items():
            size = (sums.squares / max(sums.count, 1)) ** 0.5  # 0: mi() of no known value
            values.setdefault(f"the values of '{name}' are", {})[client] = size
        for where, counts in _names_in(answer).items():
            names.setdefault(f"the names in {where} are", {})[client] = len(counts)
        if isinstance(answer, OfGroups):
            names.setdefault("its groups are", {})[client] = answer.distinct
    # columns of curves may be nearly 0 at most others
    return far_from_most(values, FAR, 1.0) | far_from_most(names, MANY, MORE)


def _hidden(question: Question, answers: Mapping[str, Any]) -> dict[str, str]:
    """Return the clients with levels or groups that nobody may name, so that others cannot agree with them."""
    hidden = []
    if question.kind == "columns":
        return dict(_short_orders(answers))
    if question.kind == "outside":
        hidden = [client for client, rows in answers.items() if rows]
    several = question.kind == "groups" and any(of.distinct > 1 for of in answers.values())
    if several and any(of.counts for of in answers.values()):
        hidden = [client for client, of in answers.items() if of.distinct > len(of.counts)]
    why = (
        f"too few of its rows have some of its values of '{':'.join(question.by)}' for these to be "
        "named: agree on all of them beforehand, schema(..., levels={...})"
    )
    return dict.fromkeys(hidden, why)


def _short_orders(answers: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the clients whose order of a column's levels lacks some of others' levels."""
    for client, answer in answers.items():
        for name, of in answer.items():
            others = {level for other in answers.values() for level in other[name].counts or {}}
            if of.is_ordered and (lacks := sorted(others.difference(of.declared))):
                yield client, f"the order of the levels of '{name}' lacks {', '.join(lacks):.80}"


def _names_in(answer: Any) -> dict[str, Mapping[str, int]]:
    """Return the levels and groups that an answer names, by where they are."""
    if isinstance(answer, dict):
        return {f"column '{name}'": of.counts for name, of in answer.items() if of.counts}
    counts = getattr(answer, "counts", None)
    return {"its groups": counts} if counts else {}
