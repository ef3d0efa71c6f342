"""What a page is made of: sections of sentences, tables and pictures; and questions with their answers."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import matplotlib as mpl
from matplotlib.figure import Figure

FEW_ROWS = 20  # rows of a client, under which a score of it says little
MINUS = "\N{MINUS SIGN}"


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    words: str
    kind: Literal["text"] = "text"


@dataclass(frozen=True)
class Table:
    """Rows of cells, the first of each its name."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    words: bool = False
    kind: Literal["table"] = "table"


@dataclass(frozen=True)
class Picture:
    """A drawing as a data URI, and in words."""

    source: str
    alt: str
    caption: str
    width: int
    height: int
    kind: Literal["picture"] = "picture"


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading."""

    name: str
    title: str
    blocks: tuple[Text | Table | Picture, ...]


@dataclass(frozen=True)
class Check:
    """A question and its answer.

    Args:
        question: what was asked.
        verdict: "good", "warning", or "not asked" where it cannot be.
        answer: in a sentence, with the numbers.
    """

    question: str
    verdict: Literal["good", "warning", "not asked"]
    answer: str


def answered(question: str, bad: bool, answer: str) -> Check:
    """A question whose answer is bad, or good."""
    return Check(question, "warning" if bad else "good", answer)


@contextmanager
def style() -> Iterator[None]:
    """Drawings whose letters are as large as the page's small ones, and whose bytes depend on their content alone."""
    with mpl.rc_context(
        {"font.size": 9.0, "axes.labelsize": 9.0, "svg.hashsalt": "hierfl", "svg.fonttype": "path"}
    ):
        yield


def picture(figure: Figure, alt: str, caption: str) -> Picture:
    """A figure drawn as SVG, to be shown at its own size, 96 pixels an inch."""
    held = io.BytesIO()
    figure.savefig(held, format="svg", metadata={"Date": None})
    source = "data:image/svg+xml;base64," + base64.b64encode(held.getvalue()).decode()
    width, height = (round(96.0 * float(inches)) for inches in figure.get_size_inches())
    return Picture(source, alt, caption, width, height)


def number(value: float, digits: int = 3) -> str:
    """As people read it: significant digits, a true minus, no 1e+03.

    >>> number(1234.5), number(0.012345), number(12.0), number(float("nan"))
    ('1234', '0.0123', '12.0', 'none')
    """
    if not math.isfinite(value):
        return "none" if math.isnan(value) else "infinite"
    if value == 0.0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    text = (
        f"{value:.{digits - 1}e}" if not -5 < size < 7 else f"{value:.{max(0, digits - 1 - size)}f}"
    )
    return text.replace("-", MINUS)


def listed(names: Sequence[str], most: int = 4) -> str:
    """A few names in a sentence.

    >>> listed(["a", "b"]), listed(["a", "b", "c", "d", "e", "f"])
    ('a and b', 'a, b, c, d and 2 more')
    """
    shown = list(names[:most])
    more = len(names) - len(shown)
    if more:
        shown.append(f"{more} more")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def share(value: float) -> str:
    """A share as whole per cent, never 0 % of something or 100 % of not all.

    >>> share(0.254), share(0.001), share(0.999), share(1.0)
    ('25 %', '< 1 %', '> 99 %', '100 %')
    """
    if 0.0 < value < 0.01:
        return "< 1 %"
    return "> 99 %" if 0.99 < value < 1.0 else f"{100.0 * value:.0f} %"
