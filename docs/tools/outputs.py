"""What the code of a page prints and draws, put below each block when the site is built.

Tutorials and the start page are run then, with their pictures. What other pages print is kept in docs/outputs/, under
a digest of their code. `make docs` calls `python docs/tools/outputs.py`, which runs the pages whose code has changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import signal
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "docs" / "outputs"
BLOCK = re.compile(r"```python\n(.*?)```\n", re.DOTALL)
EXECUTED = (  # pages of docs/, and README.md, the start page
    "index.md",
    "tutorial.md",
    "tutorial_pyro.md",
    "tutorial_method.md",
)
MOST_SECONDS = 900  # for a page
WIDTH = 91  # columns of output on a screen of 1280 px


def with_outputs(markdown: str, page: str) -> str:
    """Return a page of docs/ with what each of its blocks printed and drew below it."""
    codes = BLOCK.findall(markdown)
    if page in EXECUTED:
        below = [shown(outputs) for outputs in executed(codes)]
    elif kept_file(page).exists() and not stale(page):
        kept = json.loads(kept_file(page).read_text())
        below = [as_text(text) for text in kept["printed"]]
    else:
        return markdown
    outputs = iter(below)
    return BLOCK.sub(lambda block: block[0] + next(outputs), markdown)


def executed(codes: list[str]) -> list[list[Any]]:
    """Run blocks one after another in a kernel, and return the outputs of each."""
    import nbformat
    from nbclient import NotebookClient

    cells = [nbformat.v4.new_code_cell(code) for code in codes]
    notebook = nbformat.v4.new_notebook(cells=cells)
    with tempfile.TemporaryDirectory() as folder:
        where = {"metadata": {"path": folder}}
        NotebookClient(
            notebook, kernel_name="pages", timeout=600, resources=where
        ).execute()
    return [cell.outputs for cell in notebook.cells]


def shown(outputs: list[Any]) -> str:
    """Return the standard output and the pictures of a block, as Markdown."""
    text = "".join(
        out["text"] for out in outputs if out.get("name") == "stdout"
    )
    pictures = (out.get("data", {}).get("image/png") for out in outputs)
    images = (
        f'\n<img alt="what the code above draws" src="data:image/png;base64,{picture.strip()}">\n'
        for picture in pictures
        if picture
    )
    return as_text(text) + "".join(images)


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


def keep(page: str) -> None:
    """Run a page's blocks in this process, and keep what each printed."""
    printed = ran(blocks(page), page)
    KEPT.mkdir(exist_ok=True)
    content = {"key": key(page), "printed": printed}
    kept_file(page).write_text(
        json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    )


def ran(codes: list[str], page: str) -> list[str]:
    """Run blocks one after another, as they stand but not compiled, and return what each printed."""
    import matplotlib
    import pandas as pd
    import torch

    import hierfl
    from hierfl.program import public_names

    matplotlib.use("agg")
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(1)
    public_names._MARKED.clear()  # other pages mark models of the same names
    usual, names, printed = hierfl.fit, {"__name__": "page"}, []
    hierfl.fit = partial(usual, settings=hierfl.Settings(compile=False))  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for code in codes:
            out = io.StringIO()
            silent = contextlib.redirect_stderr(io.StringIO())
            with (
                contextlib.redirect_stdout(out),
                silent,
                warnings.catch_warnings(),
                pd.option_context("display.width", 100),
            ):
                warnings.simplefilter("ignore")
                exec(compile(code, page, "exec"), names)
            printed.append(
                out.getvalue()
                .replace(f"{os.path.realpath(folder)}/", "")
                .rstrip()
            )
    hierfl.fit = usual
    return printed


def main(pages: list[str]) -> None:
    """Run the pages named, or those whose output is stale."""
    for page in pages or [name for name in printing() if stale(name)]:
        print(f"running the code of docs/{page}", flush=True)
        signal.alarm(MOST_SECONDS)
        keep(page)
        signal.alarm(0)


if __name__ == "__main__":
    main(sys.argv[1:])
