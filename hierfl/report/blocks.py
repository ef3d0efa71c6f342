"""Building blocks of the page: sections of paragraphs, tables and pictures, and checks with their answers."""

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

FEW_ROWS = 20  # with fewer rows, the score of a client is mostly noise
MINUS = "\N{MINUS SIGN}"


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    words: str
    kind: Literal["text"] = "text"


@dataclass(frozen=True)
class Table:
    """A table.

    Args:
        caption: title above the table.
        head: column headers.
        rows: cells of each row; the first is the row's header.
        note: sentence below the table.
        words: whether cells hold text, which is left-aligned and wrapped, rather than numbers.
        kind: tag for the template.
    """

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    words: bool = False
    kind: Literal["table"] = "table"


@dataclass(frozen=True)
class Picture:
    """A figure.

    Args:
        source: SVG as a data URI.
        alt: description for readers who cannot see it.
        caption: sentence below the figure.
        width: pixels.
        height: pixels.
        kind: tag for the template.
    """

    source: str
    alt: str
    caption: str
    width: int
    height: int
    kind: Literal["picture"] = "picture"


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading.

    Args:
        name: id of the section in the page.
        title: heading.
        blocks: content, in order.
    """

    name: str
    title: str
    blocks: tuple[Text | Table | Picture, ...]


@dataclass(frozen=True)
class Check:
    """A question about the fit and its answer.

    Args:
        question: what was checked.
        verdict: "good", "warning", or "not asked" if the question cannot be answered for this fit.
        answer: sentence with the numbers.
    """

    question: str
    verdict: Literal["good", "warning", "not asked"]
    answer: str


def answered(question: str, bad: bool, answer: str) -> Check:
    """Return a check with the verdict "warning" if `bad`, "good" otherwise."""
    return Check(question, "warning" if bad else "good", answer)


@contextmanager
def style() -> Iterator[None]:
    """Draw with text as large as the page's small print, and with SVG bytes that depend on content alone."""
    with mpl.rc_context(
        {"font.size": 9.0, "axes.labelsize": 9.0, "svg.hashsalt": "hierfl", "svg.fonttype": "path"}
    ):
        yield


def picture(figure: Figure, alt: str, caption: str) -> Picture:
    """Return a Matplotlib figure as SVG, to be shown at its own size at 96 pixels per inch."""
    held = io.BytesIO()
    figure.savefig(held, format="svg", metadata={"Date": None})
    source = "data:image/svg+xml;base64," + base64.b64encode(held.getvalue()).decode()
    width, height = (round(96.0 * float(inches)) for inches in figure.get_size_inches())
    return Picture(source, alt, caption, width, height)


def number(value: float, digits: int = 3) -> str:
    """Format a number for readers: `digits` significant digits, a true minus sign, no exponent below 1e7.

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
    """Join names into a phrase; beyond `most` names, give only how many more there are.

    >>> listed(["a", "b"]), listed(["a", "b", "c", "d", "e", "f"])
    ('a and b', 'a, b, c, d and 2 more')
    """
    shown = list(names[:most])
    more = len(names) - len(shown)
    if more:
        shown.append(f"{more} more")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def share(value: float) -> str:
    """Format a share as a whole percentage; only exactly 0 and 1 become "0 %" and "100 %".

    >>> share(0.254), share(0.001), share(0.999), share(1.0)
    ('25 %', '< 1 %', '> 99 %', '100 %')
    """
    if 0.0 < value < 0.01:
        return "< 1 %"
    return "> 99 %" if 0.99 < value < 1.0 else f"{100.0 * value:.0f} %"
