"""The overview of the gallery: a thumbnail, a title and a sentence for each of its scripts."""

from __future__ import annotations

import re
from pathlib import Path

GALLERY = Path(__file__).parents[1] / "gallery"
MARK = "<!-- gallery -->"


def scripts() -> list[Path]:
    """Return the scripts in the order of the navigation."""
    config = (GALLERY.parents[1] / "mkdocs.yml").read_text()
    return [
        GALLERY / name for name in re.findall(r"- gallery/(\w+\.py)", config)
    ]


def title(script: Path) -> str:
    """Return the title of a script's page."""
    return script.read_text().split("# # ")[1].split("\n")[0]


def cards() -> str:
    """Return the overview's grid, as HTML."""
    made = []
    for script in scripts():
        name = script.stem
        made.append(
            f'<a class="card" href="{name}.html"><img src="thumbnails/{name}.png" alt="" loading="lazy">'
            f"<span>{title(script)}</span></a>"
        )
    return f'<div class="gallery">\n{"".join(made)}\n</div>'
