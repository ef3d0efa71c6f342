"""Building blocks of the page: sections of paragraphs, tables and pictures."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import matplotlib as mpl
from matplotlib.figure import Figure


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    words: str
    kind: Literal["text"] = "text"


@dataclass(frozen=True)
class Table:
    """A table; the first cell of a row is its header, `note` stands below.

    `words`: cells hold text, which is left-aligned and wrapped, rather than numbers.
    """

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    words: bool = False
    kind: Literal["table"] = "table"


@dataclass(frozen=True)
class Picture:
    """A figure: SVG as a data URI, a description in words, width and height in pixels."""

    source: str
    alt: str
    caption: str
    width: int
    height: int
    kind: Literal["picture"] = "picture"


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading; `name` is its id."""

    name: str
    title: str
    blocks: tuple[Text | Table | Picture, ...]


@contextmanager
def style() -> Iterator[None]:
    """Draw with small text, and SVG bytes that depend only on content."""
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
