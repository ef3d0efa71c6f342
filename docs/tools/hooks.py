"""Hooks of mkdocs: the start page, the API reference, the pages outside docs/, and thumbnails."""

from __future__ import annotations

import base64
import html
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

import mkdocs.plugins
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
import gallery
import groups
import outputs
import pages

ROOT = Path(__file__).parents[2]
OUTSIDE = (
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "CITATION.cff",
    "LICENSE",
    "pyproject.toml",
)
FOLDERS = ("benchmarks", "examples", "tests/SLOW.md")
SCRIPT = re.compile(r"^(gallery/\w+)\.py$")
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)\s]+)\)")
THUMBNAILS: dict[
    str, bytes
] = {}  # name of a page of the gallery -> its first picture
CODE_IN_CELL = re.compile(r"`([^`\n]*\\\|[^`\n]*)`")
IMAGE = re.compile(
    r'<img[^>]*src="?data:image/png;base64,([A-Za-z0-9+/=\s]+)', re.DOTALL
)


def on_config(config: Any) -> Any:
    """Add the pages of the reference to the navigation."""
    reference: list[Any] = ["reference/index.md"]
    for group in groups.groups():
        entries: list[Any] = [f"reference/{group.word}/index.md"]
        entries += [
            {title(group, name): pages.address(group, name)}
            for name in group.names
        ]
        reference.append({group.title: entries})
    for entry in config["nav"]:
        if "API reference" in entry:
            entry["API reference"] = reference
    return config


def title(group: groups.Group, name: str) -> str:
    """Return the title of a name's page in the navigation."""
    return pages.short(name).removeprefix(f"{group.word}.")


@mkdocs.plugins.event_priority(100)
def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made."""
    made = {"index.md": (ROOT / "README.md").read_text()}
    made |= pages.reference()
    made |= {
        f"gallery/{script.stem}.md": gallery.page(script)
        for script in gallery.scripts()
    }
    for name in (*OUTSIDE, *_linked()):
        text = (ROOT / name).read_text()
        made[name] = text
    for address, text in made.items():
        files.append(File.generated(config, address, content=text))
    return files


def _linked() -> list[str]:
    """Return the files of FOLDERS that a page links to, pages that these link to included."""
    sources = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
    ]
    names: set[str] = set()
    while sources:
        source = sources.pop()
        for link in LINK.findall(source.read_text()):
            path = (source.parent / link.partition("#")[0]).resolve()
            if path.is_file() and path.is_relative_to(ROOT):
                name = path.relative_to(ROOT).as_posix()
                if name.startswith(FOLDERS) and name not in names:
                    names.add(name)
                    sources += [path] if path.suffix == ".md" else []
    return sorted(names)


def on_page_markdown(
    markdown: str, page: Any, config: Any, files: Files
) -> str:
    """Lead links to where the site has the files: docs/ is its root."""
    source = page.file.src_uri
    outside = source == "index.md" or not (ROOT / "docs" / source).exists()
    if source.startswith("reference/"):
        return markdown
    markdown = markdown.replace(gallery.MARK, gallery.cards())
    markdown = CODE_IN_CELL.sub(_unescaped, markdown)
    here = ROOT / (
        "README.md"
        if source == "index.md"
        else source
        if outside
        else f"docs/{source}"
    )
    base = Path(source).parent

    def led(link: re.Match[str]) -> str:
        target, hash_, anchor = link[1].partition("#")
        path = (here.parent / target).resolve()
        if not path.is_relative_to(ROOT):
            return link[0]
        name = path.relative_to(ROOT).as_posix()
        inside = (
            name.removeprefix("docs/") if name.startswith("docs/") else name
        )
        inside = "index.md" if name == "README.md" else inside
        inside = SCRIPT.sub(r"\1.md", inside)
        return f"]({_relative(inside, base)}{hash_}{anchor})"

    return outputs.with_outputs(LINK.sub(led, markdown), source)


def _unescaped(code: re.Match[str]) -> str:
    """Return code in a cell of a table without the backslashes that GitHub needs before its bars."""
    text = code[1].replace("\\|", "|")
    return f"<code>{html.escape(text).replace('|', '&#124;')}</code>"


def _relative(target: str, base: Path) -> str:
    return posixpath.relpath(target, base.as_posix())


def on_page_content(
    content: str, page: Any, config: Any, files: Files
) -> str:
    """Keep the thumbnail of a page of the gallery, and end it with a link to its script."""
    source = Path(page.file.src_uri)
    if source.parent.name != "gallery" or source.stem == "index":
        return content
    THUMBNAILS[source.stem] = base64.b64decode(IMAGE.findall(content)[0])
    return f'{content}<p><a href="{source.stem}.py" download>Download this page as a script of cells</a></p>'


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Take the script that lets the search run from files from the site itself."""
    shim = _relative(
        "assets/iframe-worker.js", Path(page.file.dest_uri).parent
    )
    return output.replace("https://unpkg.com/iframe-worker/shim", shim)


def on_post_template(output: str, template_name: str, config: Any) -> str:
    """Do the same on the page of wrong addresses, which may be at any depth."""
    return output.replace(
        "https://unpkg.com/iframe-worker/shim", "/assets/iframe-worker.js"
    )


def on_post_build(config: Any) -> None:
    """Write the thumbnails of the gallery."""
    folder = Path(config["site_dir"]) / "gallery" / "thumbnails"
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in THUMBNAILS.items():
        (folder / f"{name}.png").write_bytes(picture)
