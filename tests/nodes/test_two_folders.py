"""From nothing to a posterior over two folders by files, as docs/nodes_files.md says it, line by line."""

import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "nodes_files.md").read_text()
FIRST, LAST = "mkdir -p mail/cleveland", "python fit.py"


def script() -> str:
    """Return the lines of the page, from the first to the last of them."""
    block = re.search(rf"    {re.escape(FIRST)}.*?\n    {re.escape(LAST)}\n", PAGE, re.S)
    assert block is not None
    return textwrap.dedent(block[0])


@pytest.mark.slow  # three processes that import torch, and a fit
def test_two_folders_in_the_pages_words(tmp_path: Path) -> None:
    command = tmp_path / "bin" / "hierfl"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m hierfl "$@"\n')
    command.chmod(0o700)
    path = f"{command.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    began = time.monotonic()
    lines = ["bash", "-e", "-c", script() + "kill $(jobs -p)\n"]
    done = subprocess.run(lines, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "two_stage" in done.stdout and "age" in done.stdout
    assert time.monotonic() - began < 300
    for name in ("cleveland", "va"):
        mail = tmp_path / "mail" / name
        answers, requests = (list(mail.glob(f"*.{of}.hfl")) for of in ("answer", "request"))
        assert answers and len(answers) == len(requests)
        assert (tmp_path / name / "left.jsonl").exists()
