"""The files of a small Flower project, which `hierfl new NAME` writes."""

import keyword
import re
from importlib.metadata import version
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from hierfl.core.arguments import expect_count

LONGEST = 32  # letters of the name of an app of Flower, in which underscores are hyphens
# file of a project -> file of the template, what it is
FILES = {
    "pyproject.toml": ("pyproject.toml", "what Flower reads"),
    "README.md": ("README.md", "how to run it"),
    "LICENSE": ("LICENSE", "the license of the app, Apache-2.0"),
    "NAME/__init__.py": ("__init__.txt", "the package"),
    "NAME/model.py": ("model.txt", "the model"),
    "NAME/data.py": ("data.txt", "the rows of a node"),
    "NAME/app.py": ("app.txt", "the two apps"),
}


def write_project(name: str, parent: Path, *, nodes: int = 4) -> dict[Path, str]:
    """Write a Flower project, a new folder and package `name`; a run waits for `nodes`. Return file -> what it is."""
    _check_name(name)
    expect_count(nodes, "nodes")
    root = parent / name
    if root.exists() and any(root.iterdir()):
        raise FileExistsError(f"'{root}' is not empty: choose another name, or remove it")
    (root / name).mkdir(parents=True, exist_ok=True)
    words = {
        "NODES": str(nodes),
        "APP": name.replace("_", "-"),
        "NAME": name,
        "HIERFL": version("hierfl"),
    }
    written = {}
    for path, (source, what) in FILES.items():
        text = files("hierfl.flower").joinpath("template", source).read_text(encoding="utf-8")
        file = root / path.replace("NAME", name)
        file.write_text(re.sub(r"\b(NODES|APP|NAME|HIERFL)\b", lambda m: words[m[0]], text))
        written[file] = what
    return written


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ValueError(
            f"'{name}' cannot be the name of a package: use lower-case letters, digits and "
            "underscores"
        )
    if len(name) > LONGEST:
        raise ValueError(f"'{name}' is too long for Flower: use {LONGEST} letters at most")
    if find_spec(name) is not None:
        raise ValueError(f"'{name}' is the name of an installed package: choose another")
