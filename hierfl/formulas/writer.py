"""Lines of a program, and the Python names of its sites."""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass, field

# Names that the program has already.
TAKEN = {
    *(
        "pyro",
        "dist",
        "torch",
        "hierfl",
        "families",
        "batch",
        "eta",
        "loc",
        "base",
        "means",
        "read",
    ),
    *keyword.kwlist,
}


@dataclass
class Writer:
    """Lines of a program, and the Python names of its sites.

    Args:
        lines: so far.
        names: site -> the name of its value.
        indent: of the next line.
    """

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
        note = "".join(c if c.isprintable() else "?" for c in note)
        self.add(
            f"{name} = pyro.sample({site!r}, {distribution})" + (f"  # {note}" if note else "")
        )

    def named(self, site: str) -> str:
        """Return the Python name of a site, different from all others."""
        if site not in self.names:
            plain = re.sub(r"\W+", "_", site, flags=re.ASCII).strip("_").lower() or "site"
            plain = f"b_{plain}" if plain[0].isdigit() or plain in TAKEN else plain
            taken, name, i = set(self.names.values()), plain, 2
            while name in taken:
                name, i = f"{plain}_{i}", i + 1
            self.names[site] = name
        return self.names[site]
