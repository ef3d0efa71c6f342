"""What the code of a page prints and draws, put below each block when the site is built."""

from __future__ import annotations

import re
import tempfile
from typing import Any

BLOCK = re.compile(r"```python\n(.*?)```\n", re.DOTALL)
EXECUTED = (  # pages of docs/, and README.md, the start page; others take minutes
    "index.md",
    "tutorial.md",
    "tutorial_pyro.md",
    "tutorial_method.md",
)


def with_outputs(markdown: str) -> str:
    """Return a page whose blocks have been run, in one kernel, with what each printed and drew."""
    import nbformat
    from nbclient import NotebookClient

    cells = [
        nbformat.v4.new_code_cell(code) for code in BLOCK.findall(markdown)
    ]
    notebook = nbformat.v4.new_notebook(cells=cells)
    with tempfile.TemporaryDirectory() as folder:
        where = {"metadata": {"path": folder}}
        NotebookClient(
            notebook, kernel_name="python3", timeout=600, resources=where
        ).execute()
    outputs = iter([cell.outputs for cell in notebook.cells])
    return BLOCK.sub(lambda block: block[0] + shown(next(outputs)), markdown)


def shown(outputs: list[Any]) -> str:
    """Return the standard output and the pictures of a block, as Markdown."""
    text = "".join(
        out["text"] for out in outputs if out.get("name") == "stdout"
    )
    lines = (
        f'\n```text title="Output"\n{text.rstrip()}\n```\n'
        if text.strip()
        else ""
    )
    pictures = (out.get("data", {}).get("image/png") for out in outputs)
    images = (
        f'\n<img alt="what the code above draws" src="data:image/png;base64,{picture.strip()}">\n'
        for picture in pictures
        if picture
    )
    return lines + "".join(images)
