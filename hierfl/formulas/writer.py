"""Lines of a program, and the Python names of its sites."""

from __future__ import annotations

import keyword
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

# Names that the program has already.
TAKEN = {
    *"pyro dist torch hierfl families batch eta loc base means read".split(),
    *keyword.kwlist,
}
NO_NAME = re.compile(r"\W+", re.ASCII)  # what an ASCII name cannot hold


def unique(name: str, taken: Collection[str]) -> str:
    """Return a name, with a number behind it where it is taken."""
    found, i = name, 2
    while found in taken:
        found, i = f"{name}_{i}", i + 1
    return found


def unique_names(prefix: str, texts: Iterable[str]) -> dict[str, str]:
    """Return an ASCII name for each text, none of them twice."""
    found: dict[str, str] = {}
    for text in texts:
        if text not in found:
            found[text] = unique(prefix + NO_NAME.sub("_", text), found.values())
    return found


@dataclass
class Writer:
    """Lines of a program so far, the Python names of its sites' values, and the next line's indent."""

    lines: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    indent: int = 1

    def add(self, line: str) -> None:
        """Add one line."""
        self.lines.append("    " * self.indent + line)

    def sample(self, site: str, distribution: str, *, note: str = "") -> None:
        """Add the line that draws a site."""
        name = self.named(site)
        # Names of levels come from data: none may end the comment and go on as code.
        if not note.isprintable():
            note = "".join(c if c.isprintable() else "?" for c in note)
        self.add(
            f"{name} = pyro.sample({site!r}, {distribution})" + (f"  # {note}" if note else "")
        )

    def named(self, site: str) -> str:
        """Return the Python name of a site, different from all others."""
        if site not in self.names:
            plain = NO_NAME.sub("_", site).strip("_").lower() or "site"
            plain = f"b_{plain}" if plain[0].isdigit() or plain in TAKEN else plain
            self.names[site] = unique(plain, self.names.values())
        return self.names[site]
