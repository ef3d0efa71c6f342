"""What the code of a page prints and draws, put below each block when the site is built.

The gallery, the tutorials and the start page are run then, with their pictures. What other pages print is kept in
docs/outputs/, under a digest of their code and one of the package's. `make docs` calls `python
docs/tools/outputs.py`, which runs the pages whose code has changed. With `--release`, as `make release-check` calls
it, it also runs those that an earlier package printed. Each page runs in a process of its own, forked from one that
has imported what most pages need.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import io
import json
import multiprocessing
import os
import re
import signal
import site
import sys
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "docs" / "outputs"
GALLERY = ROOT / "docs" / "gallery"
PACKAGE = ("hierfl", "models", "guides")  # folders
BLOCK = re.compile(r"```python\n(.*?)```\n", re.DOTALL)
EXECUTED = (  # pages of docs/, and README.md, the start page
    "index.md",
    "tutorial.md",
    "tutorial_pyro.md",
    "tutorial_method.md",
)
IMPORTED = (
    "arviz",
    "hierfl.flower",
    "hierfl.report",
    "matplotlib.pyplot",
    "seaborn",
)
MOST_SECONDS = 900  # for a page
WIDTH = 91  # columns of output on a screen of 1280 px


@dataclass
class Output:
    """What a block printed, and the PNG of each figure that it drew."""

    text: str = ""
    pictures: list[bytes] = field(default_factory=list)


def with_outputs(markdown: str, page: str) -> str:
    """Return a page of docs/ with what each of its blocks printed and drew below it."""
    codes = BLOCK.findall(markdown)
    if codes and (page in EXECUTED or page.startswith("gallery/")):
        below = executed(codes, page)
    elif kept_file(page).exists() and not stale(page):
        kept = json.loads(kept_file(page).read_text())
        below = [Output(text) for text in kept["printed"]]
    else:
        return markdown
    outputs = iter(below)
    return BLOCK.sub(lambda block: block[0] + shown(next(outputs)), markdown)


def executed(codes: list[str], page: str) -> list[Output]:
    """Run a page's blocks in a process of their own, and return what each printed and drew."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    print(f"running the code of {page}", flush=True)
    here = str(
        Path(__file__).parent
    )  # mkdocs imports hooks from a path that it forgets
    with ProcessPoolExecutor(1, context, site.addsitedir, (here,)) as pool:
        return pool.submit(ran, codes, page).result()


def shown(output: Output) -> str:
    """Return what a block printed and drew, as Markdown."""
    images = (
        '\n<img alt="what the code above draws" src="data:image/png;base64,'
        f'{base64.b64encode(picture).decode()}">\n'
        for picture in output.pictures
    )
    return as_text(output.text) + "".join(images)


def as_text(text: str) -> str:
    """Return what a block printed, as Markdown; nothing if it printed nothing."""
    body = text.rstrip()
    lines = body.splitlines()
    # long sentences are wrapped, and wide tables scroll
    wide = any(len(line) > WIDTH and "  " in line.strip() for line in lines)
    kind = '{.text .wide title="Output"}' if wide else 'text title="Output"'
    return f"\n```{kind}\n{body}\n```\n" if body else ""


# ------------------------------------------------------------------ what is kept
def kept_file(page: str) -> Path:
    """Return the file in which a page's output is kept."""
    return KEPT / f"{Path(page).stem}.json"


def printing() -> list[str]:
    """Return the pages of docs/ whose output is kept: those with a block that prints."""
    pages = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
    return [
        page
        for page in pages
        if page not in EXECUTED and "print(" in "".join(blocks(page))
    ]


def blocks(page: str) -> list[str]:
    """Return the Python blocks of a page of docs/."""
    return BLOCK.findall((ROOT / "docs" / page).read_text())


def key(page: str) -> str:
    """Return a digest of a page's code, under which its output is kept."""
    return hashlib.sha256("\n".join(blocks(page)).encode()).hexdigest()[:16]


def stale(page: str) -> bool:
    """Say whether the output of a page is missing, or of other code than stands there now."""
    file = kept_file(page)
    return not file.exists() or json.loads(file.read_text())["key"] != key(
        page
    )


def package() -> str:
    """Return a digest of the package's code and data."""
    digest = hashlib.sha256()
    for folder in PACKAGE:
        for path in sorted((ROOT / folder).rglob("*.*")):
            if path.is_file() and path.suffix != ".pyc":
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def outdated(page: str) -> bool:
    """Say whether the output of a page is stale, or what another package printed."""
    return stale(page) or package() != json.loads(
        kept_file(page).read_text()
    ).get("package")


def keep(page: str) -> None:
    """Run a page's blocks, and keep what each printed."""
    printed = [output.text for output in executed(blocks(page), page)]
    KEPT.mkdir(exist_ok=True)
    content = {"key": key(page), "package": package(), "printed": printed}
    kept_file(page).write_text(
        json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    )


# ------------------------------------------------------------------ a page's process
def ran(codes: list[str], page: str) -> list[Output]:
    """Run blocks one after another, as they stand but not compiled, and return what each printed and drew."""
    import matplotlib
    import pandas as pd
    import torch

    import hierfl

    signal.alarm(MOST_SECONDS)
    torch.manual_seed(0)  # by which torch.nn initializes weights
    matplotlib.use("agg")
    pd.set_option("display.width", 100)
    warnings.simplefilter("ignore")
    eager = hierfl.Settings(compile=False)
    hierfl.fit = partial(hierfl.fit, settings=eager)  # type: ignore[assignment]
    names, outputs = {"__name__": "page"}, []
    beside = page.startswith("gallery/")  # its scripts read files there
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(GALLERY if beside else folder),
    ):
        for code in codes:
            printed = io.StringIO()
            with (
                contextlib.redirect_stdout(printed),
                contextlib.redirect_stderr(io.StringIO()),
            ):
                exec(compile(code, page, "exec"), names)
            text = printed.getvalue().rstrip()
            text = text.replace(f"{os.path.realpath(folder)}/", "")
            outputs.append(Output(text, drawn()))
    return outputs


def drawn() -> list[bytes]:
    """Return the PNG of each open figure, and close them."""
    from matplotlib import pyplot

    pictures = []
    for number in pyplot.get_fignums():
        picture = io.BytesIO()
        pyplot.figure(number).savefig(picture, bbox_inches="tight")
        pictures.append(picture.getvalue())
    pyplot.close("all")
    return pictures


def main(words: list[str]) -> None:
    """Run the pages named, or those whose output is stale; with --release, outdated."""
    parser = argparse.ArgumentParser()
    parser.add_argument("pages", nargs="*")
    parser.add_argument("--release", action="store_true")
    asked = parser.parse_args(words)
    changed = outdated if asked.release else stale
    for page in asked.pages or filter(changed, printing()):
        keep(page)


if __name__ == "__main__":
    main(sys.argv[1:])
