"""A run whose process is killed by SIGKILL at any moment resumes to the same bytes."""

import os
import subprocess
import sys
from pathlib import Path

from hierfl.runs import checkpoint as state

SCRIPT = """
import os, random, signal, sys, time
import torch
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
from tests.programs import federation, fit, regression
import hierfl
from hierfl.runs import checkpoint as state

folder, rounds = sys.argv[1], 12
method, data = hierfl.methods.fedsvi(regression, batch_size=2, local_steps=1), federation((5, 3, 7, 1, 2))
options = dict(rounds=rounds, seed=3, cohort=3, checkpoint_every=1)

def run(where):
    fit(method, data, checkpoint=where, resume=True, **options)

def child(where):
    pid = os.fork()
    if not pid:
        try:
            run(where)
        finally:
            os._exit(0)
    return pid

fit(method, data, rounds=1)  # the first call is slow, and must not be timed
began = time.perf_counter()
os.waitpid(child(folder + "/whole"), 0)
whole = time.perf_counter() - began
moments = random.Random(0)
reached = []
for attempt in range(3):
    pid = child(folder + "/killed")
    time.sleep(moments.uniform(0.02, 0.35) * whole)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    found = state.checkpoints(folder + "/killed")
    reached.append(int(found[-1].name[-8:]) if found else 0)
print(reached)
os.waitpid(child(folder + "/killed"), 0)
"""


def test_killed_at_random_moments_and_resumed(tmp_path: Path) -> None:
    """A run with a checkpoint every round, killed three times, ends with the bytes of an uninterrupted run."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    told = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        check=True,
        timeout=300,
        env=environment,
        capture_output=True,
        text=True,
    ).stdout
    reached = [int(n) for n in told.strip("[]\n").split(",")]
    assert reached == sorted(reached), "no completed checkpoint is lost"
    assert reached[-1] > 0 and reached[0] < 12, reached
    newest = [state.checkpoints(tmp_path / name)[-1] for name in ("whole", "killed")]
    assert [path.name for path in newest] == ["round-00000012"] * 2
    for part in ("global.safetensors", "local.safetensors"):
        assert (newest[0] / part).read_bytes() == (newest[1] / part).read_bytes()
    records = [state.read_record(path) for path in newest]
    assert [[row["elbo"] for row in r.history] for r in records] == [
        [row["elbo"] for row in records[0].history]
    ] * 2
    assert not list((tmp_path / "killed").glob(".draft-*")), (
        "drafts of killed processes are removed"
    )
