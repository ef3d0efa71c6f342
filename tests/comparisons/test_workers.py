"""Worker processes of studies end with the process that started them."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = """
import os, signal
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from hierfl.comparisons.compare import set_up_worker

pool = ProcessPoolExecutor(2, get_context("spawn"), set_up_worker)
print([pool.submit(os.getpid).result()], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_workers_end_with_their_parent() -> None:
    """A parent that is killed cannot end its workers itself; they must not be left behind."""
    command = [sys.executable, "-c", CODE]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    (pid,) = json.loads(ended.stdout)
    for _ in range(600):
        if not Path(f"/proc/{pid}").exists():
            return
        time.sleep(0.1)
    pytest.fail(f"worker {pid} is still running")
