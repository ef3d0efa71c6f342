"""The tokens of a formula, each with its place in the text, at which errors point."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

TOKENS = re.compile(
    r"""(?P<blank>\s+)
    | (?P<quoted>`[^`]+`)
    | (?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)
    | (?P<name>[^\W\d][\w.]*)
    | (?P<text>"[^"]*"|'[^']*')
    | (?P<sign>\|\||\*\*|==|!=|<=|>=|[-+*/:|~;,()=<>{}.])
    | (?P<other>.)""",
    re.VERBOSE,
)
# What cannot be read -> what to write.
FIXES = {
    "^": "write I(x ** 2) for a power, (a + b) ** 2 for products",
    "~": "write a list, one formula each, as ['y ~ x', 'sigma ~ x']",
    "`": "close the backquote, and put at least one letter inside",
    '"': "close the quote",
    "'": "close the quote",
    ")": "remove the parenthesis without its partner",
}
FIX = "write a sum of columns, products a * b, and functions of columns"


class Token(NamedTuple):
    """A piece of a formula: `kind` is "quoted", "number", "name", "text", "sign", "other" or "end"."""

    kind: str
    text: str
    at: int


def tokens_of(text: str) -> Iterator[Token]:
    """Yield the tokens of a text, and one for its end."""
    for match in TOKENS.finditer(text):
        if match.lastgroup != "blank":
            yield Token(str(match.lastgroup), match[0], match.start())
    yield Token("end", "", len(text))


def refused(text: str, at: int, message: str) -> ValueError:
    """Return an error that shows the line of a formula, with a caret below a place."""
    start = text.rfind("\n", 0, at) + 1
    line = text[start:].partition("\n")[0]
    return ValueError(f"{message}\n    {line}\n    {' ' * (at - start)}^")
