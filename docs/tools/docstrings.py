"""An extension of griffe that puts doctests between fences, so that they are shown as code."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

DOCTEST = re.compile(r"(?:^|(?<=\n))(>>> .*(?:\n(?!\n).+)*)")


class Fenced(Extension):
    """Put the doctests of every docstring between fences."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Change the docstring of an object that was read."""
        if obj.docstring:
            obj.docstring.value = DOCTEST.sub(
                r"```pycon\n\1\n```", obj.docstring.value
            )
