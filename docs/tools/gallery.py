"""The gallery: a page for each of its scripts, and an overview with their pictures."""

from __future__ import annotations

import re
from pathlib import Path

GALLERY = Path(__file__).parents[1] / "gallery"
MARK = "<!-- gallery -->"


def scripts() -> list[Path]:
    """Return the scripts in the order of the navigation."""
    config = (GALLERY.parents[1] / "mkdocs.yml").read_text()
    return [
        GALLERY / f"{name}.py"
        for name in re.findall(r"- gallery/(\w+)\.md", config)
        if name != "index"
    ]


def page(script: Path) -> str:
    """Return a script of cells as a page: Markdown cells without their marks, code between fences."""
    shown = []
    for cell in script.read_text().split("# %%")[1:]:
        kind, _, body = cell.partition("\n")
        text = re.sub("^# ?", "", body, flags=re.MULTILINE)
        code = f"```python\n{body.strip()}\n```\n"
        shown.append(text if "[markdown]" in kind else code)
    return "\n".join(shown)


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
